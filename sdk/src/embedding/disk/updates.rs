//! What has changed since a table file was built, in a log beside it. An update is acknowledged when it is durable there.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::build::beside;
use super::format::{Header, Marker};
use super::update_format::{BATCH_BYTES, BatchHeader, ENTRY_EXTRA, LogHeader, Update};
use super::update_scan::{Refused, Scanned, scan};
use crate::embedding::floor::Rows;
use crate::error::{Error, Result, Status};
use crate::files::sync_parent;
use crate::sync::{Mutex, MutexGuard, RwLock};

/// A log is compacted when it has this much more than twice what is of use in it.
const GARBAGE_BYTES: u64 = 8 << 20;
/// About how many bytes a compaction writes at a time.
const CHUNK_BYTES: usize = 4 << 20;

pub(super) struct Updates {
    path: PathBuf,
    table: u64,
    row_bytes: usize,
    index: RwLock<Index>,
    /// How many keys the index has, to be read without a lock: most tables have none.
    count: AtomicUsize,
    writer: Mutex<Writer>,
}

/// What lookups read.
#[derive(Default)]
struct Index {
    /// Where the newest entry of each key begins.
    places: HashMap<i64, u64>,
    /// Made by the first update.
    file: Option<Arc<File>>,
}

/// How far the log is written.
#[derive(Default)]
struct Writer {
    /// How many updates there are.
    updates: u64,
    /// Where the log ends; 0 while it has no header.
    end: u64,
    /// Whether something may lie behind the end, of an update that failed.
    cut: bool,
    /// Whether the log's name is durable.
    named: bool,
    /// Whether the marker is durable, with some number.
    marked: bool,
    /// How long the log is at least when it is next compacted: later after a compaction that failed.
    compact_from: u64,
}

/// A key and where its entry begins among those of its batch.
type Entry = (i64, u64);

/// Where the updates of a table file lie.
pub(in crate::embedding) fn path_of(table: &Path) -> PathBuf {
    beside(table, ".updates")
}

/// Removes the updates of a table that was replaced.
pub(super) fn remove(table: &Path) -> Result<()> {
    let path = path_of(table);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::new(
            Status::Io,
            format!("{}, of the table before, can not be removed: {error}. Remove it by hand", path.display()),
        )),
        _ => Ok(()),
    }
}

impl Updates {
    /// Opens the updates of a table; `marker` is `None` if the table's is damaged. All are read, so that none that is
    /// damaged is found later, and to know their keys.
    pub(super) fn open(table: &Path, header: &Header, marker: Option<Marker>, read_only: bool) -> Result<Self> {
        let updates = Self {
            path: path_of(table),
            table: header.id,
            row_bytes: header.layout.row_bytes(),
            index: RwLock::default(),
            count: AtomicUsize::new(0),
            writer: Mutex::default(),
        };
        // The marker is durable before the first update is acknowledged. Where it is damaged there may have been one.
        let least = marker.map_or(1, |marker| marker.updates);
        let there = updates.load(header.replaced, least, read_only)?;
        let known = updates.writer().updates;
        if known < least {
            let what = if there { "has" } else { "is not there; it had" };
            let message =
                format!("{what} {known} updates of at least {least}: bring it back, or build the table again");
            return Err(updates.wrong(&message));
        }
        Ok(updates)
    }

    /// Reads the log, if there is one.
    fn load(&self, replaced: u64, least: u64, read_only: bool) -> Result<bool> {
        let file = match OpenOptions::new().read(true).write(!read_only).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(|error| self.cannot("opened", &error))?,
        };
        if !read_only {
            // A killed process leaves writes, and a name, that it had not synced. What is read now must not be gone after a
            // later loss of power.
            let synced = file.sync_all().and_then(|()| sync_parent(&self.path));
            synced.map_err(|error| self.cannot("written", &error))?;
        }
        let scanned = match scan(&file, self.table, self.row_bytes) {
            Ok(scanned) => scanned,
            // Left by the first update, which was not written whole.
            Err(Refused::NoLog) if least == 0 => Scanned::default(),
            // The build that replaced the table was ended before it came to this.
            Err(Refused::OfTable(of)) if of == replaced && replaced != 0 => {
                let removed = if read_only { Ok(()) } else { fs::remove_file(&self.path) };
                removed.map_err(|error| self.cannot("removed", &error))?;
                return Ok(false);
            }
            Err(refused) => return Err(self.refused(&refused)),
        };
        let Scanned { places, updates, end } = scanned;
        self.count.store(places.len(), Ordering::Release);
        *self.index.write() = Index { places, file: Some(Arc::new(file)) };
        *self.writer() = Writer { updates, end, cut: true, named: true, ..Writer::default() };
        Ok(true)
    }

    fn refused(&self, refused: &Refused) -> Error {
        match refused {
            Refused::Io(error) => self.cannot("read", error),
            Refused::NoLog => self.wrong("is damaged: it does not begin as it was written. Bring it back from a copy"),
            Refused::OfTable(_) => {
                self.wrong("has updates of another table: bring that table back, or remove the file to lose them")
            }
            Refused::Damaged(what) => self.wrong(&format!("is damaged: {what}. Bring it back from a copy")),
        }
    }

    /// The places in `keys` of those that were updated; `None` if none was.
    pub(super) fn places(&self, keys: &[i64]) -> Option<Vec<bool>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let index = self.index.read();
        Some(keys.iter().map(|key| index.places.contains_key(key)).collect())
    }

    /// Every key that was updated.
    pub(super) fn keys(&self) -> Vec<i64> {
        self.index.read().places.keys().copied().collect()
    }

    /// Gives what is known of a key; false if it was not updated.
    pub(super) fn get(&self, key: i64, give: impl FnOnce(Update<'_>)) -> Result<bool> {
        let Some((file, at)) = self.find(key) else { return Ok(false) };
        let bytes = self.read(&file, at)?;
        give(self.decode(&bytes, key)?.0);
        Ok(true)
    }

    /// The entry of a key that bytes of the log begin with, and how long it is.
    fn decode<'a>(&self, bytes: &'a [u8], key: i64) -> Result<(Update<'a>, usize)> {
        let update = Update::decode(bytes, self.table, self.row_bytes).filter(|(update, _)| update.key == key);
        update.ok_or_else(|| self.wrong(&format!("holds for the key {key} what was not written")))
    }

    /// The log, and where the entry of a key begins in it.
    fn find(&self, key: i64) -> Option<(Arc<File>, u64)> {
        let index = self.index.read();
        let at = *index.places.get(&key)?;
        Some((Arc::clone(index.file.as_ref()?), at))
    }

    /// Bytes of the log, as many as an entry has at most.
    fn read(&self, file: &File, at: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; ENTRY_EXTRA + self.row_bytes];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], at + filled as u64) {
                // The last entry may be shorter.
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.cannot("read", &error)),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Applies changes that are not older than what is there, and makes them durable. `mark` is called then with the
    /// number of updates and whether that has to be durable: at least that there are any.
    pub(super) fn apply(&self, change: &Rows<'_>, mark: impl FnOnce(Marker, bool) -> Result<()>) -> Result<()> {
        let mut writer = self.writer();
        let (body, entries) = self.entries(change)?;
        if entries.is_empty() {
            return Ok(());
        }
        let file = self.file()?;
        let failed = |error: io::Error| self.cannot("written", &error);
        if writer.cut {
            file.set_len(writer.end).map_err(failed)?;
        }
        let update = writer.updates + 1;
        let mut bytes = Vec::with_capacity(body.len() + 128);
        if writer.end == 0 {
            bytes.extend(self.header(0, 0).encode());
        }
        let at = writer.end + bytes.len() as u64;
        bytes.extend(BatchHeader::new(update, entries.len() as u64, &body).encode(self.table, at));
        bytes.extend(&body);
        writer.cut = true;
        file.write_all_at(&bytes, writer.end).and_then(|()| file.sync_data()).map_err(failed)?;
        if file.metadata().map_err(failed)?.nlink() == 0 {
            return Err(self.wrong("was removed while it was open: what is written is lost. Open the table again"));
        }
        if !writer.named {
            sync_parent(&self.path).map_err(failed)?;
            writer.named = true;
        }
        let mut index = self.index.write();
        index.places.extend(entries.into_iter().map(|(key, place)| (key, at + BATCH_BYTES as u64 + place)));
        self.count.store(index.places.len(), Ordering::Release);
        drop(index);
        (writer.updates, writer.end, writer.cut) = (update, writer.end + bytes.len() as u64, false);
        // After the log, so that it is never ahead of that; if it fails the update is there all the same.
        mark(Marker { updates: update }, !writer.marked)?;
        writer.marked = true;
        self.compact_if_due(&mut writer);
        Ok(())
    }

    /// The entries of those changes that are not older than what is there.
    fn entries(&self, change: &Rows<'_>) -> Result<(Vec<u8>, Vec<Entry>)> {
        let (mut body, mut entries) = (Vec::new(), Vec::new());
        for (place, &key) in change.keys.iter().enumerate() {
            let version = change.versions[place];
            if self.version(key)?.is_some_and(|held| held > version) {
                continue;
            }
            entries.push((key, body.len() as u64));
            Update { key, version, row: change.row(place) }.encode(self.table, &mut body);
        }
        Ok((body, entries))
    }

    /// The version of a key that was updated. What is damaged has none: whatever comes is newer.
    fn version(&self, key: i64) -> Result<Option<u64>> {
        let Some((file, at)) = self.find(key) else { return Ok(None) };
        let bytes = self.read(&file, at)?;
        Ok(self.decode(&bytes, key).ok().map(|(update, _)| update.version))
    }

    /// The log, made if it is not there.
    fn file(&self) -> Result<Arc<File>> {
        let mut index = self.index.write();
        if index.file.is_none() {
            let made = OpenOptions::new().read(true).write(true).create_new(true).open(&self.path);
            index.file = Some(Arc::new(made.map_err(|error| self.cannot("made", &error))?));
        }
        Ok(Arc::clone(index.file.as_ref().expect("made above")))
    }

    fn header(&self, base: u64, folded: u64) -> LogHeader {
        LogHeader { table: self.table, row_bytes: self.row_bytes as u32, base, folded }
    }

    /// Writes the log anew with the newest entry of each key alone, if that is worth it.
    fn compact_if_due(&self, writer: &mut Writer) {
        let live = self.count.load(Ordering::Acquire) as u64 * (ENTRY_EXTRA + self.row_bytes) as u64;
        if writer.end <= 2 * live + GARBAGE_BYTES || writer.end < writer.compact_from {
            return;
        }
        let new = beside(&self.path, ".new");
        if let Err(error) = self.compact(&new, writer) {
            let _ = fs::remove_file(&new);
            writer.compact_from = 2 * writer.end;
            log::warn!("{error}. It is not compacted, and stays as it is");
        }
    }

    fn compact(&self, new: &Path, writer: &mut Writer) -> Result<()> {
        let failed = |error: io::Error| self.cannot("compacted", &error);
        let (old, mut order) = {
            let index = self.index.read();
            let order: Vec<(u64, i64)> = index.places.iter().map(|(&key, &at)| (at, key)).collect();
            (Arc::clone(index.file.as_ref().expect("it was just written")), order)
        };
        order.sort_unstable();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(new).map_err(failed)?;
        let header = self.header(writer.updates, order.len() as u64).encode();
        file.write_all_at(&header, 0).map_err(failed)?;
        let (mut end, mut places) = (header.len() as u64, HashMap::with_capacity(order.len()));
        let mut order = order.into_iter().peekable();
        while order.peek().is_some() {
            let (mut body, mut count) = (Vec::new(), 0);
            while let Some((at, key)) = order.next_if(|_| body.len() < CHUNK_BYTES) {
                let bytes = self.read(&old, at)?;
                let (_, length) = self.decode(&bytes, key)?;
                places.insert(key, end + (BATCH_BYTES + body.len()) as u64);
                body.extend(&bytes[..length]);
                count += 1;
            }
            let batch = BatchHeader::new(writer.updates, count, &body).encode(self.table, end);
            file.write_all_at(&[&batch[..], &body].concat(), end).map_err(failed)?;
            end += (batch.len() + body.len()) as u64;
        }
        file.sync_all().and_then(|()| fs::rename(new, &self.path)).map_err(failed)?;
        *self.index.write() = Index { places, file: Some(Arc::new(file)) };
        // Until its name is durable the old log may come back, so no update is acknowledged before.
        (writer.end, writer.cut, writer.named) = (end, false, sync_parent(&self.path).is_ok());
        Ok(())
    }

    pub(super) fn memory(&self) -> u64 {
        // A hash table keeps an eighth or more of its places free, and a byte for each.
        self.index.read().places.capacity() as u64 * 18
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    fn cannot(&self, what: &str, error: &io::Error) -> Error {
        let hint = match error.kind() {
            io::ErrorKind::StorageFull => ". Make room on the disk",
            io::ErrorKind::PermissionDenied => ". Check its permissions, or open the table read-only",
            _ => "",
        };
        self.wrong(&format!("can not be {what}: {error}{hint}"))
    }

    fn wrong(&self, what: &str) -> Error {
        Error::new(Status::Io, format!("{}, with the updates of the table, {what}", self.path.display()))
    }
}
