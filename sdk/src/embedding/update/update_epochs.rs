//! Detects updates of a key between the read of its row and the write of that row into a faster tier.
//!
//! A lookup reads a row from a lower tier and stores it in the tiers above. It must not overwrite an update that came
//! in between. So the lookup reads the epoch of the key first, and the upper tier compares epochs under its own lock
//! before it stores the row. An update advances the epoch before it changes the first tier and again after the last
//! one. An odd epoch marks an update in progress: rows that were read during it are not stored.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::embedding::hash::mix;

/// Keys share epochs. An update of one key keeps rows of the other keys with the same epoch from being stored, once.
const EPOCHS: usize = 1 << 12;

/// The epoch of a key at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::embedding) struct Epoch(u64);

impl Epoch {
    fn is_updating(self) -> bool {
        !self.0.is_multiple_of(2)
    }
}

/// The epochs of one table.
pub(in crate::embedding) struct UpdateEpochs(Box<[AtomicU64]>);

impl UpdateEpochs {
    pub(in crate::embedding) fn new() -> Self {
        Self((0..EPOCHS).map(|_| AtomicU64::new(0)).collect())
    }

    /// The current epoch of a key.
    pub(in crate::embedding) fn read(&self, key: i64) -> Epoch {
        Epoch(self.0[slot(key)].load(Ordering::SeqCst))
    }

    /// Whether a row of a key that was read at epoch `seen` or later is still current.
    pub(in crate::embedding) fn is_current(&self, key: i64, seen: Epoch) -> bool {
        !seen.is_updating() && self.read(key) == seen
    }

    /// Marks keys as being updated until the guard is dropped. A table has one update at a time.
    pub(in crate::embedding) fn begin_update(&self, keys: &[i64]) -> UpdateGuard<'_> {
        let mut slots: Vec<_> = keys.iter().map(|&key| slot(key)).collect();
        slots.sort_unstable();
        slots.dedup();
        let guard = UpdateGuard { epochs: self, slots };
        guard.advance();
        guard
    }
}

/// An update in progress.
pub(in crate::embedding) struct UpdateGuard<'a> {
    epochs: &'a UpdateEpochs,
    slots: Vec<usize>,
}

impl UpdateGuard<'_> {
    fn advance(&self) {
        for &slot in &self.slots {
            self.epochs.0[slot].fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Drop for UpdateGuard<'_> {
    fn drop(&mut self) {
        self.advance();
    }
}

fn slot(key: i64) -> usize {
    mix(key, 1) as usize % EPOCHS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_or_during_an_update_is_old() {
        let epochs = UpdateEpochs::new();
        let before = epochs.read(7);
        assert!(epochs.is_current(7, before));
        let updating = epochs.begin_update(&[7, 7, 8]);
        let during = epochs.read(7);
        assert!(!epochs.is_current(7, before) && !epochs.is_current(7, during));
        drop(updating);
        assert!(!epochs.is_current(7, before) && !epochs.is_current(7, during));
        assert!(epochs.is_current(7, epochs.read(7)));
    }
}
