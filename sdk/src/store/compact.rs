//! Eviction and compaction: owners are evicted, and the live records of a segment are copied to another one.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Key;
use super::chain::Location;
use super::format::{Head, Kind, RecordHeader, SEGMENT_HEADER, next_record, segment_name};
use super::inner::{Place, Segment};
use super::persistent::Change;
use super::sequence_number::SequenceNumber;
use super::writer::{Writer, remove};
use crate::error::{Error, Result, Status};

impl Writer {
    /// Work that is due after every batch.
    pub(super) fn maintain(&mut self) {
        // An error is counted, and the removal is retried after the next batch.
        let _ = self.remove_leaving();
        if self.inner.options.max_bytes > 0 {
            self.keep_under_the_cap();
        } else {
            self.collect_garbage();
        }
    }

    fn keep_under_the_cap(&mut self) {
        let cap = self.inner.options.max_bytes;
        let target = cap / 4 * 3;
        let mut everything = false;
        // Bounded: the disk may fail, and callers may write as fast as this evicts.
        for _ in 0..64 {
            let (file, live) = self.inner.bytes();
            if file <= cap {
                return;
            }
            if live > target {
                // An eighth more than necessary: finding the owners to evict scans all of them.
                self.evict(target - target / 8);
                self.drain();
            }
            // All in one go, so that the writes meanwhile do not exceed what is freed.
            let victims = self.victims(if everything { u64::MAX } else { file - cap });
            if victims.is_empty() || self.compact(&victims).is_err() {
                return;
            }
            if self.inner.bytes().0 >= file {
                if everything {
                    return;
                }
                // A cut has to stay while a record that it hides is in another segment.
                everything = true;
            }
        }
    }

    fn collect_garbage(&mut self) {
        loop {
            let (file, live) = self.inner.bytes();
            let garbage = file.saturating_sub(live);
            if garbage <= self.inner.options.garbage_bytes || garbage <= file / 2 {
                self.patience = 0;
                return;
            }
            if garbage <= self.patience {
                return;
            }
            let victims = self.victims(1);
            let done = !victims.is_empty() && self.compact(&victims).is_ok();
            let left = self.inner.bytes();
            if !done || left.0 >= file {
                // Nothing was gained. Retry when there is a quarter more garbage.
                self.patience = garbage + garbage / 4;
            }
        }
    }

    /// Evicts the least recently used owners, until the others take `target` bytes.
    fn evict(&mut self, target: u64) {
        let mut owners: Vec<(u64, Key, u64)> = Vec::new();
        for shard in self.inner.shards() {
            owners.extend(
                shard
                    .iter()
                    .map(|(&key, chain)| (chain.stamp, key, chain.slots.iter().map(|slot| slot.total_len()).sum())),
            );
        }
        owners.sort_unstable();
        let mut live: u64 = owners.iter().map(|owner| owner.2).sum();
        for (_, key, bytes) in owners {
            if live <= target || self.inner.cut(key, 0).is_err() {
                return;
            }
            live -= bytes;
            self.inner.counters.evicted_owners.fetch_add(1, Relaxed);
        }
    }

    /// The segments with the most garbage, as many as it takes to free so many bytes; the active one comes last.
    fn victims(&mut self, gain: u64) -> Vec<Arc<Segment>> {
        let active = self.active.as_ref().map(|active| active.segment.id);
        let mut worthy = self.worthy();
        worthy.sort_by_key(|segment| (Some(segment.id) == active, segment.live.load(Relaxed)));
        let mut gained = 0;
        worthy.retain(|segment| {
            let needed = gained < gain;
            gained += garbage(segment);
            needed
        });
        worthy
    }

    /// The segments that have garbage.
    fn worthy(&self) -> Vec<Arc<Segment>> {
        let segments = self.inner.segments.lock();
        let worthy = segments.values().filter(|segment| !segment.stuck.load(Relaxed) && garbage(segment) > 0);
        worthy.cloned().collect()
    }

    /// Compacts every segment that has garbage.
    pub(super) fn compact_all(&mut self) -> Result<()> {
        self.drain();
        let mut outcome = Ok(());
        for segment in self.worthy() {
            // An error in one segment does not stop the others.
            outcome = outcome.and(self.compact(&[segment]));
        }
        outcome
    }

    /// Copies the live records of segments to the active one and removes the segments.
    fn compact(&mut self, victims: &[Arc<Segment>]) -> Result<()> {
        if self.active.as_ref().is_some_and(|active| victims.iter().any(|victim| victim.id == active.segment.id)) {
            self.sync().map_err(|error| self.give_up(error))?;
            self.seal();
        }
        for segment in victims {
            let copied = self.copy(segment).map_err(|error| self.give_up(error))?;
            self.inner.counters.damaged_regions.fetch_add(copied.damaged, Relaxed);
            // A record that can not be read may have replaced others. While the segment stays, recovery sees the damage
            // and does not take the replaced ones for current.
            segment.stuck.store(copied.damaged > 0, Relaxed);
            self.move_chains(segment, copied);
        }
        // A record that was not copied may have been replaced by one that is still queued. The newer one must be in the
        // files before the older one is removed: otherwise a crash would bring back what the older one replaced.
        self.drain();
        let (gone, kept): (Vec<_>, Vec<_>) = victims.iter().partition(|segment| {
            self.owed.is_empty() && !segment.stuck.load(Relaxed) && segment.live.load(Relaxed) == 0
        });
        if !gone.is_empty() {
            self.sync().map_err(|error| self.give_up(error))?;
            for segment in &gone {
                self.inner.segments.lock().remove(&segment.id);
                self.leaving.insert(segment.id, segment.lowest_dead());
            }
            self.persist(true);
            self.remove_leaving()?;
            self.inner.counters.compacted_segments.fetch_add(gone.len() as u64, Relaxed);
        }
        kept.first().map_or(Ok(()), |segment| {
            let path = self.inner.disk.path().join(segment_name(segment.id));
            let message = format!("{} can not be compacted: it is damaged, or the disk fails", path.display());
            Err(Error::new(Status::Io, message))
        })
    }

    /// Removes the files of compacted segments. The index does not list them any more, so the next opening removes
    /// those that are left. Until they are gone, a cut that hides a record in them must stay.
    fn remove_leaving(&mut self) -> Result<()> {
        let Some((&last, _)) = self.leaving.last_key_value() else { return Ok(()) };
        if let Err(error) = self.persistent.retract() {
            self.warn(&error);
            return Err(error);
        }
        let disk = &self.inner.disk;
        let removed = self.leaving.keys().try_for_each(|&id| remove(&**disk, id)).and_then(|()| disk.sync());
        if let Err(error) = removed {
            let error = self.failure("removed", last, &error);
            self.warn(&error);
            return Err(error);
        }
        self.leaving.clear();
        Ok(())
    }

    fn give_up(&mut self, error: Error) -> Error {
        self.abandon();
        self.warn(&error);
        error
    }

    /// Copies the live records of a segment, durably.
    fn copy(&mut self, segment: &Arc<Segment>) -> Result<Copied> {
        let mut copied = Copied { records: Vec::new(), damaged: 0 };
        let floor = self.lowest_dead_outside(segment.id);
        let end = segment.len.load(Relaxed);
        let mut at = SEGMENT_HEADER;
        self.take_back()?;
        self.begin();
        while at < end {
            let Some(head) = segment.head(at) else {
                copied.damaged += 1;
                match next_record(&*segment.file, segment.store, segment.id, at, end) {
                    Some(next) => at = next,
                    None => break,
                }
                continue;
            };
            at += head.header.total_len();
            if !self.needed(segment, &head, floor) {
                continue;
            }
            let data = match head.header.kind {
                Kind::Cut => &[],
                Kind::Put => match head.data() {
                    Some(data) => data,
                    None => {
                        self.inner.drop_corrupt(head.header.key, head.header.seq, segment, head.header.offset);
                        continue;
                    }
                },
            };
            let header = self.append(head.header, &head.sums(), head.tag(), data)?;
            copied.records.push((head.header.offset, header));
        }
        self.sync()?;
        self.end();
        Ok(copied)
    }

    fn lowest_dead_outside(&self, segment: u64) -> SequenceNumber {
        let segments = self.inner.segments.lock();
        let others = segments.values().filter(|other| other.id != segment);
        let lowest = others.map(|other| other.lowest_dead());
        lowest.chain(self.leaving.values().copied()).min().unwrap_or(SequenceNumber::MAX)
    }

    /// Whether a record is live: a put that a chain refers to, or a cut that hides a record.
    fn needed(&self, segment: &Segment, head: &Head<'_>, floor: SequenceNumber) -> bool {
        let header = &head.header;
        let shard = self.inner.shard(header.key);
        let chain = shard.get(&header.key);
        match header.kind {
            Kind::Put => {
                chain.and_then(|chain| chain.slot(header.seq)).is_some_and(|slot| slot.place.is(segment, header.offset))
            }
            Kind::Cut => {
                // A newer record in the files supersedes it.
                let outdone = chain.is_some_and(|chain| chain.newest > header.seq && chain.newest < self.done);
                let trims = chain.is_some_and(|chain| chain.slots.iter().any(|slot| slot.seq < header.seq));
                !outdone && (trims || floor < header.seq)
            }
        }
    }

    /// Points the chains to the copies.
    fn move_chains(&mut self, from: &Arc<Segment>, copied: Copied) {
        for (offset, header) in copied.records {
            let to = Location { segment: header.segment, offset: header.offset };
            if header.kind == Kind::Put {
                let segment = self.inner.segments.lock().get(&to.segment).cloned().expect("written to just now");
                self.refer(from, offset, &header, segment);
            }
            self.changes.push((header.key, Change::Moved { seq: header.seq, to }));
        }
        if from.live.load(Relaxed) > 0 {
            self.drop_unread(from);
        }
    }

    fn refer(&self, from: &Segment, offset: u64, header: &RecordHeader, to: Arc<Segment>) {
        let mut shard = self.inner.shard(header.key);
        let slots = shard.get_mut(&header.key).map_or(&mut [][..], |chain| &mut chain.slots[..]);
        let length = header.total_len();
        match slots.iter_mut().find(|slot| slot.seq == header.seq && slot.place.is(from, offset)) {
            Some(slot) => {
                from.live.fetch_sub(length, Relaxed);
                // The original stays until the segment is removed.
                from.bury(header.seq);
                to.live.fetch_add(length, Relaxed);
                slot.place = Place::Disk(to, header.offset);
            }
            // It was removed while it was copied.
            None => to.bury(header.seq),
        }
    }

    /// Removes the pieces of a segment whose records were not found in it.
    fn drop_unread(&self, segment: &Segment) {
        let mut lost = Vec::new();
        for shard in self.inner.shards() {
            for (&key, chain) in shard.iter() {
                let slot =
                    chain.slots.iter().find(|slot| matches!(&slot.place, Place::Disk(at, _) if at.id == segment.id));
                if let Some((seq, Place::Disk(_, offset))) = slot.map(|slot| (slot.seq, &slot.place)) {
                    lost.push((key, seq, *offset));
                }
            }
        }
        for (key, seq, offset) in lost {
            self.inner.drop_corrupt(key, seq, segment, offset);
        }
    }
}

/// The records that were copied out of a segment: where each was, and its new header.
struct Copied {
    records: Vec<(u64, RecordHeader)>,
    damaged: u64,
}

/// Bytes of a segment that no chain refers to.
fn garbage(segment: &Segment) -> u64 {
    let used = segment.live.load(Relaxed) + SEGMENT_HEADER;
    segment.len.load(Relaxed).saturating_sub(used)
}
