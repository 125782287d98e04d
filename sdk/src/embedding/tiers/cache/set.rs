//! One set of the cache: its keys, its seqlock, and the recency of its ways.

use std::hint;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering, fence};
use std::thread;

/// The number of rows of a set: as many keys as fit into one cache line beside the rest. A second line for each lookup
/// costs more than the additional hits of more ways save.
pub(super) const WAYS: usize = 7;

/// A writer holds the lock.
const LOCKED: u32 = 1;
/// A writer is changing the ways: a read may see parts of two rows.
const WRITING: u32 = 2;
/// The counter of changes, in the bits above. A reader is deceived only if exactly 2^30 changes happen during its read.
const CHANGE: u32 = 4;

/// How often a reader tries before it gives up. A change is shorter than that, unless its thread is descheduled.
const PATIENCE: usize = 200;
/// How often a writer spins before it yields.
const SPINS: usize = 100;

/// The bits of the freshness of one way.
const BITS: usize = 4;
/// The freshness of a way that was used since the last insertion into the set. An insertion decrements the freshness of
/// all other ways, down to 1. In a full set an unused row becomes the least fresh one, and is evicted, long before
/// that. 0 is a way without a row.
const FRESH: u32 = 15;

/// Everything that a lookup needs beside the row. All zeros is a set without rows.
#[repr(C, align(64))]
pub(super) struct Set {
    state: AtomicU32,
    freshness: AtomicU32,
    keys: [AtomicI64; WAYS],
}

impl Set {
    /// Calls `attempt` until the set has not changed during the call. `None` after too many attempts.
    ///
    /// `attempt` reads the ways with relaxed atomic loads. If one of them sees a value of a writer, the fence here
    /// synchronizes with the fence in [`Locked::write`], and the second load of the state sees at least that the writer
    /// has begun.
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

    /// The ways that have a key, as a bit mask; compared one by one.
    #[inline]
    pub(super) fn ways_with(&self, key: i64) -> u32 {
        let same = |way: usize| u32::from(self.keys[way].load(Ordering::Relaxed) == key) << way;
        (0..WAYS).fold(0, |found, way| found | same(way))
    }

    /// The bit mask of ways of a bit mask of words: the first word of a set is no key.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    #[inline]
    pub(super) fn ways_of_words(words: u32) -> u32 {
        const { assert!(size_of::<Self>() == 64 && std::mem::offset_of!(Self, keys) == 8) };
        words >> 1
    }

    /// Records the use of a way. It writes only if the freshness changes, so that readers of the same rows share the
    /// line. It does not write if another thread has changed the freshness: a row that was just removed would come
    /// back.
    #[inline]
    pub(super) fn touch(&self, way: usize) {
        let before = self.freshness.load(Ordering::Relaxed);
        if !matches!(of(before, way), 0 | FRESH) {
            let after = before | FRESH << (way * BITS);
            let _ = self.freshness.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Locks the set against other writers. Readers are not blocked.
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

/// A lock on a set.
pub(super) struct Locked<'a>(&'a Set);

impl Locked<'_> {
    /// The way for another row: one without a row, or else the least recently used one. Ties are broken in turn.
    pub(super) fn victim(&self) -> usize {
        let turn = (self.0.state.load(Ordering::Relaxed) / CHANGE) as usize;
        let ways = (0..WAYS).map(|way| (way + turn % WAYS) % WAYS);
        ways.min_by_key(|&way| self.0.freshness(way)).expect("a set has ways")
    }

    /// Stores a key in a way. `change` writes its row with relaxed atomic stores. The way is the freshest afterwards.
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

    /// Changes the row of a way. `change` writes it with relaxed atomic stores.
    pub(super) fn write(&self, change: impl FnOnce()) {
        let state = self.0.state.load(Ordering::Relaxed);
        self.0.state.store(state | WRITING, Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        self.0.state.store((state & !WRITING).wrapping_add(CHANGE), Ordering::Release);
    }

    /// Removes the row of a way.
    pub(super) fn remove(&self, way: usize) {
        self.write(|| self.change_freshness(|before| before & !(FRESH << (way * BITS))));
    }

    /// The ways that hold a row, with their keys.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, i64)> {
        let rows = (0..WAYS).filter(|&way| self.0.holds(way));
        rows.map(|way| (way, self.0.keys[way].load(Ordering::Relaxed)))
    }

    fn change_freshness(&self, change: impl Fn(u32) -> u32) {
        // An atomic update, because readers change it too.
        self.0.freshness.update(Ordering::Relaxed, Ordering::Relaxed, change);
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let state = self.0.state.load(Ordering::Relaxed);
        self.0.state.store(state & !LOCKED, Ordering::Release);
    }
}
