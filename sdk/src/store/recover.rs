//! Recovery: finds out what a store holds when it is opened.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;

use super::Key;
use super::chain::{Chain, Known, Location, resolve};
use super::disk::{Disk, DiskFile};
use super::format::{
    Head, Kind, Opening, RecordHeader, SEGMENT_HEADER, SegmentHeader, segment_id, segment_name, try_next_record,
};
use super::index::Meta;
use super::persistent::Loaded;
use super::sequence_number::SequenceNumber;
use crate::error::{Error, Result, Status};

/// A segment file that was found.
pub(super) struct File {
    pub(super) id: u64,
    pub(super) file: Box<dyn DiskFile>,
    /// How many bytes of it are valid.
    pub(super) end: u64,
    pub(super) header: Option<SegmentHeader>,
    /// Whether it is shorter than the segment after it says.
    pub(super) short: bool,
    pub(super) damaged: bool,
    /// Whether no more records may be appended.
    pub(super) closed: bool,
}

/// What was found.
#[derive(Default)]
pub(super) struct Found {
    pub(super) chains: HashMap<Key, Chain<Location>>,
    /// Records that no chain refers to, and their segments.
    pub(super) dead: Vec<(u64, SequenceNumber)>,
    /// Records that the index does not have yet, if the index was intact.
    pub(super) tail: Vec<(Key, Known)>,
    /// Owners that may have had newer records than those that were found.
    pub(super) dropped: Vec<Key>,
    pub(super) next_seq: SequenceNumber,
    pub(super) rebuilt: bool,
    pub(super) damaged_regions: u64,
    pub(super) torn_tails: u64,
}

/// The segment files of a store.
pub(super) struct Files {
    pub(super) store: u64,
    pub(super) files: Vec<File>,
    /// The newest segments, if a loss of power left them empty.
    pub(super) empty: Vec<u64>,
}

/// Opens the segment files in the folder and checks that they are of one store.
pub(super) fn open_files(disk: &dyn Disk, capacity: u64) -> Result<Files> {
    let mut ids: Vec<u64> = list(disk)?.iter().filter_map(|name| segment_id(name)).collect();
    ids.sort_unstable();
    let mut files = Vec::with_capacity(ids.len());
    let count = ids.len();
    for (place, id) in ids.into_iter().enumerate() {
        let mut file = open_file(disk, id, capacity)?;
        // All but the last are only read; a process can not have so many files open. The last may turn out to be empty,
        // and then the one before it is the last.
        if place + 2 < count && file.file.sync().is_ok() {
            file.file.close();
            file.closed = true;
        }
        files.push(file);
    }
    let mut empty = Vec::new();
    while let Some(last) = files.last().filter(|file| file.header.is_none()) {
        // A torn record will be cut off. If it is the first one, the file is empty.
        if !scan(disk, last, 0, SEGMENT_HEADER, true)?.records.is_empty() {
            break;
        }
        empty.extend(files.pop().map(|file| file.id));
    }
    let mut store = files.iter().find_map(|file| file.header.map(|header| header.store));
    for file in &files {
        if store.is_none() {
            store = first_record(disk, file)?.map(|header| header.store);
        }
    }
    let store = store.unwrap_or_else(new_store);
    if let Some(stray) = files.iter().find(|file| file.header.is_some_and(|it| it.store != store || it.id != file.id)) {
        let path = disk.path().join(segment_name(stray.id));
        let message = format!("{} is not a segment of this store, or has another's name: move it away", path.display());
        return Err(Error::invalid("path", message));
    }
    let next: Vec<_> = files.iter().skip(1).map(|file| file.header).collect();
    for (file, next) in files.iter_mut().zip(next) {
        if let Some(next) = next.filter(|next| next.previous == file.id) {
            file.short = file.end < next.previous_len;
            file.end = file.end.min(next.previous_len);
        }
    }
    Ok(Files { store, files, empty })
}

pub(super) fn list(disk: &dyn Disk) -> Result<Vec<String>> {
    disk.list().map_err(|error| {
        let status = if error.kind() == std::io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("the folder {} can not be read: {error}", disk.path().display()))
    })
}

fn open_file(disk: &dyn Disk, id: u64, capacity: u64) -> Result<File> {
    let path = disk.path().join(segment_name(id));
    let failed = |error| Error::new(Status::Io, format!("{} can not be opened: {error}", path.display()));
    let file = disk.open(&segment_name(id), capacity).map_err(failed)?;
    let end = file.len().map_err(failed)?;
    let opening = match end < SEGMENT_HEADER {
        true => Opening::Damaged,
        // A read error is not damage: the next attempt may succeed, and sound data must not be discarded.
        false => SegmentHeader::decode(file.view(0, SEGMENT_HEADER as usize).map_err(failed)?),
    };
    let header = match opening {
        Opening::Good(header) => Some(header),
        Opening::Damaged => None,
        Opening::Foreign(version) => {
            let message =
                format!("{} has format {version}, which this version of Pagoda does not know", path.display());
            return Err(Error::new(Status::Unsupported, message));
        }
    };
    Ok(File { id, file, end, header, short: false, damaged: header.is_none(), closed: false })
}

fn first_record(disk: &dyn Disk, file: &File) -> Result<Option<RecordHeader>> {
    let read = || {
        let head = Head::try_read(&*file.file, 0, file.id, SEGMENT_HEADER, file.end)?;
        if let Some(head) = head {
            return Ok(Some(head.header));
        }
        let Some(at) = try_next_record(&*file.file, 0, file.id, SEGMENT_HEADER, file.end)? else { return Ok(None) };
        Ok(Head::try_read(&*file.file, 0, file.id, at, file.end)?.map(|head| head.header))
    };
    read().map_err(|error| unread(disk, file.id, &error))
}

/// The error for a segment that can not be read. It is not treated as damage: the data may be sound.
fn unread(disk: &dyn Disk, id: u64, error: &io::Error) -> Error {
    let path = disk.path().join(segment_name(id));
    let advice = "Check the disk; if that does not help, move the file away";
    Error::new(Status::Io, format!("{} can not be read: {error}. {advice}", path.display()))
}

/// A number for a new store.
fn new_store() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::SystemTime::now()).max(1)
}

/// The records of a part of a segment.
pub(super) struct Scan {
    pub(super) records: Vec<RecordHeader>,
    /// Where damage begins.
    pub(super) damage: Vec<u64>,
    /// Where the intact records end, if the last writes were torn.
    pub(super) torn: Option<u64>,
}

/// Reads the heads of the records from `from` on. In the last segment, records that were not known to be durable are
/// read in full, up to the first that is not intact.
pub(super) fn scan(disk: &dyn Disk, file: &File, store: u64, from: u64, last: bool) -> Result<Scan> {
    scan_file(file, store, from, last).map_err(|error| unread(disk, file.id, &error))
}

fn scan_file(file: &File, store: u64, from: u64, last: bool) -> io::Result<Scan> {
    let mut scan = Scan { records: Vec::new(), damage: Vec::new(), torn: None };
    let mut at = from;
    while at < file.end {
        match Head::try_read(&*file.file, store, file.id, at, file.end)? {
            Some(head) => {
                at += head.header.total_len();
                scan.records.push(head.header);
            }
            None => {
                scan.damage.push(at);
                at = try_next_record(&*file.file, store, file.id, at, file.end)?.unwrap_or(file.end);
            }
        }
    }
    if last {
        let synced = scan.records.iter().map(|header| header.synced).max().unwrap_or(0).max(from);
        let mut bad = None;
        for header in scan.records.iter().filter(|header| header.offset >= synced) {
            let head = Head::try_read(&*file.file, store, file.id, header.offset, file.end)?;
            if !head.map_or(Ok(false), |head| head.is_whole())? {
                bad = Some(header.offset);
                break;
            }
        }
        scan.torn = bad.into_iter().chain(scan.damage.iter().copied().find(|&at| at >= synced)).min();
        if let Some(torn) = scan.torn {
            scan.records.retain(|header| header.offset < torn);
            scan.damage.retain(|&at| at < torn);
        }
    }
    Ok(scan)
}

/// Combines the index and the segments. Torn ends of files are cut off.
pub(super) fn recover(disk: &dyn Disk, store: u64, files: &mut Vec<File>, loaded: Loaded) -> Result<Found> {
    match loaded {
        Loaded::Good(meta, chains) if meta.store == store => {
            let intact = lost_by(&meta, files).is_none() && remove_leftovers(disk, &meta, files);
            let found = if intact { from_index(disk, store, &meta, chains, files)? } else { None };
            found.map_or_else(|| from_segments(disk, store, files, Some(&meta)), Ok)
        }
        Loaded::Bad(Some(meta)) if meta.store == store => from_segments(disk, store, files, Some(&meta)),
        _ => from_segments(disk, store, files, None),
    }
}

/// If segments are shorter than the index has them, records with numbers below the result may be lost.
fn lost_by(meta: &Meta, files: &[File]) -> Option<SequenceNumber> {
    let ends: BTreeMap<u64, u64> = files.iter().map(|file| (file.id, file.end)).collect();
    let mut full = meta.segments.iter().filter(|covered| covered.len > SEGMENT_HEADER);
    let short = full.any(|covered| ends.get(&covered.id).is_none_or(|&end| end < covered.len));
    short.then_some(meta.next_seq)
}

/// Whether there are segments that the index does not list any more.
pub(super) fn has_leftovers(loaded: &Loaded, files: &[File]) -> bool {
    match loaded {
        Loaded::Good(meta, _) => {
            let named = |file: &File| meta.segments.iter().any(|covered| covered.id == file.id);
            files.iter().any(|file| file.id < meta.next_segment && !named(file))
        }
        Loaded::Bad(_) => false,
    }
}

/// Removes segments that were compacted; their live records are in others.
fn remove_leftovers(disk: &dyn Disk, meta: &Meta, files: &mut Vec<File>) -> bool {
    let named: HashSet<u64> = meta.segments.iter().map(|covered| covered.id).collect();
    let leftover = |file: &File| file.id < meta.next_segment && !named.contains(&file.id);
    if !files.iter().any(leftover) {
        return true;
    }
    // Forget those that were removed even if the removal of another failed: the next opening will not find them.
    files.retain(|file| !leftover(file) || disk.remove(&segment_name(file.id)).is_err());
    !files.iter().any(leftover) && disk.sync().is_ok()
}

/// Chains from the index and the records that were written after it; `None` if they do not fit together.
fn from_index(
    disk: &dyn Disk,
    store: u64,
    meta: &Meta,
    chains: HashMap<Key, Chain<Location>>,
    files: &mut [File],
) -> Result<Option<Found>> {
    let mut found = Found { chains, next_seq: meta.next_seq, ..Found::default() };
    let ends: HashMap<u64, u64> = meta.segments.iter().map(|covered| (covered.id, covered.len)).collect();
    let inside = |slot: &super::chain::Slot<Location>| {
        let end = ends.get(&slot.place.segment).copied().unwrap_or(0);
        slot.place.offset.checked_add(slot.total_len()).is_some_and(|last| last <= end)
    };
    if !found.chains.values().flat_map(|chain| &chain.slots).all(inside) {
        return Ok(None);
    }
    found.dead.extend(meta.segments.iter().map(|covered| (covered.id, covered.lowest_dead)));
    let count = files.len();
    for (place, file) in files.iter_mut().enumerate() {
        let from = ends.get(&file.id).copied().unwrap_or(SEGMENT_HEADER);
        let scan = scan(disk, file, store, from, place + 1 == count)?;
        if !scan.damage.is_empty() {
            return Ok(None);
        }
        found.cut_off(file, scan.torn);
        found.tail.extend(scan.records.iter().map(|header| (header.key, Known::of(header))));
    }
    let mut of_keys: HashMap<Key, Vec<Known>> = HashMap::new();
    for (key, known) in &found.tail {
        of_keys.entry(*key).or_default().push(known.clone());
    }
    // Owners with records after the index were used last, in the order of their newest records.
    let mut of_keys: Vec<_> = of_keys.into_iter().collect();
    of_keys.sort_unstable_by_key(|(_, records)| records.iter().map(|record| record.slot.seq).max());
    let mut stamp = found.chains.values().map(|chain| chain.stamp).max().unwrap_or(0).max(meta.next_seq.0);
    for (key, tail) in of_keys {
        stamp += 1;
        let old = found.chains.remove(&key);
        let records = old.as_ref().map_or_else(Vec::new, Known::of_chain).into_iter().chain(tail);
        found.settle(key, records.collect(), stamp);
    }
    Ok(found.dropped.is_empty().then_some(found))
}

/// Chains from the segments alone.
fn from_segments(disk: &dyn Disk, store: u64, files: &mut [File], meta: Option<&Meta>) -> Result<Found> {
    let mut found =
        Found { rebuilt: true, next_seq: meta.map_or(SequenceNumber::FIRST, |meta| meta.next_seq), ..Found::default() };
    // A key whose newest known record has a lower number than this may have had a newer one that is lost.
    let mut lost = meta.and_then(|meta| lost_by(meta, files)).unwrap_or_default();
    let created_seq = |file: &File| file.header.map_or(SequenceNumber::NONE, |header| header.created_seq);
    let created: Vec<SequenceNumber> = files.iter().map(created_seq).collect();
    let mut of_keys: HashMap<Key, Vec<Known>> = HashMap::new();
    let count = files.len();
    for (place, file) in files.iter_mut().enumerate() {
        let scan = scan(disk, file, store, SEGMENT_HEADER, place + 1 == count)?;
        let regions = scan.damage.len() as u64 + u64::from(file.short);
        found.damaged_regions += regions + u64::from(file.header.is_none());
        if regions > 0 {
            file.damaged = true;
            let next = created[place + 1..].iter().copied().find(|&seq| seq > SequenceNumber::NONE);
            lost = lost.max(next.unwrap_or(SequenceNumber::MAX));
        }
        found.cut_off(file, scan.torn);
        for header in &scan.records {
            found.next_seq = found.next_seq.max(header.seq.next());
            of_keys.entry(header.key).or_default().push(Known::of(header));
        }
    }
    found.next_seq = created.iter().copied().fold(found.next_seq, SequenceNumber::max);
    for (key, records) in of_keys {
        let newest = records.iter().map(|record| record.slot.seq).max().unwrap_or_default();
        found.settle(key, records, newest.0);
        if newest < lost
            && let Some(chain) = found.chains.remove(&key)
        {
            found.dead.extend(chain.slots.iter().map(|slot| (slot.place.segment, slot.seq)));
            found.dropped.push(key);
        }
    }
    Ok(found)
}

impl Found {
    /// Cuts a torn end off a file.
    fn cut_off(&mut self, file: &mut File, torn: Option<u64>) {
        if let Some(torn) = torn {
            self.torn_tails += 1;
            file.end = torn;
            // A file whose torn end can not be cut off must not be appended to.
            file.damaged |= file.file.truncate(torn).is_err();
        }
    }

    /// Works out the chain of a key from all its records.
    fn settle(&mut self, key: Key, mut records: Vec<Known>, stamp: u64) {
        let places: Vec<_> =
            records.iter().filter(|it| it.kind == Kind::Put).map(|it| (it.slot.seq, it.slot.place)).collect();
        self.next_seq = records.iter().map(|record| record.slot.seq.next()).fold(self.next_seq, SequenceNumber::max);
        let outcome = resolve(&mut records, stamp);
        // A cut whose record is lost leaves nothing, like a cut of everything.
        let cut = records.last().is_some_and(|newest| newest.kind == Kind::Cut);
        let chain = match outcome {
            Ok(chain) => chain,
            Err(_) => {
                if !cut {
                    self.dropped.push(key);
                }
                None
            }
        };
        let live: Vec<_> = chain.iter().flat_map(|chain| &chain.slots).map(|slot| (slot.seq, slot.place)).collect();
        let is_live = |it: &(SequenceNumber, Location)| {
            live.binary_search_by_key(&it.0, |slot| slot.0).is_ok_and(|at| live[at] == *it)
        };
        let dead = places.into_iter().filter(|it| !is_live(it));
        self.dead.extend(dead.map(|(seq, place)| (place.segment, seq)));
        if let Some(chain) = chain {
            self.chains.insert(key, chain);
        }
    }
}
