//! One partition: its rows, in slabs without gaps, and their eviction.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::limits::MemoryLimits;
use crate::embedding::eviction::Eviction;
use crate::embedding::hash::{below, mix};
use crate::embedding::options::MEMORY;
use crate::embedding::row::Layout;
use crate::embedding::update::version::Version;
use crate::error::{Error, Result, Status};

/// The approximate size of a slab, and its most rows.
const SLAB_BYTES: usize = 1 << 20;
const SLAB_ROWS: usize = 4096;
/// The approximate number of keys of a map of the index, and the most maps.
const MAP_KEYS: usize = 2048;
const MAX_MAPS: usize = 4096;
/// How many rows an insertion evicts while the partition is above its target.
const EVICT_AT_ONCE: usize = 4;
/// The size of the random sample from which the least recently or least frequently used row is evicted.
const SAMPLE: usize = 8;

const MAP_SALT: u64 = 0x4D61_7073;
const SLOT_SALT: u64 = 0x536C_6F74;

pub(super) struct Partition {
    /// The places of rows by key, in many small maps: lookups wait while a map grows, and a small map grows fast.
    maps: Box<[HashMap<i64, u32, BuildHasherDefault<KeyHasher>>]>,
    slabs: Vec<Slab>,
    rows: usize,
    row_bytes: usize,
    slab_rows: usize,
    max_rows: usize,
    /// The number of rows at which eviction ends.
    target: usize,
    eviction: Eviction,
    /// Set when `max_rows` is reached, cleared when `target` is.
    overflowing: bool,
    /// The number of lookups.
    clock: u64,
    /// The number of random numbers drawn.
    draws: i64,
}

/// Contiguous rows. Only the last slab with rows has room.
struct Slab {
    entries: Vec<Entry>,
    rows: Vec<u8>,
}

struct Entry {
    key: i64,
    version: Version,
    /// The clock of its last lookup, or the number of its lookups, as the eviction policy needs it.
    worth: u64,
    deleted: bool,
}

/// The approximate number of bytes of a row with its entry and its place in a map. A map is between half full and
/// nearly full.
pub(super) fn bytes_of_row(layout: Layout) -> u64 {
    (layout.row_bytes() + size_of::<Entry>() + (size_of::<(i64, u32)>() + 1) * 3 / 2) as u64
}

impl Partition {
    pub(super) fn new(layout: Layout, limits: &MemoryLimits) -> Self {
        // Places are 32 bits.
        let max_rows = limits.max_rows.min(u32::MAX as usize);
        // The limit of maps is for all partitions together: empty maps take memory too.
        let maps = (max_rows / MAP_KEYS).clamp(1, (MAX_MAPS / limits.partitions.max(1)).max(1));
        Self {
            maps: (0..maps).map(|_| HashMap::default()).collect(),
            slabs: Vec::new(),
            rows: 0,
            row_bytes: layout.row_bytes(),
            slab_rows: (SLAB_BYTES / layout.row_bytes()).clamp(1, SLAB_ROWS),
            max_rows,
            target: ((max_rows as f64 * limits.keep) as usize).min(max_rows.saturating_sub(1)),
            eviction: limits.eviction,
            overflowing: false,
            clock: 0,
            draws: 0,
        }
    }

    #[cfg(test)]
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn memory(&self) -> u64 {
        let slab = |slab: &Slab| slab.entries.capacity() * size_of::<Entry>() + slab.rows.capacity();
        let maps = self.maps.iter().map(|map| size_of_val(map) + map.capacity() * (size_of::<(i64, u32)>() + 1));
        (self.slabs.iter().map(slab).sum::<usize>() + maps.sum::<usize>()) as u64
    }

    /// The version and the row of a key, or `None` as the row of a tombstone. Counts as a use.
    pub(super) fn look_up(&mut self, key: i64) -> Option<(Version, Option<&[u8]>)> {
        let place = self.place(key)?;
        self.clock += 1;
        let (eviction, clock) = (self.eviction, self.clock);
        let (entry, row) = self.at(place);
        match eviction {
            Eviction::Random => {}
            Eviction::Oldest => entry.worth = clock,
            Eviction::LeastUsed => entry.worth += 1,
        }
        Some((entry.version, (!entry.deleted).then_some(&*row)))
    }

    pub(super) fn version(&self, key: i64) -> Option<Version> {
        let place = self.place(key)?;
        Some(self.slabs[place / self.slab_rows].entries[place % self.slab_rows].version)
    }

    /// Stores a row or a tombstone of a key, in place of the stored one.
    pub(super) fn set(&mut self, key: i64, version: Version, row: Option<&[u8]>) -> Result<()> {
        let place = match self.place(key) {
            Some(place) => place,
            None if self.max_rows == 0 => return Ok(()),
            None => {
                self.make_room();
                self.append(key)?
            }
        };
        let (entry, kept) = self.at(place);
        (entry.version, entry.deleted) = (version, row.is_none());
        if let Some(row) = row {
            kept.copy_from_slice(row);
        }
        Ok(())
    }

    fn place(&self, key: i64) -> Option<usize> {
        self.maps[self.map_of(key)].get(&key).map(|&place| place as usize)
    }

    fn map_of(&self, key: i64) -> usize {
        below(mix(key, MAP_SALT), self.maps.len())
    }

    fn at(&mut self, place: usize) -> (&mut Entry, &mut [u8]) {
        let (slab, place) = (&mut self.slabs[place / self.slab_rows], place % self.slab_rows);
        (&mut slab.entries[place], &mut slab.rows[place * self.row_bytes..][..self.row_bytes])
    }

    fn append(&mut self, key: i64) -> Result<usize> {
        let place = self.rows;
        if self.slabs.len() == place / self.slab_rows {
            self.slabs.push(self.new_slab()?);
        }
        let worth = match self.eviction {
            Eviction::Random => 0,
            Eviction::Oldest => self.clock,
            Eviction::LeastUsed => 1,
        };
        let slab = &mut self.slabs[place / self.slab_rows];
        slab.entries.push(Entry { key, version: Version::LOADED, worth, deleted: false });
        slab.rows.resize(slab.rows.len() + self.row_bytes, 0);
        let map = self.map_of(key);
        self.maps[map].insert(key, place as u32);
        self.rows += 1;
        Ok(place)
    }

    fn new_slab(&self) -> Result<Slab> {
        let (mut entries, mut rows) = (Vec::new(), Vec::new());
        let bytes = self.slab_rows * self.row_bytes;
        let had = entries.try_reserve_exact(self.slab_rows).and_then(|()| rows.try_reserve_exact(bytes));
        had.map_err(|_| {
            let message = format!("{} rows in host memory leave no room for {bytes} bytes of rows more", self.rows);
            Error::new(Status::Capacity, format!("{message}: lower {MEMORY}.overflow.max_rows"))
        })?;
        Ok(Slab { entries, rows })
    }

    /// Makes room for one more row. While the partition is above its target it evicts a few rows.
    fn make_room(&mut self) {
        self.overflowing |= self.rows >= self.max_rows;
        for _ in 0..EVICT_AT_ONCE {
            self.overflowing &= self.rows > self.target;
            if !self.overflowing {
                return;
            }
            let place = self.victim();
            self.remove(place);
        }
    }

    fn victim(&mut self) -> usize {
        let sample = if self.eviction == Eviction::Random { 1 } else { SAMPLE };
        let places = (0..sample).map(|_| {
            self.draws += 1;
            below(mix(mix(self.draws, SLOT_SALT).cast_signed(), 0), self.rows)
        });
        let slabs = &self.slabs;
        let worth = |place: usize| slabs[place / self.slab_rows].entries[place % self.slab_rows].worth;
        places.min_by_key(|&place| worth(place)).expect("a sample has a row")
    }

    /// Removes a row. The last row takes its place.
    fn remove(&mut self, place: usize) {
        let last = self.rows - 1;
        let gone = self.at(place).0.key;
        let map = self.map_of(gone);
        self.maps[map].remove(&gone);
        let slab = &mut self.slabs[last / self.slab_rows];
        let entry = slab.entries.pop().expect("the last slab has a row");
        let row_at = slab.rows.len() - self.row_bytes;
        if place != last {
            let map = self.map_of(entry.key);
            self.maps[map].insert(entry.key, place as u32);
            self.move_row(last / self.slab_rows, row_at, place);
            *self.at(place).0 = entry;
        }
        self.slabs[last / self.slab_rows].rows.truncate(row_at);
        self.rows = last;
    }

    /// Copies a row of a slab to a place in the same slab or in an earlier one.
    fn move_row(&mut self, slab: usize, row_at: usize, to: usize) {
        let (to_slab, to_at) = (to / self.slab_rows, to % self.slab_rows * self.row_bytes);
        let (before, rest) = self.slabs.split_at_mut(slab);
        let from = &mut rest[0].rows;
        match before.get_mut(to_slab) {
            Some(to) => to.rows[to_at..][..self.row_bytes].copy_from_slice(&from[row_at..][..self.row_bytes]),
            None => from.copy_within(row_at..row_at + self.row_bytes, to_at),
        }
    }
}

/// The hasher of the maps. The hasher of the standard library resists keys that are chosen to collide, which costs more
/// than the lookup.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write_i64(&mut self, key: i64) {
        self.0 = mix(key, self.0);
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_i64(byte.into()));
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
