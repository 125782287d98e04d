//! Opening, checking and rebuilding a store.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::chain::{Chain, Plan};
use super::check_report::CheckReport;
use super::disk::{Clock, Disk, RealDisk};
use super::format::{Head, Kind, SEGMENT_HEADER, segment_id, segment_name};
use super::index::{Index, SledIndex};
use super::inner::{Inner, Place, Segment};
use super::options::StoreOptions;
use super::persistent::{Change, Persistent};
use super::queue::{Item, What};
use super::recover::{File, Files, Found, has_leftovers, list, open_files, recover, scan};
use super::sequence_number::SequenceNumber;
use super::writer::{Active, Writer};
use super::{INDEX, LOCK};
use crate::error::{Error, Result, Status};
use crate::metrics;

/// An opened store: the shared state, the writer, and the lock that keeps other processes out.
pub(super) struct Opened {
    pub(super) inner: Arc<Inner>,
    pub(super) writer: Writer,
    pub(super) lock: Box<dyn Any + Send + Sync>,
}

pub(super) fn open(
    disk: Box<dyn Disk>,
    index: Box<dyn Index>,
    clock: Box<dyn Clock>,
    options: &StoreOptions,
) -> Result<Opened> {
    disk.make_folder().map_err(|error| {
        Error::new(Status::Io, format!("the folder {} can not be made: {error}", disk.path().display())).about("path")
    })?;
    refuse_other_folders(&*disk)?;
    let guard = disk.lock()?;
    let Files { store, mut files, empty } = open_files(&*disk, options.segment_size())?;
    for id in &empty {
        // On failure the next opening finds it empty again.
        let _ = disk.remove(&segment_name(*id));
    }
    let newest = files.iter().map(|file| file.id).chain(empty.iter().copied()).max().unwrap_or(0);
    let existed = newest > 0;
    let mut persistent = Persistent::new(index);
    let mut loaded = persistent.load();
    if has_leftovers(&loaded, &files) {
        // Leftover segments are removed because this index does not list them. So it has to be durable first.
        loaded = persistent.confirm(loaded);
    }
    let known_segments = loaded.next_segment();
    let found = recover(&*disk, store, &mut files, loaded)?;

    let stamp = found.chains.values().map(|chain| chain.stamp).max().unwrap_or(0).max(found.next_seq.0) + 1;
    let inner = Inner::new(disk, clock, options.clone(), store, found.next_seq, stamp);
    inner.next_segment.store((newest + 1).max(known_segments), Relaxed);
    let (active, previous) = adopt(&inner, files, options);
    let counters = &inner.counters;
    counters.torn_tails.store(found.torn_tails + empty.len() as u64, Relaxed);
    counters.damaged_regions.store(found.damaged_regions, Relaxed);
    counters.dropped_owners.store(found.dropped.len() as u64, Relaxed);
    counters.index_rebuilds.store(u64::from(found.rebuilt && existed), Relaxed);
    report(&inner, &found, existed);
    remember(&inner, &mut persistent, found);
    let inner = Arc::new(inner);
    Ok(Opened { writer: Writer::new(inner.clone(), persistent, active, previous), inner, lock: guard })
}

/// Refuses a folder with other files and no store: most likely the path is wrong.
fn refuse_other_folders(disk: &dyn Disk) -> Result<()> {
    let names = list(disk)?;
    let stray =
        names.iter().find(|name| ![LOCK, INDEX, "lost+found"].contains(&name.as_str()) && segment_id(name).is_none());
    match stray {
        Some(name) if !names.iter().any(|name| segment_id(name).is_some()) => {
            let path = disk.path().display();
            let message =
                format!("{path} holds other things, e.g. {name:?}, and no store: name an empty or a new folder");
            Err(Error::invalid("path", message))
        }
        _ => Ok(()),
    }
}

/// Makes segments of the files. The last becomes the active one if it is intact and has room.
fn adopt(inner: &Inner, files: Vec<File>, options: &StoreOptions) -> (Option<Active>, (u64, u64)) {
    let mut last = None;
    let mut previous = (0, 0);
    let mut segments = inner.segments.lock();
    // An earlier process may have been killed after it created a file and before it synced the folder.
    let named = files.is_empty() || inner.disk.sync().is_ok();
    for file in files {
        let segment = Arc::new(Segment::new(file.id, inner.id, file.file, file.end));
        segments.insert(file.id, segment.clone());
        previous = (file.id, file.end);
        // Recovered records are served from now on, so they have to be durable.
        let sound = !file.damaged && segment.file.sync().is_ok() && named;
        segment.stuck.store(file.damaged, Relaxed);
        let room = !file.closed && file.end < options.segment_size();
        last = (sound && room).then_some((segment, file.end));
    }
    let capacity = options.segment_size();
    (last.map(|(segment, end)| Active { segment, end, synced: end, capacity }), previous)
}

fn report(inner: &Inner, found: &Found, existed: bool) {
    let path = inner.disk.path().display();
    if found.rebuilt && existed {
        metrics::store_error("index_rebuild");
        log::warn!("the store {path}: the index was missing or not to be trusted, and was made anew from the segments");
    }
    if found.torn_tails > 0 {
        metrics::store_error("torn_tail");
        log::warn!("the store {path}: the last writes before a crash were not whole and are gone");
    }
    if found.damaged_regions > 0 || !found.dropped.is_empty() {
        metrics::store_error("damage");
        log::warn!(
            "the store {path}: {} damaged places; {} owners left, for what is stored of them may not be current",
            found.damaged_regions,
            found.dropped.len()
        );
    }
}

/// Takes over the recovered state: into memory, into the index, and into the counters of segments with dead records.
fn remember(inner: &Inner, persistent: &mut Persistent, found: Found) {
    let segments = inner.segments.lock().clone();
    for (id, seq) in &found.dead {
        if let Some(segment) = segments.get(id) {
            segment.bury(*seq);
        }
    }
    for (&key, chain) in &found.chains {
        let slots = chain.slots.iter().filter_map(|slot| {
            let segment = segments.get(&slot.place.segment)?;
            segment.live.fetch_add(slot.total_len(), Relaxed);
            Some(slot.at(Place::Disk(segment.clone(), slot.place.offset)))
        });
        let slots = slots.collect();
        let Chain { start, end, newest, stamp, .. } = *chain;
        inner.shard(key).insert(key, Chain { start, end, newest, stamp, slots });
    }
    // Written as cuts: the next opening could not know it otherwise.
    for key in found.dropped {
        let plan = Plan { prev_seq: SequenceNumber::NONE, history_start: 0 };
        let what = What::Cut { from: 0 };
        inner.queue.push(|seq| Item { seq, key, plan, what, promise: None, bytes: 0 }).expect("the queue is open");
    }
    let outcome = if found.rebuilt {
        persistent.rebuild(inner, &found.chains)
    } else if found.tail.is_empty() {
        Ok(())
    } else {
        let tail = found.tail.into_iter().map(|(key, known)| (key, Change::Record(known)));
        persistent.update(inner, tail.collect(), true)
    };
    if let Err(error) = outcome {
        inner.counters.index_errors.fetch_add(1, Relaxed);
        metrics::store_error("index");
        log::warn!("{error}. The store goes on without it");
    }
}

pub(super) fn check(path: &Path) -> Result<CheckReport> {
    let disk = RealDisk::new(path);
    refuse_missing(&disk)?;
    let _guard = disk.lock()?;
    let Files { store, files, empty } = open_files(&disk, 0)?;
    let mut report =
        CheckReport { segments: files.len() as u64, torn_tails: empty.len() as u64, ..CheckReport::default() };
    let count = files.len();
    for (place, file) in files.iter().enumerate() {
        let scan = scan(&disk, file, store, SEGMENT_HEADER, place + 1 == count)?;
        report.file_bytes += file.end;
        report.damaged_regions += scan.damage.len() as u64 + u64::from(file.header.is_none()) + u64::from(file.short);
        report.torn_tails += u64::from(scan.torn.is_some());
        for header in &scan.records {
            match header.kind {
                Kind::Cut => report.removals += 1,
                Kind::Put => report.records += 1,
            }
            let head = Head::read(&*file.file, store, file.id, header.offset, file.end);
            report.corrupt_records += u64::from(head.is_none_or(|head| head.data().is_none()));
        }
    }
    Ok(report)
}

pub(super) fn throw_index_away(path: &Path) -> Result<()> {
    let disk = RealDisk::new(path);
    refuse_missing(&disk)?;
    let _guard = disk.lock()?;
    SledIndex::new(path.join(INDEX)).wipe()
}

fn refuse_missing(disk: &RealDisk) -> Result<()> {
    if list(disk)?.iter().any(|name| segment_id(name).is_some() || name == LOCK) {
        return Ok(());
    }
    Err(Error::new(Status::NotFound, format!("there is no store in {}", disk.path().display())).about("path"))
}
