//! The lowest tier: a mapped table file, and beside it a log of the updates since the file was built.
//! `sdk/docs/embedding-table.md` describes the files.

mod build;
mod file_lock;
mod prefetch;
mod table_file;
mod table_format;
mod update_log;
mod update_log_format;
mod update_log_scan;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use prefetch::prefetch;
use table_file::{Found, TableFile};
use table_format::{Content, Header, Marker};
use update_log::UpdateLog;

use crate::embedding::row::Layout;
use crate::embedding::source::fingerprint::ContentHash;
use crate::embedding::tiers::tier::{Rows, Sink, Tier};
use crate::embedding::update::version::Version;
use crate::error::{Error, Result, Status};

pub(in crate::embedding) use build::build_if;
pub use build::{Built, build};
pub(in crate::embedding) use update_log::path_of as update_log_path;

/// The block size of lookups while rows are read from the disk: a larger block gives the disk more requests at a time.
const COLD_BLOCK: usize = 32_768;
/// The block size while rows are in memory. Rows of such a block that are not are read one by one.
const WARM_BLOCK: usize = 1024;
/// The size of the first block: it tells which of the two sizes to use.
const FIRST_BLOCK: usize = 64;
/// The prefetch distance in keys.
const AHEAD: usize = 16;
/// The number of steps between two reads of the clock.
const CLOCK_INTERVAL: usize = 64;
/// The shortest time between two log messages about damage.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Which table file to open, and how.
#[derive(Clone, Debug, Default)]
pub(in crate::embedding) struct TableFileOptions {
    /// The table file. The update log lies beside it, with `.updates` appended to the name.
    pub(in crate::embedding) path: PathBuf,
    /// Whether to write nothing. Any number of processes can open a table read-only.
    pub(in crate::embedding) read_only: bool,
}

/// A table on disk.
pub(in crate::embedding) struct DiskTier {
    options: TableFileOptions,
    file: TableFile,
    updates: UpdateLog,
    /// Whether the last block was read from the disk.
    cold: AtomicBool,
    damaged: AtomicU64,
    opened: Instant,
    /// When damage may be logged again, in milliseconds since `opened`.
    quiet_until: AtomicU64,
}

/// The approximate size of a table file.
pub(in crate::embedding) fn bytes_for(layout: Layout, rows: u64) -> u64 {
    Header::new(layout, rows, 0, 0).file_bytes().unwrap_or(u64::MAX)
}

/// The id of a table file. It is random: no other table has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::embedding) struct TableId(pub(in crate::embedding) u64);

/// What the header of a table file says.
pub(in crate::embedding) struct TableFileInfo {
    pub(in crate::embedding) id: TableId,
    pub(in crate::embedding) layout: Layout,
    /// The hash of the contents of its source, if it is known.
    pub(in crate::embedding) content: Option<ContentHash>,
    /// Whether the table has updates.
    pub(in crate::embedding) updated: bool,
}

/// Reads the header of a table file; `None` if there is no file. A file that can not be read is an error: rebuilding it
/// would lose its updates.
pub(in crate::embedding) fn inspect(path: &Path) -> Result<Option<TableFileInfo>> {
    let refused = |what: &str| {
        let (file, updates) = (path.display(), update_log_path(path));
        let hint = format!("Bring it back from a copy, or remove it and {} to build it anew", updates.display());
        Error::new(Status::Io, format!("the table {file} {what}. {hint} from its source, without its updates"))
    };
    let unreadable = |error: io::Error| refused(&format!("can not be read: {error}"));
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(unreadable)?,
    };
    let length = file.metadata().map_err(unreadable)?.len();
    let mut bytes = [0; table_format::HEADER_BYTES];
    let bytes = &mut bytes[..length.min(table_format::HEADER_BYTES as u64) as usize];
    file.read_exact_at(bytes, 0).map_err(unreadable)?;
    let header = Header::decode(bytes, length).map_err(|what| refused(&what))?;
    let marker = Marker::decode(bytes, header.id);
    Ok(Some(TableFileInfo {
        id: TableId(header.id),
        layout: header.layout,
        content: Content::decode(bytes, header.id).map(|content| ContentHash(content.0)),
        updated: marker.is_none_or(|marker| marker.updates > 0) || update_log_path(path).exists(),
    }))
}

impl DiskTier {
    /// Opens a table file. It is mapped, not loaded.
    pub(in crate::embedding) fn open(options: &TableFileOptions) -> Result<Self> {
        let (file, marker) = TableFile::open(&options.path, options.read_only)?;
        let updates = UpdateLog::open(&options.path, file.header(), marker, options.read_only)?;
        Ok(Self {
            options: options.clone(),
            file,
            updates,
            cold: AtomicBool::new(true),
            damaged: AtomicU64::new(0),
            opened: Instant::now(),
            quiet_until: AtomicU64::new(0),
        })
    }

    /// The layout of its rows.
    pub(in crate::embedding) fn layout(&self) -> Layout {
        self.file.header().layout
    }

    /// The id of the table file.
    pub(in crate::embedding) fn id(&self) -> TableId {
        TableId(self.file.header().id)
    }

    /// The number of keys of the table file.
    #[cfg(test)]
    pub(in crate::embedding) fn keys(&self) -> u64 {
        self.file.header().keys
    }

    /// The number of rows of the table file. It is larger than the number of keys if some keys had several rows.
    #[cfg(test)]
    pub(in crate::embedding) fn records(&self) -> u64 {
        self.file.header().records
    }

    /// How often damage was found since the table was opened.
    #[cfg(test)]
    pub(in crate::embedding) fn damaged(&self) -> u64 {
        self.damaged.load(Relaxed)
    }

    /// Looks up a key in the update log. Returns whether the table file need not be searched.
    fn fetch_update(&self, key: i64, place: usize, lookup: &mut Lookup<'_, '_>) -> bool {
        let found = self.updates.get(key, |update| (lookup.sink)(place, update.version, update.row));
        found.unwrap_or_else(|error| {
            lookup.fail(key, error.message());
            true
        })
    }

    /// Looks up the keys at `places` in the table file.
    fn fetch_from_file(&self, keys: &[i64], mut places: &[usize], lookup: &mut Lookup<'_, '_>) -> Result<()> {
        let mut found = Vec::new();
        let mut size = FIRST_BLOCK;
        while !places.is_empty() {
            let (block, rest) = places.split_at(size.min(places.len()));
            places = rest;
            let before = disk_reads();
            let cold = self.cold.load(Relaxed);
            let outcome = self.find_block(keys, block, cold, &mut found, lookup);
            let outcome = outcome.and_then(|()| self.read_block(keys, &found, cold, lookup));
            let cold = disk_reads() != before;
            self.cold.store(cold, Relaxed);
            outcome?;
            size = if cold { COLD_BLOCK } else { WARM_BLOCK };
        }
        Ok(())
    }

    /// Finds the record numbers of a block of keys.
    fn find_block(
        &self,
        keys: &[i64],
        block: &[usize],
        cold: bool,
        found: &mut Vec<(u64, usize)>,
        lookup: &mut Lookup<'_, '_>,
    ) -> Result<()> {
        found.clear();
        if cold {
            for &place in block {
                lookup.check_time()?;
                self.file.begin_to_read(self.file.home(keys[place]));
            }
        }
        for (at, &place) in block.iter().enumerate() {
            lookup.check_time()?;
            if let Some(&soon) = block.get(at + AHEAD) {
                prefetch(self.file.home(keys[soon]));
            }
            let key = keys[place];
            if cold && !self.file.can_be_read(self.file.home(key)) {
                lookup.fail(key, "the index can not be read");
                continue;
            }
            match self.file.find(key) {
                Found::Record(record) => {
                    if cold {
                        self.file.begin_to_read(self.file.record(record));
                    }
                    found.push((record, place));
                }
                Found::Absent => {}
                Found::Damaged => lookup.fail(key, "the index is damaged"),
            }
        }
        Ok(())
    }

    /// Reads the records of a block.
    fn read_block(&self, keys: &[i64], found: &[(u64, usize)], cold: bool, lookup: &mut Lookup<'_, '_>) -> Result<()> {
        for (at, &(record, place)) in found.iter().enumerate() {
            lookup.check_time()?;
            if let Some(&(soon, _)) = found.get(at + AHEAD) {
                prefetch(self.file.record(soon));
            }
            if cold && !self.file.can_be_read(self.file.record(record)) {
                lookup.fail(keys[place], "the row can not be read");
                continue;
            }
            match self.file.row(record, keys[place]) {
                Some(row) => (lookup.sink)(place, Version::LOADED, Some(row)),
                None => lookup.fail(keys[place], "the row is damaged"),
            }
        }
        Ok(())
    }

    /// Counts damage and returns it as an error.
    fn report(&self, failed: u64, first: Option<(i64, String)>) -> Result<()> {
        let Some((key, what)) = first else { return Ok(()) };
        let total = self.damaged.fetch_add(failed, Relaxed) + failed;
        let path = self.options.path.display();
        let message = format!(
            "the rows of {failed} keys can not be told from the table {path}, e.g. {key}: {what}. Bring it \
             back from a copy, or build it again without its updates"
        );
        let now = self.opened.elapsed().as_millis() as u64;
        let quiet = self.quiet_until.load(Relaxed);
        let next = now + LOG_INTERVAL.as_millis() as u64;
        if now >= quiet && self.quiet_until.compare_exchange(quiet, next, Relaxed, Relaxed).is_ok() {
            log::error!("{message}; {total} since it was opened");
        }
        Err(Error::new(Status::Io, message))
    }
}

impl Tier for DiskTier {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()> {
        let mut lookup = Lookup { sink, deadline, steps: 0, failed: 0, first: None };
        let mut places: Vec<usize> = (0..keys.len()).collect();
        if let Some(updated) = self.updates.places(keys) {
            // The row of an updated key in the table file is outdated.
            places.retain(|&place| !updated[place] || !self.fetch_update(keys[place], place, &mut lookup));
        }
        // The update log is a file of its own: updates are found even if the table file is damaged.
        let outcome = self.file.check_length().and_then(|()| self.fetch_from_file(keys, &places, &mut lookup));
        self.report(lookup.failed, lookup.first).and(outcome)
    }

    /// Does nothing: there is no tier below.
    fn put(&self, _found: &Rows<'_>, _current: &dyn Fn(usize) -> bool) -> Result<()> {
        Ok(())
    }

    fn update(&self, change: &Rows<'_>) -> Result<()> {
        if self.options.read_only {
            let message = format!(
                "the table {} is open read-only and can not be updated: open it without `read_only`",
                self.options.path.display()
            );
            return Err(Error::new(Status::Unsupported, message));
        }
        if change.len() == 0 {
            return Ok(());
        }
        self.updates.apply(change, |marker, first| self.file.mark(marker, first))
    }

    fn newer_than(&self, keys: &[i64], versions: &[Version], sink: &mut Sink<'_>) -> Vec<(usize, Error)> {
        let Some(updated) = self.updates.places(keys) else { return Vec::new() };
        let mut read = |place: usize| {
            self.updates.get(keys[place], |update| {
                if update.version > versions[place] {
                    sink(place, update.version, update.row);
                }
            })
        };
        (0..keys.len())
            .filter(|&place| updated[place])
            .filter_map(|place| read(place).err().map(|error| (place, error)))
            .collect()
    }

    fn updated_keys(&self) -> Vec<i64> {
        self.updates.keys()
    }

    fn memory(&self) -> u64 {
        self.updates.memory()
    }
}

/// The state of one call of `fetch`.
struct Lookup<'a, 'b> {
    sink: &'a mut Sink<'b>,
    deadline: Option<Instant>,
    /// The number of calls of `check_time`.
    steps: usize,
    /// The number of keys that could not be read, and the first of them with the reason.
    failed: u64,
    first: Option<(i64, String)>,
}

impl Lookup<'_, '_> {
    fn fail(&mut self, key: i64, what: &str) {
        self.failed += 1;
        self.first.get_or_insert_with(|| (key, what.to_owned()));
    }

    fn check_time(&mut self) -> Result<()> {
        let Some(deadline) = self.deadline else { return Ok(()) };
        let look = self.steps.is_multiple_of(CLOCK_INTERVAL);
        self.steps += 1;
        if look && Instant::now() >= deadline {
            let message = "the time for the lookup was over before the disk had given every row";
            return Err(Error::new(Status::Capacity, message));
        }
        Ok(())
    }
}

/// A counter of the disk reads of this thread: page faults, and reads that it only requested.
fn disk_reads() -> i64 {
    // SAFETY: all bits zero are a fine rusage, and the call writes to no more than one.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_majflt + usage.ru_inblock
}
