//! One partition: its rows, in slabs without gaps, and who leaves when there are too many.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::{MemoryOptions, Overflow};
use crate::embedding::Layout;
use crate::embedding::mix::{below, mix};
use crate::error::{Error, Result, Status};

/// About how large a slab is, and the most rows of one.
const SLAB_BYTES: usize = 1 << 20;
const SLAB_ROWS: usize = 4096;
/// About how many keys a map of the index has, and the most maps.
const MAP_KEYS: usize = 2048;
const MAX_MAPS: usize = 4096;
/// How many rows leave for one that comes in, while there are more than there should be.
const LEAVE_AT_ONCE: usize = 4;
/// From how many rows the oldest or least used one is chosen.
const HANDFUL: usize = 8;

const MAP_SALT: u64 = 0x4D61_7073;
const SLOT_SALT: u64 = 0x536C_6F74;

pub(super) struct Partition {
    /// Places by key, in many small maps: when a map grows everyone waits, and a small one grows fast.
    maps: Box<[HashMap<i64, u32, BuildHasherDefault<KeyHasher>>]>,
    slabs: Vec<Slab>,
    rows: usize,
    row_bytes: usize,
    slab_rows: usize,
    margin: usize,
    target: usize,
    policy: Overflow,
    /// Set from when the margin was reached until the target is.
    overflowing: bool,
    /// Counts lookups.
    clock: u64,
    /// Counts random numbers.
    draws: i64,
}

/// Rows next to each other. Only the last slab with rows has room.
struct Slab {
    entries: Vec<Entry>,
    rows: Vec<u8>,
}

struct Entry {
    key: i64,
    version: u64,
    /// When it was looked up last, or how often it was, as the policy has it.
    worth: u64,
    deleted: bool,
}

/// What a row takes, about, with its entry and its place in a map, which is between half full and nearly full.
pub(super) fn bytes_of_row(layout: Layout) -> u64 {
    (layout.row_bytes() + size_of::<Entry>() + (size_of::<(i64, u32)>() + 1) * 3 / 2) as u64
}

impl Partition {
    pub(super) fn new(layout: Layout, options: &MemoryOptions) -> Self {
        // Places are 32 bits.
        let margin = options.margin.min(u32::MAX as usize);
        // Of all partitions together no more than that: empty ones take memory too.
        let maps = (margin / MAP_KEYS).clamp(1, (MAX_MAPS / options.partitions.max(1)).max(1));
        Self {
            maps: (0..maps).map(|_| HashMap::default()).collect(),
            slabs: Vec::new(),
            rows: 0,
            row_bytes: layout.row_bytes(),
            slab_rows: (SLAB_BYTES / layout.row_bytes()).clamp(1, SLAB_ROWS),
            margin,
            target: ((margin as f64 * options.target) as usize).min(margin.saturating_sub(1)),
            policy: options.policy,
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

    /// The version and the row of a key, or no row if it was deleted. Counts as use.
    pub(super) fn look_up(&mut self, key: i64) -> Option<(u64, Option<&[u8]>)> {
        let place = self.place(key)?;
        self.clock += 1;
        let (policy, clock) = (self.policy, self.clock);
        let (entry, row) = self.at(place);
        match policy {
            Overflow::Random => {}
            Overflow::Oldest => entry.worth = clock,
            Overflow::LeastUsed => entry.worth += 1,
        }
        Some((entry.version, (!entry.deleted).then_some(&*row)))
    }

    pub(super) fn version(&self, key: i64) -> Option<u64> {
        let place = self.place(key)?;
        Some(self.slabs[place / self.slab_rows].entries[place % self.slab_rows].version)
    }

    /// Keeps a row, or that a key was deleted, in place of what was kept of the key.
    pub(super) fn set(&mut self, key: i64, version: u64, row: Option<&[u8]>) -> Result<()> {
        let place = match self.place(key) {
            Some(place) => place,
            None if self.margin == 0 => return Ok(()),
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
        let worth = match self.policy {
            Overflow::Random => 0,
            Overflow::Oldest => self.clock,
            Overflow::LeastUsed => 1,
        };
        let slab = &mut self.slabs[place / self.slab_rows];
        slab.entries.push(Entry { key, version: 0, worth, deleted: false });
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
            let message = format!(
                "{} rows in host memory leave no room for {bytes} bytes of rows more: lower overflow_margin",
                self.rows
            );
            Error::new(Status::Capacity, message)
        })?;
        Ok(Slab { entries, rows })
    }

    /// Makes sure that one more row is no more than the margin, and comes a few rows closer to the target.
    fn make_room(&mut self) {
        self.overflowing |= self.rows >= self.margin;
        for _ in 0..LEAVE_AT_ONCE {
            self.overflowing &= self.rows > self.target;
            if !self.overflowing {
                return;
            }
            let place = self.leaving();
            self.remove(place);
        }
    }

    fn leaving(&mut self) -> usize {
        let handful = if self.policy == Overflow::Random { 1 } else { HANDFUL };
        let places = (0..handful).map(|_| {
            self.draws += 1;
            below(mix(mix(self.draws, SLOT_SALT).cast_signed(), 0), self.rows)
        });
        let slabs = &self.slabs;
        let worth = |place: usize| slabs[place / self.slab_rows].entries[place % self.slab_rows].worth;
        places.min_by_key(|&place| worth(place)).expect("a handful has a row")
    }

    /// Removes a row; the last one takes its place.
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

    /// Copies a row of a slab to a place in the same slab or in one before it.
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

/// The hash of a key: maps of the standard library would guard against keys made to collide, which costs more than the
/// lookup.
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
