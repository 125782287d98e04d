//! Rows of which the cluster has not heard that they changed.

use crate::sync::Mutex;
use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

/// The most keys that are remembered, about 32 MB of them.
const MAX_KEYS: usize = 1 << 20;

/// An update that does not reach the cluster leaves the old row there, and a node that comes back would serve it. This
/// process knows better and does not believe such rows, until it has written them or a later version is there.
#[derive(Default)]
pub(super) struct Behind {
    versions: Mutex<HashMap<i64, u64>>,
    /// How many there are, to be read without the lock: almost always none.
    count: AtomicUsize,
}

impl Behind {
    /// Remembers that the cluster should have this version. Says whether there was room.
    pub(super) fn note(&self, key: i64, version: u64) -> bool {
        let mut versions = self.versions.lock();
        if versions.len() >= MAX_KEYS && !versions.contains_key(&key) {
            return false;
        }
        let known = versions.entry(key).or_insert(version);
        *known = version.max(*known);
        self.count.store(versions.len(), Release);
        true
    }

    /// Whether the cluster should have another row than the one that it has with this version: a later one, or of the same
    /// version that was to replace it. If not, the key is as good as any other from now on.
    pub(super) fn is_stale(&self, key: i64, version: u64) -> bool {
        if self.count.load(Acquire) == 0 {
            return false;
        }
        let mut versions = self.versions.lock();
        let stale = versions.get(&key).is_some_and(|&known| version <= known);
        if !stale {
            versions.remove(&key);
            self.count.store(versions.len(), Release);
        }
        stale
    }

    /// The cluster has this version now, or a later one.
    pub(super) fn written(&self, key: i64, version: u64) {
        if self.count.load(Acquire) == 0 {
            return;
        }
        let mut versions = self.versions.lock();
        if versions.get(&key).is_some_and(|&known| version >= known) {
            versions.remove(&key);
            self.count.store(versions.len(), Release);
        }
    }

    /// The version that the cluster should have, if it may not have it.
    pub(super) fn version(&self, key: i64) -> Option<u64> {
        if self.count.load(Acquire) == 0 {
            return None;
        }
        self.versions.lock().get(&key).copied()
    }

    /// Bytes of memory, about.
    pub(super) fn memory(&self) -> u64 {
        self.count.load(Acquire) as u64 * 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_not_believed_until_the_right_one_is_there() {
        let behind = Behind::default();
        assert!(!behind.is_stale(1, 0));
        assert!(behind.note(1, 5) && behind.note(1, 3));
        assert!(behind.version(1) == Some(5) && behind.memory() > 0);
        assert!(behind.is_stale(1, 4) && !behind.is_stale(2, 0));
        assert!(behind.is_stale(1, 5), "it may be what was to be replaced");
        behind.written(1, 4);
        assert_eq!((behind.version(1), behind.version(2)), (Some(5), None));
        behind.written(1, 5);
        assert!(!behind.is_stale(1, 4) && behind.version(1).is_none(), "forgotten");
        assert!(
            behind.note(1, 5) && !behind.is_stale(1, 6) && behind.version(1).is_none(),
            "someone else knows better"
        );
    }
}
