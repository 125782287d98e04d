//! The topmost floor: rows in a fixed amount of memory, found and read without a lock.
//!
//! A key belongs to one set of [`WAYS`] rows. A reader copies the row out and looks afterwards whether anyone has changed
//! the set meanwhile; if so it begins again (a seqlock). Whoever changes a set locks it against others who would.

mod lines;
mod region;
mod set;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use self::lines::{Best, Lines, Words, copy_bytes, copy_numbers};
use self::region::Region;
use self::set::{Locked, Set};
use super::floor::Rows;
use super::mix::{below, mix};
use super::{Layout, RowType};
use crate::error::Result;

/// Keys are served in blocks of this many: while one is served the rows of the next are under way from memory, and the
/// sets of the one after that. With a third as many they are still under way when their turn comes, with a third more the
/// processor has no room to keep track of them all: either costs about a fifth.
const AHEAD: usize = 12;
/// Of a row this many bytes are asked for ahead. The processor notices by itself that more of a long one follow.
const AHEAD_BYTES: usize = 1024;
const LINE: usize = 64;

/// Rows of one table by their keys.
pub(super) struct Cache {
    region: Region,
    layout: Layout,
    rows: Apart<AtomicUsize>,
}

/// On a line of its own, so that those who change it do not take the line of the rest from those who look up.
#[repr(align(64))]
#[derive(Default)]
struct Apart<T>(T);

impl Cache {
    /// A cache for `rows` rows, or a few more: it consists of whole sets. Keys are spread over the sets by chance, so a set
    /// may evict while another has room: of `rows` different keys about one in seven finds no place.
    pub(super) fn new(layout: Layout, rows: usize) -> Result<Self> {
        Ok(Self { region: Region::new(layout, rows)?, layout, rows: Apart::default() })
    }

    /// What a cache for so many rows takes, in bytes.
    pub(super) fn bytes_for(layout: Layout, rows: usize) -> u64 {
        Region::bytes(layout, rows).saturating_add(size_of::<Self>() as u64)
    }

    /// What it takes, in bytes; the part that was never used is not resident.
    pub(super) fn memory(&self) -> u64 {
        Self::bytes_for(self.layout, self.capacity())
    }

    /// The most rows there can be.
    pub(super) fn capacity(&self) -> usize {
        self.region.places()
    }

    /// How many rows there are.
    pub(super) fn len(&self) -> usize {
        self.rows.0.load(Ordering::Relaxed)
    }

    /// Decodes the rows of `keys` into `numbers`, and appends the places of those that are not here to `missing`; their
    /// numbers are left as they may be. A row counts as missing, too, if it could not be read because its set was being
    /// changed for long.
    ///
    /// # Panics
    /// If `numbers` has not the length of as many rows as there are keys.
    pub(super) fn lookup(&self, keys: &[i64], numbers: &mut [f32], missing: &mut Vec<u32>) {
        match Best::here() {
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Best::Whole(lines) => self.lookup_by(lines, keys, numbers, missing),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            Best::Halves(lines) => self.lookup_by(lines, keys, numbers, missing),
            Best::Words(lines) => self.lookup_by(lines, keys, numbers, missing),
        }
    }

    fn lookup_by(&self, lines: impl Lines, keys: &[i64], numbers: &mut [f32], missing: &mut Vec<u32>) {
        let layout = self.layout;
        match layout.row_type() {
            RowType::F32 => {
                let copy = |words: &[AtomicU64], numbers: &mut [f32]| copy_numbers(lines, words, numbers);
                self.lookup_with(lines, keys, numbers, missing, copy, |_| ());
            }
            // Copied first, and decoded once it is known to be whole.
            RowType::F16 | RowType::I8 => {
                let row = RefCell::new(vec![0; layout.row_bytes()]);
                let copy = |words: &[AtomicU64], _: &mut [f32]| copy_bytes(words, &mut row.borrow_mut());
                self.lookup_with(lines, keys, numbers, missing, copy, |numbers| layout.decode(&row.borrow(), numbers));
            }
        }
    }

    /// `copy` may be called with a row that is being changed; `copied` with the numbers of one that was not.
    #[inline]
    fn lookup_with(
        &self,
        lines: impl Lines,
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
        self.each_ahead(lines, keys, AHEAD_BYTES, |place, home| {
            let numbers = numbers.next().expect("there are numbers for every key");
            let found = home.set.read(|| {
                let way = home.find(lines)?;
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

    /// Appends the places of those `keys` that are not here to `missing`. The others count as used.
    pub(super) fn probe(&self, keys: &[i64], missing: &mut Vec<u32>) {
        if self.capacity() == 0 {
            return missing.extend(0..keys.len() as u32);
        }
        self.each_ahead(Words, keys, 0, |place, home| match home.set.read(|| home.find(Words)).flatten() {
            Some(way) => home.set.touch(way),
            None => missing.push(place as u32),
        });
    }

    /// Puts rows, each in place of the least recently used one of its set if there is no room. Not put are deleted ones,
    /// those of which `current` says no, asked while no one else can change the set, and those of which a higher version is
    /// here.
    pub(super) fn insert(&self, rows: &Rows<'_>, current: &dyn Fn(usize) -> bool) {
        self.each_ahead(Words, rows.keys, 0, |index, home| {
            let Some(row) = rows.row(index) else { return };
            let locked = home.set.lock();
            if !current(index) {
                return;
            }
            let version = rows.versions[index];
            if let Some(way) = home.find(Words) {
                if self.region.version(home.number, way).load(Ordering::Relaxed) <= version {
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

    /// Replaces or removes those rows that are here, unless a higher version is.
    pub(super) fn update(&self, change: &Rows<'_>) {
        self.each_ahead(Words, change.keys, 0, |index, home| {
            let locked = home.set.lock();
            let Some(way) = home.find(Words) else { return };
            let version = change.versions[index];
            if self.region.version(home.number, way).load(Ordering::Relaxed) > version {
                return;
            }
            match change.row(index) {
                Some(row) => locked.write(|| self.write(home.number, way, version, row)),
                None => self.remove(&locked, way),
            }
        });
    }

    /// Appends up to about `most` keys that are here to `into`, beginning at `from`, which is then where to go on. It is 0
    /// at first, and again when all that is here was walked over.
    pub(super) fn keys(&self, from: &mut usize, most: usize, into: &mut Vec<i64>) {
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
    pub(super) fn clear(&self) {
        for set in 0..self.region.sets() {
            let locked = self.region.set(set).lock();
            for (way, _) in locked.rows() {
                self.remove(&locked, way);
            }
        }
    }

    /// Calls `each` with every key's place and home, having asked for what it will need from memory in good time: of a row
    /// up to `row_bytes`.
    #[inline]
    fn each_ahead<'a>(
        &'a self,
        lines: impl Lines,
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
                home.guess = home.set.find(lines, home.key);
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

    /// Writes a row. Only where [`Locked`] says.
    fn write(&self, set: usize, way: usize, version: u64, row: &[u8]) {
        let (chunks, rest) = row.as_chunks();
        let mut last = [0; size_of::<u64>()];
        last[..rest.len()].copy_from_slice(rest);
        for (word, chunk) in self.region.row(set, way).iter().zip(chunks.iter().chain([&last])) {
            word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
        }
        self.region.version(set, way).store(version, Ordering::Relaxed);
    }

    fn remove(&self, locked: &Locked<'_>, way: usize) {
        locked.remove(way);
        self.rows.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where a key belongs.
#[derive(Clone, Copy)]
struct Home<'a> {
    set: &'a Set,
    /// Which set it is.
    number: usize,
    key: i64,
    /// The way that held it a moment ago.
    guess: Option<usize>,
}

impl Home<'_> {
    /// The way that holds the key now.
    #[inline]
    fn find(&self, lines: impl Lines) -> Option<usize> {
        self.guess.filter(|&way| self.set.holds_key(way, self.key)).or_else(|| self.set.find(lines, self.key))
    }
}

/// Asks for the line of the processor's cache in which something begins.
fn prefetch<T>(what: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: asking for a line reads and writes nothing, and every x86-64 processor can.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(what).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = what;
}
