//! The writer thread: writes batches from the queue, segment after segment.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Key;
use super::chain::{Known, Plan};
use super::disk::Disk;
use super::format::{Kind, RecordHeader, SEGMENT_HEADER, SegmentHeader, align, layer_sums, segment_name};
use super::inner::{Inner, Place, Segment, truncate};
use super::options::Durability;
use super::persistent::{Change, Persistent};
use super::queue::{Item, What, Work};
use super::sequence_number::SequenceNumber;
use crate::error::{Error, Result, Status};
use crate::metrics;

/// About how many bytes are written before a sync.
const BATCH_BYTES: u64 = 32 << 20;
/// By how many records the persistent index may lag behind.
const MAX_CHANGES: usize = 1 << 14;

pub(super) struct Writer {
    pub(super) inner: Arc<Inner>,
    pub(super) persistent: Persistent,
    pub(super) active: Option<Active>,
    /// The last segment, and how many bytes of it are valid; the header of the next one says so.
    pub(super) previous: (u64, u64),
    /// The same when the current batch began.
    before: (u64, u64),
    /// Changes that the persistent index does not have yet.
    pub(super) changes: Vec<(Key, Change)>,
    /// Segments that the current batch writes to: their length before, and whether the batch made them.
    touched: Vec<(Arc<Segment>, u64, bool)>,
    /// What failed batches left in the files: new segments, and bytes at the end of others.
    unmade: BTreeSet<u64>,
    uncut: Vec<(Arc<Segment>, u64)>,
    /// Compacted segments whose files may still be there, and the lowest dead sequence number in each.
    pub(super) leaving: BTreeMap<u64, SequenceNumber>,
    /// Cuts that are owed: after a failed write the files may have records that memory does not. These cuts remove
    /// them, as soon as writing works again.
    pub(super) owed: BTreeMap<Key, Owed>,
    /// Keys of failed writes. Queued records of such a key with a lower number continue one that was not written.
    failed: HashMap<Key, SequenceNumber>,
    /// Every queued record with a lower sequence number is written, or has failed.
    pub(super) done: SequenceNumber,
    warned: Option<Instant>,
    pub(super) patience: u64,
    published: i64,
}

/// The segment that is appended to.
pub(super) struct Active {
    pub(super) segment: Arc<Segment>,
    pub(super) end: u64,
    pub(super) synced: u64,
    pub(super) capacity: u64,
}

pub(super) struct Owed {
    seq: SequenceNumber,
    from: u64,
    plan: Plan,
}

impl Writer {
    pub(super) fn new(inner: Arc<Inner>, persistent: Persistent, active: Option<Active>, previous: (u64, u64)) -> Self {
        Self {
            done: inner.queue.next_seq(),
            inner,
            persistent,
            active,
            previous,
            before: previous,
            changes: Vec::new(),
            touched: Vec::new(),
            unmade: BTreeSet::new(),
            uncut: Vec::new(),
            leaving: BTreeMap::new(),
            owed: BTreeMap::new(),
            failed: HashMap::new(),
            warned: None,
            patience: 0,
            published: 0,
        }
    }

    pub(super) fn run(&mut self) {
        self.publish();
        loop {
            match self.inner.queue.next(BATCH_BYTES) {
                Work::Items(items) => self.batch(items),
                Work::Compact(promise) => promise.keep(self.compact_all()),
                Work::End => break,
            }
            self.maintain();
            self.publish();
        }
        if !self.owed.is_empty() {
            self.batch(Vec::new());
        }
        // If it fails, the next opening finds what is left.
        let _ = self.take_back();
        if self.sync_active() {
            self.persist(true);
        }
    }

    /// Writes everything that is queued now. Items that are queued meanwhile may wait: callers that never pause would
    /// keep this from returning.
    pub(super) fn drain(&mut self) {
        let until = self.inner.queue.next_seq();
        loop {
            let items = self.inner.queue.now(BATCH_BYTES);
            if items.is_empty() {
                return;
            }
            self.batch(items);
            // Checked after the first batch: barriers have no number of their own.
            if self.done >= until {
                return;
            }
        }
    }

    pub(super) fn batch(&mut self, items: Vec<Item>) {
        let bytes = items.iter().map(|item| item.bytes).sum();
        let after = items.iter().filter(|item| !matches!(item.what, What::Barrier)).map(|item| item.seq.next()).max();
        let (items, orphans): (Vec<_>, Vec<_>) =
            items.into_iter().partition(|item| self.failed.get(&item.key).is_none_or(|&failed| failed < item.seq));
        for orphan in orphans {
            let message = "an earlier piece of this owner could not be written, so this one was not either";
            if let Some(promise) = orphan.promise {
                promise.keep(Err(Error::new(Status::Io, message)));
            }
        }
        let before = self.inner.next_segment.load(Relaxed);
        let outcome = self.write_all(&items);
        match &outcome {
            Ok(placed) => self.commit(&items, placed),
            Err(error) => self.fail(&items, error),
        }
        self.done = after.unwrap_or(self.done).max(self.done);
        let done = self.done;
        self.failed.retain(|_, failed| *failed > done);
        // The index must not cover records that a loss of power could remove.
        if outcome.is_ok() {
            let rolled = before != self.inner.next_segment.load(Relaxed);
            let power = self.inner.options.durability == Durability::Power;
            if power || (rolled || self.changes.len() > MAX_CHANGES) && self.sync_active() {
                self.persist(rolled);
            }
        }
        self.inner.queue.release(bytes);
        for promise in items.into_iter().filter_map(|item| item.promise) {
            promise.keep(outcome.as_ref().map(|_| ()).map_err(Clone::clone));
        }
    }

    /// Writes the owed cuts, then the items, and syncs if the durability asks for it.
    fn write_all(&mut self, items: &[Item]) -> Result<Vec<Option<RecordHeader>>> {
        self.take_back()?;
        self.begin();
        let owed: Vec<_> =
            self.owed.iter().map(|(&key, owed)| self.cut_header(key, owed.seq, owed.from, owed.plan)).collect();
        let mut late = Vec::with_capacity(owed.len());
        for header in owed {
            late.push(self.append(header, &[], &[], &[])?);
        }
        let mut placed = Vec::with_capacity(items.len());
        for item in items {
            let header = match &item.what {
                What::Barrier => None,
                What::Cut { from } => {
                    let header = self.cut_header(item.key, item.seq, *from, item.plan);
                    Some(self.append(header, &[], &[], &[])?)
                }
                What::Put(record) => {
                    let header = RecordHeader {
                        kind: Kind::Put,
                        start: record.start,
                        tokens: record.tokens,
                        layers: record.layers,
                        layer_bytes: (record.data.len() / record.layers as usize) as u64,
                        tag_len: record.tag.len() as u32,
                        ..self.cut_header(item.key, item.seq, 0, item.plan)
                    };
                    Some(self.append(header, &layer_sums(record), &record.tag, &record.data)?)
                }
            };
            placed.push(header);
        }
        if self.inner.options.durability == Durability::Power {
            self.sync()?;
        }
        self.owed.clear();
        self.changes.extend(late.iter().map(|header| (header.key, Change::Record(Known::of(header)))));
        self.end();
        Ok(placed)
    }

    fn cut_header(&self, key: Key, seq: SequenceNumber, from: u64, plan: Plan) -> RecordHeader {
        RecordHeader {
            kind: Kind::Cut,
            store: self.inner.id,
            segment: 0,
            offset: 0,
            seq,
            prev_seq: plan.prev_seq,
            key,
            history_start: plan.history_start,
            start: from,
            tokens: 0,
            layers: 0,
            layer_bytes: 0,
            tag_len: 0,
            time: self.inner.clock.now(),
            synced: 0,
        }
    }

    /// Begins a batch. An error before its end restores the files to their present state.
    pub(super) fn begin(&mut self) {
        self.before = self.previous;
        self.touched.clear();
        self.touched.extend(self.active.as_ref().map(|active| (active.segment.clone(), active.end, false)));
    }

    /// Ends a batch that succeeded.
    pub(super) fn end(&mut self) {
        if let Some(active) = &self.active {
            active.segment.len.store(active.end, Relaxed);
        }
        let active = self.active.as_ref().map(|active| active.segment.id);
        for (segment, ..) in self.touched.drain(..).filter(|(segment, ..)| Some(segment.id) != active) {
            segment.file.close();
        }
    }

    /// Writes one record. Returns its header, with its place.
    pub(super) fn append(
        &mut self,
        mut header: RecordHeader,
        sums: &[u64],
        tag: &[u8],
        data: &[u8],
    ) -> Result<RecordHeader> {
        let length = header.total_len();
        if self.active.as_ref().is_none_or(|active| active.end + length > active.capacity) {
            self.roll(length)?;
        }
        let active = self.active.as_mut().expect("rolled above");
        (header.segment, header.offset, header.synced) = (active.segment.id, active.end, active.synced);
        let head = header.encode(sums, tag);
        let padding = [0; 64];
        let padding = &padding[..(align(data.len() as u64) - data.len() as u64) as usize];
        let written = active.segment.file.write_at(active.end, &[&head, data, padding]);
        let id = active.segment.id;
        written.map_err(|error| self.failure("written", id, &error))?;
        let active = self.active.as_mut().expect("still there");
        active.end += length;
        self.inner.counters.written_bytes.fetch_add(length, Relaxed);
        metrics::store_written_bytes().inc_by(length);
        Ok(header)
    }

    /// Makes the active segment durable.
    pub(super) fn sync(&mut self) -> Result<()> {
        let Some(active) = self.active.as_mut().filter(|active| active.synced < active.end) else { return Ok(()) };
        match active.segment.file.sync() {
            Ok(()) => active.synced = active.end,
            Err(error) => {
                let id = active.segment.id;
                return Err(self.failure("made durable", id, &error));
            }
        }
        Ok(())
    }

    /// Where durability is not promised: tries to sync the active segment, and stops using it if that fails.
    fn sync_active(&mut self) -> bool {
        let outcome = self.sync();
        if let Err(error) = &outcome {
            self.warn(error);
            self.seal();
        }
        outcome.is_ok()
    }

    /// Ends the active segment: nothing more is appended to it.
    pub(super) fn seal(&mut self) {
        if let Some(active) = self.active.take() {
            active.segment.len.store(active.end, Relaxed);
            self.previous = (active.segment.id, active.end);
        }
    }

    /// Begins a new segment that has room for a record.
    fn roll(&mut self, room: u64) -> Result<()> {
        self.sync()?;
        self.seal();
        let id = self.inner.next_segment.fetch_add(1, Relaxed);
        let name = segment_name(id);
        let disk = &self.inner.disk;
        let capacity = self.segment_bytes().max(SEGMENT_HEADER + room);
        let header = SegmentHeader {
            id,
            store: self.inner.id,
            created_seq: self.inner.queue.next_seq(),
            previous: self.previous.0,
            previous_len: self.previous.1,
        };
        self.unmade.insert(id);
        let file = disk.create(&name, capacity).map_err(|error| self.failure("made", id, &error))?;
        let begun = file.write_at(0, &[&header.encode()]).and_then(|()| disk.sync());
        begun.map_err(|error| self.failure("begun", id, &error))?;
        self.unmade.remove(&id);
        let segment = Arc::new(Segment::new(id, self.inner.id, file, SEGMENT_HEADER));
        self.inner.segments.lock().insert(id, segment.clone());
        self.touched.push((segment.clone(), SEGMENT_HEADER, true));
        self.active = Some(Active { segment, end: SEGMENT_HEADER, synced: 0, capacity });
        Ok(())
    }

    pub(super) fn segment_bytes(&self) -> u64 {
        self.inner.options.segment_size()
    }

    fn commit(&mut self, items: &[Item], placed: &[Option<RecordHeader>]) {
        for (item, header) in items.iter().zip(placed) {
            let Some(header) = header else { continue };
            self.inner.counters.writes.fetch_add(1, Relaxed);
            if header.kind == Kind::Put {
                let segment = self.inner.segments.lock().get(&header.segment).cloned().expect("written to just now");
                let mut shard = self.inner.shard(item.key);
                let slots = shard.get_mut(&item.key).map_or(&mut [][..], |chain| &mut chain.slots[..]);
                match slots.iter_mut().rev().find(|slot| slot.seq == item.seq) {
                    Some(slot) => {
                        segment.live.fetch_add(header.total_len(), Relaxed);
                        slot.place = Place::Disk(segment, header.offset);
                    }
                    None => segment.bury(item.seq),
                }
            }
            self.changes.push((item.key, Change::Record(Known::of(header))));
        }
    }

    /// Undoes a batch that could not be written: in the files as far as the disk allows, and in memory.
    fn fail(&mut self, items: &[Item], error: &Error) {
        self.abandon();
        for item in items.iter().filter(|item| !matches!(item.what, What::Barrier)) {
            let mut shard = self.inner.shard(item.key);
            let Some(chain) = shard.get(&item.key) else {
                let plan = Plan { prev_seq: SequenceNumber::NONE, history_start: 0 };
                let seq = self.inner.queue.take_seq();
                self.owed.insert(item.key, Owed { seq, from: 0, plan });
                self.failed.insert(item.key, seq);
                continue;
            };
            let from = match chain.slot(item.seq) {
                Some(slot) => slot.start,
                None if chain.newest == item.seq => chain.end,
                // A newer record that is still queued determines the history.
                None => continue,
            };
            let plan = chain.plan_cut(from);
            let seq = self.inner.queue.take_seq();
            truncate(&mut shard, item.key, from, plan, seq);
            self.owed.insert(item.key, Owed { seq, from, plan });
            self.failed.insert(item.key, seq);
        }
        self.inner.failure.lock().get_or_insert_with(|| error.clone());
        self.warn(error);
    }

    /// Restores the files to where the batch began and ends the active segment: after a write error its contents on the
    /// disk are undefined.
    pub(super) fn abandon(&mut self) {
        if self.touched.is_empty() {
            self.seal();
        } else {
            self.previous = self.before;
        }
        self.active = None;
        for (segment, good, made) in std::mem::take(&mut self.touched) {
            segment.len.store(good, Relaxed);
            if made {
                self.inner.segments.lock().remove(&segment.id);
                self.unmade.insert(segment.id);
            } else {
                self.previous = (segment.id, good);
                self.uncut.push((segment, good));
            }
        }
        // On failure it is retried before the next write.
        let _ = self.take_back();
    }

    /// Removes what failed batches wrote from the files, durably. Nothing else is written before: the leftovers would
    /// become visible again when the records that hide them are compacted. New segments are removed before the segment
    /// before them is truncated, for their headers have its length.
    pub(super) fn take_back(&mut self) -> Result<()> {
        if let Some(&last) = self.unmade.last() {
            for &id in &self.unmade {
                remove(&*self.inner.disk, id).map_err(|error| self.failure("removed", id, &error))?;
            }
            self.inner.disk.sync().map_err(|error| self.failure("removed", last, &error))?;
            self.unmade.clear();
        }
        while let Some((segment, good)) = self.uncut.last() {
            let cut = segment.file.truncate(*good).and_then(|()| segment.file.sync());
            cut.map_err(|error| self.failure("cut", segment.id, &error))?;
            self.uncut.pop();
        }
        Ok(())
    }

    /// Brings the persistent index up to date, durably if `flush`.
    pub(super) fn persist(&mut self, flush: bool) {
        let changes = std::mem::take(&mut self.changes);
        let outcome = self.persistent.update(&self.inner, changes, flush);
        if let Err(error) = outcome {
            self.inner.counters.index_errors.fetch_add(1, Relaxed);
            metrics::store_error("index");
            log::warn!("{error}. The store goes on without it and makes it anew when it is opened next");
        }
    }

    pub(super) fn failure(&self, what: &str, segment: u64, error: &io::Error) -> Error {
        let path = self.inner.disk.path().join(segment_name(segment));
        let advice = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "Free space, or set max_bytes",
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => "Check the permissions",
            _ => "Check the disk",
        };
        Error::new(Status::Io, format!("{} can not be {what}: {error}. {advice}", path.display()))
    }

    /// Counts a disk error and logs it, at most once a minute.
    pub(super) fn warn(&mut self, error: &Error) {
        self.inner.counters.write_errors.fetch_add(1, Relaxed);
        metrics::store_error("write");
        if self.warned.is_none_or(|at| at.elapsed() > Duration::from_secs(60)) {
            self.warned = Some(Instant::now());
            log::warn!("{error}. What could not be written has left the store");
        }
    }

    fn publish(&mut self) {
        let bytes = self.inner.bytes().0 as i64;
        metrics::store_file_bytes().inc_by(bytes - self.published);
        self.published = bytes;
    }
}

/// Removes a segment that may be gone already.
pub(super) fn remove(disk: &dyn Disk, id: u64) -> io::Result<()> {
    match disk.remove(&segment_name(id)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        metrics::store_file_bytes().dec_by(self.published);
    }
}
