//! One set: which of its ways holds a key, who may read and write them, and which was used least recently.

use std::hint;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering, fence};
use std::thread;

use super::lines::Lines;

/// Rows of a set: as many keys as fit into one line of the processor's cache beside the rest. A line more a lookup costs
/// more than a few ways more would find.
pub(super) const WAYS: usize = 7;

/// Held by the one who may change the set.
const LOCKED: u32 = 1;
/// Its ways are being changed: what is read now may be half of one row and half of another.
const WRITING: u32 = 2;
/// Counts changes, in the bits above. A reader would have to sleep through exactly 2^30 of them to be deceived.
const CHANGE: u32 = 4;

/// How often a reader tries before it gives up; a change takes less than that, unless its thread is put to sleep.
const PATIENCE: usize = 200;
/// How often a writer tries before it lets other threads run.
const SPINS: usize = 100;

/// Bits for the freshness of a way.
const BITS: usize = 4;
/// Used since the last row was put into the set. Every row that is put makes the others less fresh by one, down to 1. In a
/// full set a row that is not used becomes the least fresh one, and leaves, long before that. 0 is a way without a row.
const FRESH: u32 = 15;

/// All that a lookup needs beside the row itself. Zeros are a set without rows.
#[repr(C, align(64))]
pub(super) struct Set {
    state: AtomicU32,
    freshness: AtomicU32,
    keys: [AtomicI64; WAYS],
}

impl Set {
    /// Calls `attempt` until no one has changed the set meanwhile. `None` if that never comes.
    ///
    /// What `attempt` reads of the ways it reads with relaxed atomic loads. If any of them sees what a writer has written
    /// then the fence here meets the one in [`Locked::write`], and the second look at the state sees at least that the
    /// writer had begun.
    #[inline]
    pub(super) fn read<R>(&self, mut attempt: impl FnMut() -> R) -> Option<R> {
        for _ in 0..PATIENCE {
            let before = self.state.load(Ordering::Acquire);
            if before & WRITING == 0 {
                let result = attempt();
                fence(Ordering::Acquire);
                if (self.state.load(Ordering::Relaxed) ^ before) & !LOCKED == 0 {
                    return Some(result);
                }
            }
            hint::spin_loop();
        }
        None
    }

    /// The way that holds a key.
    #[inline]
    pub(super) fn find(&self, lines: impl Lines, key: i64) -> Option<usize> {
        let mut found = lines.ways_with(self, key);
        // A way that lost its row still has the key.
        while found != 0 {
            let way = found.trailing_zeros() as usize;
            if self.holds(way) {
                return Some(way);
            }
            found &= found - 1;
        }
        None
    }

    /// The ways that have a key, as bits; looked at one by one.
    #[inline]
    pub(super) fn ways_with(&self, key: i64) -> u32 {
        let same = |way: usize| u32::from(self.keys[way].load(Ordering::Relaxed) == key) << way;
        (0..WAYS).fold(0, |found, way| found | same(way))
    }

    /// The ways among the words of a set, as bits: the first word is no key.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    pub(super) fn ways_of_words(words: u32) -> u32 {
        const { assert!(size_of::<Self>() == 64 && std::mem::offset_of!(Self, keys) == 8) };
        words >> 1
    }

    /// Remembers that a way was used. Written only where it is news, so that readers of the same rows do not take the line
    /// from one another; and not if anything else has changed meanwhile, or a row that has just left would come back.
    #[inline]
    pub(super) fn touch(&self, way: usize) {
        let before = self.freshness.load(Ordering::Relaxed);
        if !matches!(of(before, way), 0 | FRESH) {
            let after = before | FRESH << (way * BITS);
            let _ = self.freshness.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Waits until no one else may change the set. Readers are not held up.
    pub(super) fn lock(&self) -> Locked<'_> {
        for spin in 1_usize.. {
            let state = self.state.load(Ordering::Relaxed);
            if state & LOCKED == 0 && self.exchange(state, state | LOCKED) {
                break;
            }
            if spin.is_multiple_of(SPINS) { thread::yield_now() } else { hint::spin_loop() }
        }
        Locked(self)
    }

    #[cfg(test)]
    pub(super) fn with_keys(state: u32, keys: [i64; WAYS]) -> Self {
        Self { state: AtomicU32::new(state), freshness: AtomicU32::new(0), keys: keys.map(AtomicI64::new) }
    }

    #[cfg(test)]
    pub(super) fn is_locked(&self) -> bool {
        self.state.load(Ordering::Relaxed) & LOCKED != 0
    }

    fn exchange(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange_weak(from, to, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Whether a way holds the row of a key.
    #[inline]
    pub(super) fn holds_key(&self, way: usize, key: i64) -> bool {
        self.keys[way].load(Ordering::Relaxed) == key && self.holds(way)
    }

    /// Whether a way holds a row.
    #[inline]
    pub(super) fn holds(&self, way: usize) -> bool {
        self.freshness(way) != 0
    }

    fn freshness(&self, way: usize) -> u32 {
        of(self.freshness.load(Ordering::Relaxed), way)
    }
}

fn of(freshness: u32, way: usize) -> u32 {
    freshness >> (way * BITS) & FRESH
}

/// The right to change a set.
pub(super) struct Locked<'a>(&'a Set);

impl Locked<'_> {
    /// Where to put another row: a way without one, or else the one that was used least recently. Among several it
    /// takes turns.
    pub(super) fn victim(&self) -> usize {
        let turn = (self.0.state.load(Ordering::Relaxed) / CHANGE) as usize;
        let ways = (0..WAYS).map(|way| (way + turn % WAYS) % WAYS);
        ways.min_by_key(|&way| self.0.freshness(way)).expect("a set has ways")
    }

    /// Puts a key into a way, whose row `change` writes with relaxed atomic stores. It is the freshest then.
    pub(super) fn put(&self, way: usize, key: i64, change: impl FnOnce()) {
        self.write(|| {
            self.0.keys[way].store(key, Ordering::Relaxed);
            self.change_freshness(|before| {
                let fresh = |other: usize| match of(before, other) {
                    _ if other == way => FRESH,
                    least @ 0..=1 => least,
                    more => more - 1,
                };
                (0..WAYS).fold(0, |after, other| after | fresh(other) << (other * BITS))
            });
            change();
        });
    }

    /// Changes the row of a way: `change` writes it with relaxed atomic stores.
    pub(super) fn write(&self, change: impl FnOnce()) {
        let state = self.0.state.load(Ordering::Relaxed);
        self.0.state.store(state | WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        self.0.state.store((state & !WRITING).wrapping_add(CHANGE), Ordering::Release);
    }

    /// Takes the row out of a way.
    pub(super) fn remove(&self, way: usize) {
        self.write(|| self.change_freshness(|before| before & !(FRESH << (way * BITS))));
    }

    /// The ways that hold a row, with their keys.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, i64)> {
        let rows = (0..WAYS).filter(|&way| self.0.holds(way));
        rows.map(|way| (way, self.0.keys[way].load(Ordering::Relaxed)))
    }

    fn change_freshness(&self, change: impl Fn(u32) -> u32) {
        // Readers change it, too.
        self.0.freshness.update(Ordering::Relaxed, Ordering::Relaxed, change);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let state = self.0.state.load(Ordering::Relaxed);
        self.0.state.store(state & !LOCKED, Ordering::Release);
    }
}
