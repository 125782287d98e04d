//! The cache: rows in a fixed amount of memory, which lookups read without a lock.
//!
//! It is set-associative: a key belongs to one set of [`WAYS`](set::WAYS) rows. Each set is a seqlock: a reader copies
//! the row and then checks whether the set has changed; if so it repeats. A writer locks the set against other writers.

mod line_reads;
mod region;
mod set;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use self::line_reads::{Best, LineReader, Scalar, copy_bytes, copy_numbers};
use self::region::Region;
use self::set::{Locked, Set};
use crate::embedding::hash::{below, mix};
use crate::embedding::row::{Layout, RowType};
use crate::embedding::tiers::tier::Rows;

use crate::embedding::update::version::Version;
use crate::error::Result;

/// The number of keys of a block. While one block is served, the rows of the next block and the sets of the one after
/// that are prefetched. With a third as many keys the prefetches are not complete in time; with a third more they
/// exceed the outstanding loads of the processor. Either costs about a fifth.
const AHEAD: usize = 12;
/// The number of bytes of a row that are prefetched. The hardware prefetcher loads the rest of a long row.
const AHEAD_BYTES: usize = 1024;
const LINE: usize = 64;

/// The cache of one table.
pub(in crate::embedding) struct Cache {
    region: Region,
    layout: Layout,
    rows: OwnLine<AtomicUsize>,
}

/// A value on a cache line of its own: writes to it do not invalidate a line that lookups read.
#[repr(align(64))]
#[derive(Default)]
struct OwnLine<T>(T);

impl Cache {
    /// A cache for `rows` rows, rounded up to whole sets. Keys are spread over the sets by a hash. A set may evict a
    /// row while another one has room: of `rows` unique keys about one in seven is evicted.
    pub(in crate::embedding) fn new(layout: Layout, rows: usize) -> Result<Self> {
        Ok(Self { region: Region::new(layout, rows)?, layout, rows: OwnLine::default() })
    }

    /// The number of bytes of a cache for `rows` rows.
    pub(in crate::embedding) fn bytes_for(layout: Layout, rows: usize) -> u64 {
        Region::bytes(layout, rows).saturating_add(size_of::<Self>() as u64)
    }

    /// The number of bytes of the cache. Parts that were never used are not resident.
    pub(in crate::embedding) fn memory(&self) -> u64 {
        Self::bytes_for(self.layout, self.capacity())
    }

    /// The capacity in rows.
    pub(in crate::embedding) fn capacity(&self) -> usize {
        self.region.places()
    }

    /// The number of rows.
    pub(in crate::embedding) fn len(&self) -> usize {
        self.rows.0.load(Ordering::Relaxed)
    }

    /// Decodes the rows of `keys` into `numbers`, and appends the places of the misses to `missing`. The numbers of
    /// misses are unspecified. A key whose set was being changed for too long counts as a miss.
    ///
    /// # Panics
    /// If `numbers` is not one row for each key.
    pub(in crate::embedding) fn lookup(&self, keys: &[i64], numbers: &mut [f32], missing: &mut Vec<u32>) {
        match Best::here() {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Best::Avx512(reader) => self.lookup_by(reader, keys, numbers, missing),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Best::Avx2(reader) => self.lookup_by(reader, keys, numbers, missing),
            Best::Scalar(reader) => self.lookup_by(reader, keys, numbers, missing),
        }
    }

    fn lookup_by(&self, reader: impl LineReader, keys: &[i64], numbers: &mut [f32], missing: &mut Vec<u32>) {
        let layout = self.layout;
        match layout.row_type() {
            RowType::F32 => {
                let copy = |words: &[AtomicU64], numbers: &mut [f32]| copy_numbers(reader, words, numbers);
                self.lookup_with(reader, keys, numbers, missing, copy, |_| ());
            }
            // Copied first, and decoded after the copy was found to be consistent.
            RowType::F16 | RowType::I8 => {
                let row = RefCell::new(vec![0; layout.row_bytes()]);
                let copy = |words: &[AtomicU64], _: &mut [f32]| copy_bytes(words, &mut row.borrow_mut());
                self.lookup_with(reader, keys, numbers, missing, copy, |numbers| layout.decode(&row.borrow(), numbers));
            }
        }
    }

    /// `copy` may read a row while it is changed. `copied` is called after a consistent copy.
    #[inline]
    fn lookup_with(
        &self,
        reader: impl LineReader,
        keys: &[i64],
        numbers: &mut [f32],
        missing: &mut Vec<u32>,
        copy: impl Fn(&[AtomicU64], &mut [f32]),
        copied: impl Fn(&mut [f32]),
    ) {
        assert_eq!(numbers.len(), keys.len() * self.layout.dim());
        if self.capacity() == 0 {
            return missing.extend(0..keys.len() as u32);
        }
        let mut numbers = numbers.chunks_exact_mut(self.layout.dim());
        self.each_prefetched(reader, keys, AHEAD_BYTES, |place, home| {
            let numbers = numbers.next().expect("there are numbers for every key");
            let found = home.set.read(|| {
                let way = home.find(reader)?;
                copy(self.region.row(home.number, way), numbers);
                Some(way)
            });
            match found.flatten() {
                Some(way) => {
                    home.set.touch(way);
                    copied(numbers);
                }
                None => missing.push(place as u32),
            }
        });
    }

    /// Appends the places of the misses among `keys` to `missing`. The hits count as used.
    pub(in crate::embedding) fn probe(&self, keys: &[i64], missing: &mut Vec<u32>) {
        if self.capacity() == 0 {
            return missing.extend(0..keys.len() as u32);
        }
        self.each_prefetched(Scalar, keys, 0, |place, home| match home.set.read(|| home.find(Scalar)).flatten() {
            Some(way) => home.set.touch(way),
            None => missing.push(place as u32),
        });
    }

    /// Inserts rows. A full set evicts its least recently used row. Not inserted are tombstones, rows for which
    /// `current` returns false, and rows of which the cache holds a higher version. `current` is called under the lock
    /// of the set.
    pub(in crate::embedding) fn insert(&self, rows: &Rows<'_>, current: &dyn Fn(usize) -> bool) {
        self.each_prefetched(Scalar, rows.keys, 0, |index, home| {
            let Some(row) = rows.row(index) else { return };
            let locked = home.set.lock();
            if !current(index) {
                return;
            }
            let version = rows.versions[index];
            if let Some(way) = home.find(Scalar) {
                if self.region.version(home.number, way).load(Ordering::Relaxed) <= version.0 {
                    locked.write(|| self.write(home.number, way, version, row));
                }
                return;
            }
            let way = locked.victim();
            if !home.set.holds(way) {
                self.rows.0.fetch_add(1, Ordering::Relaxed);
            }
            locked.put(way, home.key, || self.write(home.number, way, version, row));
        });
    }

    /// Replaces or removes the rows that the cache holds, unless it holds a higher version.
    pub(in crate::embedding) fn update(&self, change: &Rows<'_>) {
        self.each_prefetched(Scalar, change.keys, 0, |index, home| {
            let locked = home.set.lock();
            let Some(way) = home.find(Scalar) else { return };
            let version = change.versions[index];
            if self.region.version(home.number, way).load(Ordering::Relaxed) > version.0 {
                return;
            }
            match change.row(index) {
                Some(row) => locked.write(|| self.write(home.number, way, version, row)),
                None => self.remove(&locked, way),
            }
        });
    }

    /// Appends about `most` keys of the cache to `into`, beginning at the position `from`, and advances it. The
    /// position is 0 at the start, and 0 again after the last key.
    pub(in crate::embedding) fn keys(&self, from: &mut usize, most: usize, into: &mut Vec<i64>) {
        let enough = into.len().saturating_add(most);
        let sets = self.region.sets();
        while *from < sets && into.len() < enough {
            into.extend(self.region.set(*from).lock().rows().map(|(_, key)| key));
            *from += 1;
        }
        if *from >= sets {
            *from = 0;
        }
    }

    /// Removes every row.
    #[cfg(test)]
    pub(in crate::embedding) fn clear(&self) {
        for set in 0..self.region.sets() {
            let locked = self.region.set(set).lock();
            for (way, _) in locked.rows() {
                self.remove(&locked, way);
            }
        }
    }

    /// Calls `each` with the place and the home of every key, after prefetching its set and up to `row_bytes` of its
    /// row.
    #[inline]
    fn each_prefetched<'a>(
        &'a self,
        reader: impl LineReader,
        keys: &[i64],
        row_bytes: usize,
        mut each: impl FnMut(usize, Home<'a>),
    ) {
        if self.capacity() == 0 {
            return;
        }
        let ahead = self.layout.row_bytes().min(row_bytes).div_ceil(size_of::<u64>());
        let block = |number: usize| keys.get(number * AHEAD..).map(|keys| &keys[..keys.len().min(AHEAD)]);
        let mut homes = [[self.home(0); AHEAD]; 3];
        for step in 0..keys.len().div_ceil(AHEAD) + 2 {
            for (home, &key) in homes[step % 3].iter_mut().zip(block(step).unwrap_or_default()) {
                *home = self.home(key);
                prefetch(home.set);
            }
            let Some(next) = step.checked_sub(1) else { continue };
            for home in &mut homes[next % 3][..block(next).unwrap_or_default().len()] {
                home.guess = reader.find(home.set, home.key);
                let Some(way) = home.guess else { continue };
                let row = &self.region.row(home.number, way)[..ahead];
                row.iter().step_by(LINE / size_of::<u64>()).for_each(prefetch);
            }
            let Some(now) = step.checked_sub(2) else { continue };
            for (index, home) in homes[now % 3][..block(now).unwrap_or_default().len()].iter().enumerate() {
                each(now * AHEAD + index, *home);
            }
        }
    }

    #[inline]
    fn home(&self, key: i64) -> Home<'_> {
        let number = below(mix(key, 0), self.region.sets());
        Home { set: self.region.set(number), number, key, guess: None }
    }

    /// Writes a row. Only within [`Locked::write`] or [`Locked::put`].
    fn write(&self, set: usize, way: usize, version: Version, row: &[u8]) {
        let (chunks, rest) = row.as_chunks();
        let mut last = [0; size_of::<u64>()];
        last[..rest.len()].copy_from_slice(rest);
        for (word, chunk) in self.region.row(set, way).iter().zip(chunks.iter().chain([&last])) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        self.region.version(set, way).store(version.0, Ordering::Relaxed);
    }

    fn remove(&self, locked: &Locked<'_>, way: usize) {
        locked.remove(way);
        self.rows.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The set that a key belongs to.
#[derive(Clone, Copy)]
struct Home<'a> {
    set: &'a Set,
    /// The number of the set.
    number: usize,
    key: i64,
    /// The way that held the key when it was prefetched.
    guess: Option<usize>,
}

impl Home<'_> {
    /// The way that holds the key now.
    #[inline]
    fn find(&self, reader: impl LineReader) -> Option<usize> {
        self.guess.filter(|&way| self.set.holds_key(way, self.key)).or_else(|| reader.find(self.set, self.key))
    }
}

/// Prefetches the cache line in which a value begins.
fn prefetch<T>(what: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads and writes nothing, and every x86-64 processor has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(what).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = what;
}
