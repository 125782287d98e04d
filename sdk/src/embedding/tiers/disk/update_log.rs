//! The log of the updates since a table file was built. An update is acknowledged when it is durable in the log.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::table_format::{Header, Marker};
use super::update_log_format::{BATCH_BYTES, BatchHeader, ENTRY_EXTRA, LogHeader, Update};
use super::update_log_scan::{Refused, Scanned, scan};
use crate::embedding::tiers::tier::Rows;
use crate::embedding::update::version::Version;
use crate::error::{Error, Result, Status};
use crate::files::{beside, sync_parent};
use crate::sync::{Mutex, MutexGuard, RwLock};

/// A log is compacted when it is larger than twice its live entries and this.
const GARBAGE_BYTES: u64 = 8 << 20;
/// The approximate number of bytes that a compaction writes at a time.
const CHUNK_BYTES: usize = 4 << 20;

pub(super) struct UpdateLog {
    path: PathBuf,
    table: u64,
    row_bytes: usize,
    index: RwLock<Index>,
    /// The number of keys of the index. Read without a lock: most tables have no updates.
    count: AtomicUsize,
    writer: Mutex<Writer>,
}

/// The part that lookups read.
#[derive(Default)]
struct Index {
    /// The offset of the newest entry of each key.
    places: HashMap<i64, u64>,
    /// Created by the first update.
    file: Option<Arc<File>>,
}

/// The state of the end of the log.
#[derive(Default)]
struct Writer {
    /// The number of updates.
    updates: u64,
    /// The end of the log; 0 while it has no header.
    end: u64,
    /// Whether bytes of a failed update may lie behind the end.
    cut: bool,
    /// Whether the directory entry of the log is durable.
    named: bool,
    /// Whether the marker in the table file is durable, with any number of updates.
    marked: bool,
    /// The size from which the log is compacted. A failed compaction raises it.
    compact_from: u64,
}

/// A key and the offset of its entry in its batch.
type Entry = (i64, u64);

/// The path of the update log of a table file.
pub(in crate::embedding) fn path_of(table: &Path) -> PathBuf {
    beside(table, ".updates")
}

/// Removes the update log of a table that was replaced.
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

impl UpdateLog {
    /// Opens the update log of a table. `marker` is `None` if the marker of the table file is damaged. It reads the
    /// whole log, to check every entry and to build the index.
    pub(super) fn open(table: &Path, header: &Header, marker: Option<Marker>, read_only: bool) -> Result<Self> {
        let updates = Self {
            path: path_of(table),
            table: header.id,
            row_bytes: header.layout.row_bytes(),
            index: RwLock::default(),
            count: AtomicUsize::new(0),
            writer: Mutex::default(),
        };
        // The marker is durable before the first update is acknowledged. If it is damaged, there may have been an
        // update.
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
            // A killed process leaves writes and a directory entry that are not synced. A later loss of power must not
            // take back what is read now.
            let synced = file.sync_all().and_then(|()| sync_parent(&self.path));
            synced.map_err(|error| self.cannot("written", &error))?;
        }
        let scanned = match scan(&file, self.table, self.row_bytes) {
            Ok(scanned) => scanned,
            // The first update was not written completely.
            Err(Refused::NoLog) if least == 0 => Scanned::default(),
            // The build that replaced the table ended before it removed the old log.
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

    /// Whether each of the keys was updated; `None` if the table has no updates.
    pub(super) fn places(&self, keys: &[i64]) -> Option<Vec<bool>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let index = self.index.read();
        Some(keys.iter().map(|key| index.places.contains_key(key)).collect())
    }

    /// All updated keys.
    pub(super) fn keys(&self) -> Vec<i64> {
        self.index.read().places.keys().copied().collect()
    }

    /// Calls `give` with the newest update of a key. Returns false if the key was not updated.
    pub(super) fn get(&self, key: i64, give: impl FnOnce(Update<'_>)) -> Result<bool> {
        let Some((file, at)) = self.find(key) else { return Ok(false) };
        let bytes = self.read(&file, at)?;
        give(self.decode(&bytes, key)?.0);
        Ok(true)
    }

    /// Decodes the entry of a key at the beginning of `bytes`. Returns its length too.
    fn decode<'a>(&self, bytes: &'a [u8], key: i64) -> Result<(Update<'a>, usize)> {
        let update = Update::decode(bytes, self.table, self.row_bytes).filter(|(update, _)| update.key == key);
        update.ok_or_else(|| self.wrong(&format!("holds for the key {key} what was not written")))
    }

    /// The log and the offset of the entry of a key.
    fn find(&self, key: i64) -> Option<(Arc<File>, u64)> {
        let index = self.index.read();
        let at = *index.places.get(&key)?;
        Some((Arc::clone(index.file.as_ref()?), at))
    }

    /// Reads as many bytes as the longest entry has. The end of the log may cut them short.
    fn read(&self, file: &File, at: u64) -> Result<Vec<u8>> {
        let mut bytes = vec![0; ENTRY_EXTRA + self.row_bytes];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], at + filled as u64) {
                // The last entry may be a tombstone, which is shorter.
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.cannot("read", &error)),
            }
        }
        bytes.truncate(filled);
        Ok(bytes)
    }

    /// Appends the changes that are not older than the stored versions, and makes them durable. Then calls `mark` with
    /// the number of updates, and whether the marker must be durable: it must be once, after the first update.
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
        // After the log, so that the marker is never ahead of it. If this fails, the update is durable nevertheless.
        mark(Marker { updates: update }, !writer.marked)?;
        writer.marked = true;
        self.compact_if_due(&mut writer);
        Ok(())
    }

    /// The entries of the changes that are not older than the stored versions.
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

    /// The stored version of a key. A damaged entry has none, so that any update replaces it.
    fn version(&self, key: i64) -> Result<Option<Version>> {
        let Some((file, at)) = self.find(key) else { return Ok(None) };
        let bytes = self.read(&file, at)?;
        Ok(self.decode(&bytes, key).ok().map(|(update, _)| update.version))
    }

    /// The log. Creates it if there is none.
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

    /// Compacts the log if most of it is garbage: writes a new log with the newest entry of each key.
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
        // The old log may come back until the directory entry is durable. No update is acknowledged before.
        (writer.end, writer.cut, writer.named) = (end, false, sync_parent(&self.path).is_ok());
        Ok(())
    }

    pub(super) fn memory(&self) -> u64 {
        // 16 bytes for each slot of the hash table, and a control byte; an eighth or more of the slots are free.
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
