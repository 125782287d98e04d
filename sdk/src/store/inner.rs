//! The state that callers' threads and the writer thread share: the index in memory, the segments, the queue.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::chain::{Chain, Plan, Slot};
use super::disk::{Clock, Disk, DiskFile};
use super::format::{Head, MAX_LAYERS, MAX_TAG, total_len};
use super::options::{Durability, StoreOptions};
use super::queue::{Item, Queue, What};
use super::sequence_number::SequenceNumber;
use super::ticket::{Promise, Ticket};
use super::{Found, Key, Owner, Record, Room, Space};
use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 64;

pub(super) struct Inner {
    pub(super) disk: Box<dyn Disk>,
    pub(super) clock: Box<dyn Clock>,
    pub(super) options: StoreOptions,
    /// The store's number.
    pub(super) id: u64,
    shards: Vec<Mutex<HashMap<Key, Chain<Place>>>>,
    pub(super) segments: Mutex<BTreeMap<u64, Arc<Segment>>>,
    /// The number of the next segment.
    pub(super) next_segment: AtomicU64,
    pub(super) queue: Queue,
    pub(super) counters: Counters,
    pub(super) stamp: AtomicU64,
    /// The first write that failed since the last flush.
    pub(super) failure: Mutex<Option<Error>>,
}

/// Where the bytes of a piece are.
#[derive(Clone)]
pub(super) enum Place {
    /// Waiting to be written.
    Memory(Arc<Record>),
    Disk(Arc<Segment>, u64),
}

impl Place {
    pub(super) fn is(&self, segment: &Segment, offset: u64) -> bool {
        matches!(self, Self::Disk(at, from) if at.id == segment.id && *from == offset)
    }
}

/// A segment file.
pub(super) struct Segment {
    pub(super) id: u64,
    pub(super) store: u64,
    pub(super) file: Box<dyn DiskFile>,
    /// How many bytes of it are valid.
    pub(super) len: AtomicU64,
    /// Bytes of the records that chains in memory refer to.
    pub(super) live: AtomicU64,
    /// The lowest sequence number of a put in it that no chain refers to. A cut with a lower number than this in all
    /// segments hides nothing any more.
    lowest_dead: AtomicU64,
    /// Whether compaction of it has failed, or would hide damage.
    pub(super) stuck: AtomicBool,
}

impl Segment {
    pub(super) fn new(id: u64, store: u64, file: Box<dyn DiskFile>, len: u64) -> Self {
        Self {
            id,
            store,
            file,
            len: AtomicU64::new(len),
            live: AtomicU64::new(0),
            lowest_dead: AtomicU64::new(SequenceNumber::MAX.0),
            stuck: AtomicBool::new(false),
        }
    }

    pub(super) fn head(&self, offset: u64) -> Option<Head<'_>> {
        Head::read(&*self.file, self.store, self.id, offset, self.len.load(Relaxed))
    }

    /// The head of a piece, if the record there is the expected one.
    pub(super) fn head_of<P>(&self, key: Key, slot: &Slot<P>, offset: u64) -> Option<Head<'_>> {
        let head = self.head(offset)?;
        let header = &head.header;
        let same = (header.key, header.seq, header.start, header.tokens) == (key, slot.seq, slot.start, slot.tokens)
            && (header.layers, header.layer_bytes, header.tag_len) == (slot.layers, slot.layer_bytes, slot.tag_len);
        same.then_some(head)
    }

    pub(super) fn lowest_dead(&self) -> SequenceNumber {
        SequenceNumber(self.lowest_dead.load(Relaxed))
    }

    pub(super) fn bury(&self, seq: SequenceNumber) {
        self.lowest_dead.fetch_min(seq.0, Relaxed);
    }
}

/// Counters since the store was opened.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) writes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) write_errors: AtomicU64,
    pub(super) corrupt_records: AtomicU64,
    pub(super) torn_tails: AtomicU64,
    pub(super) damaged_regions: AtomicU64,
    pub(super) dropped_owners: AtomicU64,
    pub(super) index_rebuilds: AtomicU64,
    pub(super) index_errors: AtomicU64,
    pub(super) evicted_owners: AtomicU64,
    pub(super) compacted_segments: AtomicU64,
}

type Shard<'a> = MutexGuard<'a, HashMap<Key, Chain<Place>>>;

impl Inner {
    pub(super) fn new(
        disk: Box<dyn Disk>,
        clock: Box<dyn Clock>,
        options: StoreOptions,
        id: u64,
        next_seq: SequenceNumber,
        stamp: u64,
    ) -> Self {
        let queue = Queue::new(options.queue_bytes, next_seq);
        Self {
            disk,
            clock,
            options,
            id,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            segments: Mutex::default(),
            next_segment: AtomicU64::new(1),
            queue,
            counters: Counters::default(),
            stamp: AtomicU64::new(stamp),
            failure: Mutex::new(None),
        }
    }

    pub(super) fn shard(&self, key: Key) -> Shard<'_> {
        let mixed = (key.owner.0 ^ key.space.0.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.shards[(mixed >> 58) as usize].lock()
    }

    /// Every shard in turn.
    pub(super) fn shards(&self) -> impl Iterator<Item = Shard<'_>> {
        self.shards.iter().map(Mutex::lock)
    }

    pub(super) fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Relaxed)
    }

    pub(super) fn find(&self, key: Key) -> Option<Found> {
        let shard = self.shard(key);
        let chain = shard.get(&key)?;
        Some(Found { start: chain.start, end: chain.end, pieces: chain.pieces() })
    }

    pub(super) fn chain(&self, key: Key) -> Option<Chain<Place>> {
        let mut shard = self.shard(key);
        let chain = shard.get_mut(&key)?;
        chain.stamp = self.next_stamp();
        Some(chain.clone())
    }

    pub(super) fn write(&self, record: Record, room: Room) -> Result<Ticket> {
        let (layer_bytes, bytes) = self.check(&record)?;
        self.queue.reserve(bytes, room)?;
        let outcome = self.enqueue(record, layer_bytes, bytes);
        if outcome.is_err() {
            self.queue.release(bytes);
        }
        outcome
    }

    fn check(&self, record: &Record) -> Result<(u64, u64)> {
        let invalid = |argument: &str, message: String| Err(Error::invalid(format!("record.{argument}"), message));
        if record.layers == 0 || record.layers > MAX_LAYERS {
            return invalid("layers", format!("{} is not between 1 and {MAX_LAYERS}", record.layers));
        }
        if record.tokens == 0 || record.start.checked_add(u64::from(record.tokens)).is_none() {
            return invalid("tokens", format!("{} from position {} on can not be stored", record.tokens, record.start));
        }
        if record.history_start > record.start {
            let (history_start, start) = (record.history_start, record.start);
            return invalid("history_start", format!("{history_start} lies after the piece's start, {start}"));
        }
        if record.tag.len() > MAX_TAG {
            return invalid("tag", format!("{} bytes are more than {MAX_TAG}", record.tag.len()));
        }
        if !record.data.len().is_multiple_of(record.layers as usize) {
            return invalid("data", format!("{} bytes are not {} equal layers", record.data.len(), record.layers));
        }
        let layer_bytes = (record.data.len() / record.layers as usize) as u64;
        let bytes = total_len(record.layers, layer_bytes, record.tag.len() as u32);
        if self.options.max_bytes > 0 && bytes > self.options.max_bytes {
            let message =
                format!("the piece takes {bytes} bytes and max_bytes is {}: make it larger", self.options.max_bytes);
            return Err(Error::new(Status::Capacity, message));
        }
        Ok((layer_bytes, bytes))
    }

    fn enqueue(&self, record: Record, layer_bytes: u64, bytes: u64) -> Result<Ticket> {
        let (key, start, tokens, layers) = (record.key, record.start, record.tokens, record.layers);
        let tag_len = record.tag.len() as u32;
        let mut shard = self.shard(key);
        let plan = Chain::plan_put(shard.get(&key), record.history_start, start).ok_or_else(|| {
            let end = shard.get(&key).map_or(0, |chain| chain.end);
            let message = format!("{start} leaves a gap: the stored history of owner {} ends at {end}", key.owner);
            Error::invalid("record.start", format!("{message}. Begin there or before, or at history_start"))
        })?;
        let record = Arc::new(record);
        let (promise, ticket) = self.promise();
        let what = What::Put(record.clone());
        let seq = self.queue.push(|seq| Item { seq, key, plan, what, promise, bytes })?;
        let slot = Slot { seq, start, tokens, layers, layer_bytes, tag_len, place: Place::Memory(record) };
        let (chain, removed) = Chain::put(shard.remove(&key), plan, slot, self.next_stamp());
        shard.insert(key, chain);
        bury(&removed);
        Ok(ticket)
    }

    /// A ticket for a write. It is done at once if a write counts as done when it is queued.
    fn promise(&self) -> (Option<Promise>, Ticket) {
        if self.options.durability == Durability::None {
            return (None, Ticket::ready(Ok(())));
        }
        let (promise, ticket) = Promise::new();
        (Some(promise), ticket)
    }

    pub(super) fn cut(&self, key: Key, from: u64) -> Result<Ticket> {
        let mut shard = self.shard(key);
        self.cut_in(&mut shard, key, from)
    }

    /// Removes a piece that can not be read, and what follows it, if it is still there.
    pub(super) fn drop_corrupt(&self, key: Key, seq: SequenceNumber, segment: &Segment, offset: u64) {
        let mut shard = self.shard(key);
        let Some(chain) = shard.get(&key) else { return };
        let Some(slot) = chain.slot(seq).filter(|slot| slot.place.is(segment, offset)) else { return };
        let from = slot.start;
        self.counters.corrupt_records.fetch_add(1, Relaxed);
        metrics::store_error("corrupt_record");
        // Fails only if the store is closed; the next opening finds the damage again.
        let _ = self.cut_in(&mut shard, key, from);
        // Logged without locks: the log callback may call the store.
        drop(shard);
        log::warn!(
            "the store {}: a record of owner {} in segment {} at {offset} is damaged and leaves, with what follows it",
            self.disk.path().display(),
            key.owner,
            segment.id
        );
    }

    fn cut_in(&self, shard: &mut Shard<'_>, key: Key, from: u64) -> Result<Ticket> {
        let (promise, ticket) = self.promise();
        let Some(chain) = shard.get_mut(&key).filter(|chain| from < chain.end) else {
            // The records that made it so may still be queued.
            let plan = Plan { prev_seq: SequenceNumber::NONE, history_start: 0 };
            self.queue.push(|seq| Item { seq, key, plan, what: What::Barrier, promise, bytes: 0 })?;
            return Ok(ticket);
        };
        let plan = chain.plan_cut(from);
        let seq = self.queue.push(|seq| Item { seq, key, plan, what: What::Cut { from }, promise, bytes: 0 })?;
        truncate(shard, key, from, plan, seq);
        Ok(ticket)
    }

    /// The owners of a space.
    pub(super) fn owners(&self, space: Space) -> Vec<Owner> {
        let mut owners = Vec::new();
        for shard in self.shards() {
            owners.extend(shard.keys().filter(|key| key.space == space).map(|key| key.owner));
        }
        owners
    }

    /// Waits for everything queued before.
    pub(super) fn flush(&self) -> Result<()> {
        let (promise, ticket) = Promise::new();
        let key = Key { space: Space(0), owner: Owner(0) };
        let plan = Plan { prev_seq: SequenceNumber::NONE, history_start: 0 };
        self.queue.push(|seq| Item { seq, key, plan, what: What::Barrier, promise: Some(promise), bytes: 0 })?;
        let outcome = ticket.wait();
        self.failure.lock().take().map_or(outcome, Err)
    }

    /// Bytes of the files, and of the live records in them.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let segments = self.segments.lock();
        segments
            .values()
            .fold((0, 0), |(file, live), segment| (file + segment.len.load(Relaxed), live + segment.live.load(Relaxed)))
    }
}

/// Removes the tokens from `from` on from a chain, which exists and ends after `from`.
pub(super) fn truncate(shard: &mut Shard<'_>, key: Key, from: u64, plan: Plan, seq: SequenceNumber) {
    if plan.prev_seq == SequenceNumber::NONE {
        bury(&shard.remove(&key).map_or_else(Vec::new, |chain| chain.slots));
    } else if let Some(chain) = shard.get_mut(&key) {
        bury(&chain.cut(from, seq));
    }
}

/// Marks pieces as dead in their segments.
pub(super) fn bury(slots: &[Slot<Place>]) {
    for slot in slots {
        if let Place::Disk(segment, _) = &slot.place {
            segment.live.fetch_sub(slot.total_len(), Relaxed);
            segment.bury(slot.seq);
        }
    }
}
