//! Which keys were updated since someone looked.
//!
//! A lookup reads a row below and puts it above; an update in between must not be undone by that. So whoever reads notes
//! the stamp of the key before, and the floor above asks, while no one else can change the key there, whether it is still
//! the same. An update changes the stamp before it touches anything, and again when all is done; what is read in between is
//! put nowhere.

use std::sync::atomic::{AtomicU64, Ordering};

use super::mix::mix;

/// Keys share stamps; two that do are at worst not put above for once.
const STAMPS: usize = 1 << 12;

/// The stamps of one table.
pub(super) struct Stamps(Box<[AtomicU64]>);

impl Stamps {
    pub(super) fn new() -> Self {
        Self((0..STAMPS).map(|_| AtomicU64::new(0)).collect())
    }

    /// The stamp of a key now.
    pub(super) fn read(&self, key: i64) -> u64 {
        self.0[place(key)].load(Ordering::SeqCst)
    }

    /// Whether what was read of a key after its stamp was `seen` may be put above.
    pub(super) fn current(&self, key: i64, seen: u64) -> bool {
        seen.is_multiple_of(2) && self.read(key) == seen
    }

    /// Marks keys as being updated until the result is dropped. One update of a table at a time.
    pub(super) fn update(&self, keys: &[i64]) -> Updating<'_> {
        let mut places: Vec<_> = keys.iter().map(|&key| place(key)).collect();
        places.sort_unstable();
        places.dedup();
        let updating = Updating { stamps: self, places };
        updating.advance();
        updating
    }
}

/// Keys that are being updated.
pub(super) struct Updating<'a> {
    stamps: &'a Stamps,
    places: Vec<usize>,
}

impl Updating<'_> {
    fn advance(&self) {
        for &place in &self.places {
            self.stamps.0[place].fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Updating<'_> {
    fn drop(&mut self) {
        self.advance();
    }
}

fn place(key: i64) -> usize {
    mix(key, 1) as usize % STAMPS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_before_or_during_an_update_is_old() {
        let stamps = Stamps::new();
        let before = stamps.read(7);
        assert!(stamps.current(7, before));
        let updating = stamps.update(&[7, 7, 8]);
        let during = stamps.read(7);
        assert!(!stamps.current(7, before) && !stamps.current(7, during));
        drop(updating);
        assert!(!stamps.current(7, before) && !stamps.current(7, during));
        assert!(stamps.current(7, stamps.read(7)));
    }
}
