//! The store on disk: its public interface.

use std::any::Any;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

use super::chain::{Chain, Slot};
use super::check_report::CheckReport;
use super::disk::{Clock, Disk, RealClock, RealDisk};
use super::format::{checked_view, head_len, segment_name};
use super::index::{Index, SledIndex};
use super::inner::{Inner, Place, Segment};
use super::open::{Opened, check, open, throw_index_away};
use super::options::StoreOptions;
use super::ticket::{Promise, Ticket};
use super::{Found, History, INDEX, Key, Owner, Piece, Record, Room, Space, Store, TierStats};
use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::{Mutex, Worker};

/// A store in a folder.
///
/// Histories lie in append-only segment files with a checksum on everything. Damaged data is a miss, never wrong data.
/// One process at a time has a store open. Dropping it writes everything that is queued.
pub struct DiskStore {
    inner: Arc<Inner>,
    /// Dropped before the lock: the writer has written everything when the store is free for another process.
    _writer: Worker,
    /// The spaces that caches have claimed.
    claimed: Mutex<HashSet<Space>>,
    /// Keeps other processes out.
    _lock: Box<dyn Any + Send + Sync>,
}

impl DiskStore {
    /// Opens the store in a folder, or makes one there if the folder is empty or missing. BUSY if it is open already.
    pub fn open(path: impl AsRef<Path>, options: &StoreOptions) -> Result<Self> {
        let path = path.as_ref();
        let (disk, index) = (RealDisk::new(path), SledIndex::new(path.join(INDEX)));
        Self::open_with(Box::new(disk), Box::new(index), Box::new(RealClock), options)
    }

    /// Opens a store with another disk, index or clock under it, for tests.
    #[doc(hidden)]
    pub fn open_with(
        disk: Box<dyn Disk>,
        index: Box<dyn Index>,
        clock: Box<dyn Clock>,
        options: &StoreOptions,
    ) -> Result<Self> {
        let Opened { inner, mut writer, lock } = open(disk, index, clock, options)?;
        let shared = inner.clone();
        let run = move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| writer.run())) {
                let error = Error::from_panic(&*panic);
                log::error!("the store's writer ended: {error}");
                shared.queue.close(error);
            }
            // Its files are closed before `clear` releases the callers that wait.
            drop(writer);
            shared.queue.clear();
        };
        let writer = Worker::spawn("pagoda-store", "write the store", run)?;
        Ok(Self { inner, _writer: writer, claimed: Mutex::default(), _lock: lock })
    }

    /// What is stored now, and counters since the store was opened.
    pub fn stats(&self) -> StoreStats {
        let (file_bytes, live_bytes) = self.inner.bytes();
        let (mut owners, mut records) = (0, 0);
        for shard in self.inner.shards() {
            owners += shard.len() as u64;
            records += shard.values().map(|chain| chain.slots.len() as u64).sum::<u64>();
        }
        let counters = &self.inner.counters;
        StoreStats {
            owners,
            records,
            live_bytes,
            file_bytes,
            segments: self.inner.segments.lock().len() as u64,
            queued_bytes: self.inner.queue.bytes(),
            writes: counters.writes.load(Relaxed),
            written_bytes: counters.written_bytes.load(Relaxed),
            write_errors: counters.write_errors.load(Relaxed),
            corrupt_records: counters.corrupt_records.load(Relaxed),
            torn_tails: counters.torn_tails.load(Relaxed),
            damaged_regions: counters.damaged_regions.load(Relaxed),
            dropped_owners: counters.dropped_owners.load(Relaxed),
            index_rebuilds: counters.index_rebuilds.load(Relaxed),
            index_errors: counters.index_errors.load(Relaxed),
            evicted_owners: counters.evicted_owners.load(Relaxed),
            compacted_segments: counters.compacted_segments.load(Relaxed),
        }
    }

    /// Compacts every segment that holds something removed or replaced, and waits for it.
    pub fn compact(&self) -> Result<()> {
        let (promise, ticket) = Promise::new();
        self.inner.queue.ask_for_compaction(promise);
        ticket.wait()
    }

    /// Reads everything in a store that is not open and verifies every checksum. Changes nothing.
    pub fn check(path: impl AsRef<Path>) -> Result<CheckReport> {
        check(path.as_ref())
    }

    /// Discards the index of a store that is not open and rebuilds it from the segments.
    pub fn rebuild(path: impl AsRef<Path>) -> Result<StoreStats> {
        throw_index_away(path.as_ref())?;
        let store = Self::open(path, &StoreOptions::default())?;
        store.flush()?;
        Ok(store.stats())
    }
}

impl Store for DiskStore {
    fn claim(&self, space: Space) -> bool {
        self.claimed.lock().insert(space)
    }

    fn release(&self, space: Space) {
        self.claimed.lock().remove(&space);
    }

    fn find(&self, key: Key) -> Option<Found> {
        self.inner.find(key)
    }

    fn history(&self, key: Key) -> Option<Box<dyn History>> {
        let chain = self.inner.chain(key)?;
        Some(Box::new(Snapshot::new(self.inner.clone(), key, chain)))
    }

    fn write(&self, record: Record, room: Room) -> Result<Ticket> {
        self.inner.write(record, room)
    }

    fn cut(&self, key: Key, from: u64) -> Result<Ticket> {
        self.inner.cut(key, from)
    }

    fn owners(&self, space: Space) -> Vec<Owner> {
        self.inner.owners(space)
    }

    fn tiers(&self) -> Vec<TierStats> {
        let (_, live_bytes) = self.inner.bytes();
        vec![TierStats { name: "disk", used_bytes: live_bytes, most_bytes: self.inner.options.max_bytes }]
    }

    fn flush(&self) -> Result<()> {
        self.inner.flush()
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.inner.queue.close(Error::new(Status::InvalidHandle, "the store is closed"));
    }
}

/// Statistics of a store. Counters begin at 0 when it is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct StoreStats {
    /// Owners stored, of all spaces.
    pub owners: u64,
    /// Pieces of their histories.
    pub records: u64,
    /// Bytes of the files that are in use.
    pub live_bytes: u64,
    /// Bytes of all segment files.
    pub file_bytes: u64,
    /// Segment files.
    pub segments: u64,
    /// Bytes that wait to be written.
    pub queued_bytes: u64,
    /// Records written, removals too.
    pub writes: u64,
    /// Bytes written, those of compactions too.
    pub written_bytes: u64,
    /// Times the disk failed to write.
    pub write_errors: u64,
    /// Records whose data was damaged.
    pub corrupt_records: u64,
    /// Unfinished writes found when the store was opened.
    pub torn_tails: u64,
    /// Regions of segments that were damaged.
    pub damaged_regions: u64,
    /// Owners that were dropped: after damage it was uncertain which of their records are current.
    pub dropped_owners: u64,
    /// 1 if the index was rebuilt when the store was opened.
    pub index_rebuilds: u64,
    /// Times the index failed. A failed index is not used until the store is opened again.
    pub index_errors: u64,
    /// Owners that were evicted to make room.
    pub evicted_owners: u64,
    /// Segments compacted.
    pub compacted_segments: u64,
}

/// A snapshot of an owner's history.
struct Snapshot {
    inner: Arc<Inner>,
    key: Key,
    chain: Chain<Place>,
    pieces: Vec<Piece>,
    /// The checksums of the layers of each piece on disk, once its head is found good.
    sums: Vec<OnceLock<Vec<u64>>>,
}

impl Snapshot {
    fn new(inner: Arc<Inner>, key: Key, chain: Chain<Place>) -> Self {
        let pieces = chain.pieces();
        let sums = pieces.iter().map(|_| OnceLock::new()).collect();
        Self { inner, key, chain, pieces, sums }
    }

    fn slot(&self, piece: usize) -> Result<&Slot<Place>> {
        let count = self.pieces.len();
        self.chain.slots.get(piece).ok_or_else(|| Error::invalid("piece", format!("{piece} of {count} does not exist")))
    }

    /// Drops a piece that can not be read from the store, and returns the error.
    fn damaged(&self, slot: &Slot<Place>, segment: &Segment, offset: u64) -> Error {
        self.inner.drop_corrupt(self.key, slot.seq, segment, offset);
        let (owner, start) = (self.key.owner, slot.start);
        let path = self.inner.disk.path().join(segment_name(segment.id));
        let message =
            format!("the piece of owner {owner} from {start} on, in {} at {offset}, is damaged", path.display());
        Error::new(Status::Io, format!("{message}. It has left the store; compute it again"))
    }
}

impl History for Snapshot {
    fn start(&self) -> u64 {
        self.chain.start
    }

    fn end(&self) -> u64 {
        self.chain.end
    }

    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn tag(&self, piece: usize) -> Result<Vec<u8>> {
        let slot = self.slot(piece)?;
        match &slot.place {
            Place::Memory(record) => Ok(record.tag.clone()),
            Place::Disk(segment, offset) => {
                let head = segment.head_of(self.key, slot, *offset);
                head.map(|head| head.tag().to_vec()).ok_or_else(|| self.damaged(slot, segment, *offset))
            }
        }
    }

    fn layer(&self, piece: usize, layer: u32) -> Result<&[u8]> {
        let slot = self.slot(piece)?;
        if layer >= slot.layers {
            return Err(Error::invalid("layer", format!("{layer} of {} does not exist", slot.layers)));
        }
        match &slot.place {
            Place::Memory(record) => {
                let length = slot.layer_bytes as usize;
                Ok(&record.data[layer as usize * length..][..length])
            }
            Place::Disk(segment, offset) => {
                metrics::store_read_bytes().inc_by(slot.layer_bytes);
                let sums = match self.sums[piece].get() {
                    Some(sums) => Some(sums),
                    None => segment
                        .head_of(self.key, slot, *offset)
                        .map(|head| self.sums[piece].get_or_init(|| head.sums())),
                };
                let from = offset + head_len(slot.layers, slot.tag_len) + u64::from(layer) * slot.layer_bytes;
                let bytes =
                    sums.and_then(|sums| checked_view(&*segment.file, from, slot.layer_bytes, sums[layer as usize]));
                bytes.ok_or_else(|| self.damaged(slot, segment, *offset))
            }
        }
    }
}
