//! Cached keys whose row may be outdated, because a tier that may hold a newer version did not answer when they were
//! looked up. The refresher reads them again.

use std::collections::{HashSet, VecDeque};

use crate::sync::Mutex;

/// The most keys. Rows of further unverified keys are not cached.
const MAX_KEYS: usize = 1 << 16;

/// The unverified keys of one table.
#[derive(Default)]
pub(in crate::embedding) struct UnverifiedKeys(Mutex<Keys>);

/// A queue: keys that stay unverified go to the end, so that all others are read before them.
#[derive(Default)]
struct Keys {
    queue: VecDeque<i64>,
    members: HashSet<i64>,
}

impl UnverifiedKeys {
    /// Adds a key. Returns false if there is no room for it.
    pub(in crate::embedding) fn add(&self, key: i64) -> bool {
        let mut keys = self.0.lock();
        if keys.members.len() >= MAX_KEYS {
            return keys.members.contains(&key);
        }
        if keys.members.insert(key) {
            keys.queue.push_back(key);
        }
        true
    }

    /// Removes and returns up to `most` keys.
    pub(in crate::embedding) fn take(&self, most: usize) -> Vec<i64> {
        let mut keys = self.0.lock();
        let most = most.min(keys.queue.len());
        let taken: Vec<i64> = keys.queue.drain(..most).collect();
        for key in &taken {
            keys.members.remove(key);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_once_and_there_are_never_too_many() {
        let unverified = UnverifiedKeys::default();
        assert!((0..MAX_KEYS as i64).all(|key| unverified.add(key)));
        assert!(!unverified.add(-1) && unverified.add(7));
        let taken = unverified.take(1000);
        assert!(taken.iter().copied().eq(0..1000));
        assert!(unverified.add(-1) && unverified.add(5));
        assert!(unverified.take(usize::MAX).into_iter().eq((1000..MAX_KEYS as i64).chain([-1, 5])));
        assert!(unverified.take(1).is_empty());
    }
}
