//! Histories in host memory: a store of bounded size, alone or above another one.
//!
//! It holds complete histories, as they were last written, and evicts the least recently used. With a store below it is
//! a write-through cache: writes go to both, and misses are read from below. For a GPU the memory is pinned, so that
//! the GPU copies histories by itself (DMA).

mod arena;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use arena::{Arena, Block};
use pagoda_kernels::cuda::Gpu;

use super::{Found, History, Key, Owner, Piece, Record, Room, Space, Store, Ticket, TierStats};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;

/// Ids of pieces in this tier have this bit set, and those of other stores have not, so that the two are never
/// confused.
const HERE: u64 = 1 << 63;

/// A store in host memory. Calls about one owner must not overlap; a KV cache makes them one after the other.
pub struct HostStore {
    arena: Arc<Arena>,
    below: Option<Arc<dyn Store>>,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    all: HashMap<Key, Entry>,
    /// Owners by their last use, least recently used first.
    by_use: BTreeMap<u64, Key>,
    clock: u64,
    pieces: u64,
    claimed: HashSet<Space>,
}

/// A history in this memory.
struct Entry {
    start: u64,
    pieces: Vec<Held>,
    used: u64,
}

#[derive(Clone)]
struct Held {
    piece: Piece,
    data: Arc<Data>,
}

struct Data {
    layers: u32,
    tag: Vec<u8>,
    block: Block,
}

impl Entry {
    fn end(&self) -> u64 {
        self.pieces.last().map_or(self.start, |held| held.piece.start + u64::from(held.piece.tokens))
    }

    /// Removes the tokens from a position on.
    fn cut(&mut self, from: u64) {
        self.pieces.retain(|held| held.piece.start < from);
        if let Some(Held { piece, .. }) = self.pieces.last_mut() {
            piece.tokens = piece.tokens.min((from - piece.start) as u32);
        }
    }
}

impl HostStore {
    /// Takes `bytes` bytes of memory, pinned for a GPU if there is one.
    pub fn new(bytes: u64, gpu: Option<&'static Gpu>, below: Option<Arc<dyn Store>>) -> Result<Self> {
        Ok(Self { arena: Arena::new(bytes, gpu)?, below, entries: Mutex::default() })
    }

    /// Bytes that no history has.
    pub fn free_bytes(&self) -> u64 {
        self.arena.free_bytes() as u64
    }

    /// A copy of a record's data in this memory; `None` if the owner's history up to the record is not here, or there is
    /// no room after evicting the least recently used.
    fn reserve(&self, record: &Record) -> Option<Block> {
        let key = record.key;
        if !self.follows(&self.entries.lock(), record) || record.data.len() > self.arena.bytes() {
            return None;
        }
        loop {
            if let Some(block) = self.arena.take(&record.data) {
                return Some(block);
            }
            let mut entries = self.entries.lock();
            // Free what it replaces first.
            let replaced = record.start == record.history_start && entries.all.contains_key(&key);
            let next = || entries.by_use.values().copied().find(|other| *other != key);
            let gone = if replaced { key } else { next()? };
            let gone = entries.remove(gone);
            drop(entries);
            // A reader may still hold the blocks of an evicted history. Then nothing is freed, and the next one is
            // evicted.
            drop(gone);
        }
    }

    /// Whether a record replaces the whole history, or continues the part that is here.
    fn follows(&self, entries: &Entries, &Record { key, history_start, start, .. }: &Record) -> bool {
        let follows = |entry: &Entry| entry.start <= history_start && entry.end() >= start;
        start == history_start || (start > history_start && entries.all.get(&key).is_some_and(follows))
    }

    /// Adds a record whose data was copied to this memory; false if the history changed meanwhile.
    fn keep(&self, record: &Record, block: Block) -> bool {
        let Record { key, history_start, start, tokens, layers, .. } = *record;
        let data = Arc::new(Data { layers, tag: record.tag.clone(), block });
        let mut entries = self.entries.lock();
        // Another write may have evicted the history meanwhile.
        if !self.follows(&entries, record) {
            return false;
        }
        entries.pieces += 1;
        let piece = Piece { start, tokens, bytes: data.block.bytes().len() as u64, id: HERE | entries.pieces };
        let mut entry = entries.remove(key).unwrap_or(Entry { start: history_start, pieces: Vec::new(), used: 0 });
        entry.cut(if start == history_start { 0 } else { start });
        entry.start = history_start;
        entry.pieces.retain(|held| held.piece.start + u64::from(held.piece.tokens) > history_start);
        entry.pieces.push(Held { piece, data });
        entries.insert(key, entry);
        true
    }
}

impl Entries {
    fn remove(&mut self, key: Key) -> Option<Entry> {
        let entry = self.all.remove(&key)?;
        self.by_use.remove(&entry.used);
        Some(entry)
    }

    fn insert(&mut self, key: Key, mut entry: Entry) {
        self.clock += 1;
        entry.used = self.clock;
        self.by_use.insert(entry.used, key);
        self.all.insert(key, entry);
    }
}

impl Store for HostStore {
    fn claim(&self, space: Space) -> bool {
        let mine = self.entries.lock().claimed.insert(space);
        let free = mine && self.below.as_ref().is_none_or(|below| below.claim(space));
        if mine && !free {
            self.entries.lock().claimed.remove(&space);
        }
        free
    }

    fn release(&self, space: Space) {
        if let Some(below) = &self.below {
            below.release(space);
        }
        self.entries.lock().claimed.remove(&space);
    }

    fn find(&self, key: Key) -> Option<Found> {
        let mut entries = self.entries.lock();
        let Some(entry) = entries.all.get(&key) else {
            drop(entries);
            return self.below.as_ref()?.find(key);
        };
        if let Some(below) = &self.below {
            let found = below.find(key);
            // A write below is visible there at once. If the history is not, it was removed, and must not count as
            // stored.
            if found.as_ref().is_none_or(|found| found.end < entry.end()) {
                drop(entries.remove(key));
                return found;
            }
        }
        let pieces = entry.pieces.iter().map(|held| held.piece.clone()).collect();
        Some(Found { start: entry.start, end: entry.end(), pieces })
    }

    fn history(&self, key: Key) -> Option<Box<dyn History>> {
        let mut entries = self.entries.lock();
        if let Some(entry) = entries.remove(key) {
            let (pieces, data) = entry.pieces.iter().map(|held| (held.piece.clone(), Arc::clone(&held.data))).unzip();
            let history = HostHistory { start: entry.start, end: entry.end(), pieces, data };
            entries.insert(key, entry);
            return Some(Box::new(history));
        }
        drop(entries);
        self.below.as_ref()?.history(key)
    }

    fn write(&self, record: Record, room: Room) -> Result<Ticket> {
        let block = self.reserve(&record);
        let Some(below) = &self.below else {
            if block.is_some_and(|block| self.keep(&record, block)) {
                return Ok(Ticket::ready(Ok(())));
            }
            let Record { key: Key { owner, .. }, history_start, start, .. } = record;
            if !self.follows(&self.entries.lock(), &record) {
                let message =
                    format!("owner {owner}: tokens {history_start} to {start} are not stored, so none can follow");
                return Err(Error::invalid("record", message));
            }
            let bytes = record.data.len();
            let message = format!(
                "{bytes} bytes of owner {owner} do not fit into the {} bytes of the host's memory for histories: give it \
                 more, or put a store on disk below it",
                self.arena.bytes()
            );
            return Err(Error::new(Status::Capacity, message));
        };
        let (key, about) = (record.key, Record { data: Vec::new(), tag: record.tag.clone(), ..record });
        let Record { data, .. } = record;
        let written = below.write(Record { data, ..about.clone() }, room);
        // Only if it is below too: a history that was removed there does not count as stored.
        let kept = written.is_ok() && block.is_some_and(|block| self.keep(&about, block));
        if !kept {
            drop(self.entries.lock().remove(key));
        }
        written
    }

    fn cut(&self, key: Key, from: u64) -> Result<Ticket> {
        let mut entries = self.entries.lock();
        if entries.all.get(&key).is_some_and(|entry| from < entry.end())
            && let Some(mut entry) = entries.remove(key)
        {
            entry.cut(from);
            if from > entry.start && !entry.pieces.is_empty() {
                entries.insert(key, entry);
            }
        }
        drop(entries);
        self.below.as_ref().map_or_else(|| Ok(Ticket::ready(Ok(()))), |below| below.cut(key, from))
    }

    fn owners(&self, space: Space) -> Vec<Owner> {
        let here = self.entries.lock().all.keys().filter(|key| key.space == space).map(|key| key.owner).collect();
        let Some(below) = &self.below else { return here };
        let mut all: HashSet<Owner> = here.into_iter().collect();
        all.extend(below.owners(space));
        all.into_iter().collect()
    }

    fn record_bytes(&self) -> usize {
        // One piece makes few and large copies to a GPU.
        self.below.as_ref().map_or(256 << 20, |below| below.record_bytes())
    }

    fn tiers(&self) -> Vec<TierStats> {
        let most_bytes = self.arena.bytes() as u64;
        let used_bytes = most_bytes.saturating_sub(self.free_bytes());
        let mut tiers = vec![TierStats { name: "host", used_bytes, most_bytes }];
        tiers.extend(self.below.iter().flat_map(|below| below.tiers()));
        tiers
    }

    fn flush(&self) -> Result<()> {
        self.below.as_ref().map_or(Ok(()), |below| below.flush())
    }
}

/// A snapshot of a history.
struct HostHistory {
    start: u64,
    end: u64,
    pieces: Vec<Piece>,
    data: Vec<Arc<Data>>,
}

impl History for HostHistory {
    fn start(&self) -> u64 {
        self.start
    }

    fn end(&self) -> u64 {
        self.end
    }

    fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    fn tag(&self, piece: usize) -> Result<Vec<u8>> {
        Ok(self.data[piece].tag.clone())
    }

    fn layer(&self, piece: usize, layer: u32) -> Result<&[u8]> {
        let Data { layers, block, .. } = &*self.data[piece];
        let bytes = block.bytes().len() / *layers as usize;
        Ok(&block.bytes()[layer as usize * bytes..][..bytes])
    }
}

#[cfg(test)]
mod tests;
