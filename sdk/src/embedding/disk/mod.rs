//! The lowest floor: a mapped table file, and beside it what was updated since it was built.
//! `sdk/docs/embedding-table.md` describes the files.

mod build;
mod file;
mod format;
mod lock;
mod prefetch;
mod update_format;
mod update_scan;
mod updates;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use file::{Found, TableFile};
use format::{Content, Header, Marker};
use prefetch::prefetch;
use updates::Updates;

use super::floor::{Floor, Rows, Sink};
use super::row::Layout;
use crate::error::{Error, Result, Status};

pub(super) use build::build_if;
pub use build::{Built, build};
pub(super) use updates::path_of as updates_of;

/// How many keys are looked up together while they have to be read from the disk: the more, the more it reads at a time.
const COLD_BLOCK: usize = 32_768;
/// And while they are in memory. The first that are not are waited for one by one until the block is done.
const WARM_BLOCK: usize = 1024;
/// Of the first keys of a lookup it is not known which it will be.
const FIRST_BLOCK: usize = 64;
/// How many keys ahead memory is asked for what a key will need.
const AHEAD: usize = 16;
/// How many steps are made between two looks at the clock.
const CLOCK_INTERVAL: usize = 64;
/// Damage is logged no more often than this.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Which table, and for what.
#[derive(Clone, Debug, Default)]
pub(super) struct DiskOptions {
    /// The table file. What is updated goes into a log beside it, of the same name and `.updates`.
    pub(super) path: PathBuf,
    /// Whether nothing is written, so that others can have the table open too.
    pub(super) read_only: bool,
}

/// A table on disk.
pub(super) struct Disk {
    options: DiskOptions,
    file: TableFile,
    updates: Updates,
    /// Whether the last lookup had to wait for the disk.
    cold: AtomicBool,
    damaged: AtomicU64,
    opened: Instant,
    /// When damage may be logged again, in milliseconds after `opened`.
    quiet_until: AtomicU64,
}

/// About how many bytes the file of a table takes.
pub(super) fn bytes_for(layout: Layout, rows: u64) -> u64 {
    Header::new(layout, rows, 0, 0).file_bytes().unwrap_or(u64::MAX)
}

/// What a table file says of itself.
pub(super) struct Facts {
    /// The number of the table, which no other has.
    pub(super) number: u64,
    pub(super) layout: Layout,
    /// A checksum of all that was in its source, if it is known.
    pub(super) content: Option<u64>,
    /// Whether it has updates.
    pub(super) updated: bool,
}

/// Reads what a table file says of itself; `None` if there is none. One that can not be read is an error: to build it anew
/// would lose its updates.
pub(super) fn look(path: &Path) -> Result<Option<Facts>> {
    let refused = |what: &str| {
        let (file, updates) = (path.display(), updates_of(path));
        let hint = format!("Bring it back from a copy, or remove it and {} to build it anew", updates.display());
        Error::new(Status::Io, format!("the table {file} {what}. {hint} from its source, without its updates"))
    };
    let unreadable = |error: io::Error| refused(&format!("can not be read: {error}"));
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(unreadable)?,
    };
    let length = file.metadata().map_err(unreadable)?.len();
    let mut bytes = [0; format::HEADER_BYTES];
    let bytes = &mut bytes[..length.min(format::HEADER_BYTES as u64) as usize];
    file.read_exact_at(bytes, 0).map_err(unreadable)?;
    let header = Header::decode(bytes, length).map_err(|what| refused(&what))?;
    let marker = Marker::decode(bytes, header.id);
    Ok(Some(Facts {
        number: header.id,
        layout: header.layout,
        content: Content::decode(bytes, header.id).map(|content| content.0),
        updated: marker.is_none_or(|marker| marker.updates > 0) || updates_of(path).exists(),
    }))
}

impl Disk {
    /// Opens a table that was built. It is mapped, not loaded.
    pub(super) fn open(options: &DiskOptions) -> Result<Self> {
        let (file, marker) = TableFile::open(&options.path, options.read_only)?;
        let updates = Updates::open(&options.path, file.header(), marker, options.read_only)?;
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

    /// What its rows look like.
    pub(super) fn layout(&self) -> Layout {
        self.file.header().layout
    }

    /// The number of the table, which no other has.
    pub(super) fn number(&self) -> u64 {
        self.file.header().id
    }

    /// How many keys the table was built with.
    #[cfg(test)]
    pub(super) fn keys(&self) -> u64 {
        self.file.header().keys
    }

    /// How many rows the file has. It is more than its keys if some had several rows.
    #[cfg(test)]
    pub(super) fn records(&self) -> u64 {
        self.file.header().records
    }

    /// How many times something damaged was found since the table was opened.
    #[cfg(test)]
    pub(super) fn damaged(&self) -> u64 {
        self.damaged.load(Relaxed)
    }

    /// Looks a key up in the updates, and tells whether that is all there is to say of it.
    fn fetch_update(&self, key: i64, place: usize, lookup: &mut Lookup<'_, '_>) -> bool {
        let found = self.updates.get(key, |update| (lookup.sink)(place, update.version, update.row));
        found.unwrap_or_else(|error| {
            lookup.fail(key, error.message());
            true
        })
    }

    /// Looks keys up in the file; `places` are theirs in `keys`.
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

    /// Finds where the records of keys are: their numbers, with the place of the key.
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

    /// Reads the records that were found.
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
                Some(row) => (lookup.sink)(place, 0, Some(row)),
                None => lookup.fail(keys[place], "the row is damaged"),
            }
        }
        Ok(())
    }

    /// Counts what was damaged and makes an error of it.
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

impl Floor for Disk {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()> {
        let mut lookup = Lookup { sink, deadline, steps: 0, failed: 0, first: None };
        let mut places: Vec<usize> = (0..keys.len()).collect();
        if let Some(updated) = self.updates.places(keys) {
            // Of a key that was updated, what the file says is old.
            places.retain(|&place| !updated[place] || !self.fetch_update(keys[place], place, &mut lookup));
        }
        // Updates lie beside the file: what was changed is known whatever became of that.
        let outcome = self.file.check_length().and_then(|()| self.fetch_from_file(keys, &places, &mut lookup));
        self.report(lookup.failed, lookup.first).and(outcome)
    }

    /// Nothing lies below that anything could come from.
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

    fn later(&self, keys: &[i64], versions: &[u64], sink: &mut Sink<'_>) -> Vec<(usize, Error)> {
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

    fn changed(&self) -> Vec<i64> {
        self.updates.keys()
    }

    fn memory(&self) -> u64 {
        self.updates.memory()
    }
}

/// One call of `fetch`.
struct Lookup<'a, 'b> {
    sink: &'a mut Sink<'b>,
    deadline: Option<Instant>,
    /// How often the time was asked for.
    steps: usize,
    /// Keys of which nothing can be said, and the first of them with the reason.
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

/// Grows when this thread has something read from a disk: pages it waits for, and what it only asked for.
fn disk_reads() -> i64 {
    // SAFETY: all bits zero are a fine rusage, and the call writes to no more than one.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage
    };
    usage.ru_majflt + usage.ru_inblock
}
