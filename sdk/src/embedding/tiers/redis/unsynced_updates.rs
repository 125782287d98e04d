//! Updates that did not reach the cluster.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Acquire, Release};

use crate::embedding::update::version::Version;
use crate::sync::Mutex;

/// The most keys: about 32 MB.
const MAX_KEYS: usize = 1 << 20;

/// The keys whose last update did not reach the cluster, with the version of the update. The cluster still holds the
/// old rows. This process ignores them until it has written the update, or the cluster holds a later version.
#[derive(Default)]
pub(super) struct UnsyncedUpdates {
    versions: Mutex<HashMap<i64, Version>>,
    /// The number of keys. Read without the lock: almost always 0.
    count: AtomicUsize,
}

impl UnsyncedUpdates {
    /// Adds a version that the cluster should hold. Returns false if there is no room.
    pub(super) fn add(&self, key: i64, version: Version) -> bool {
        let mut versions = self.versions.lock();
        if versions.len() >= MAX_KEYS && !versions.contains_key(&key) {
            return false;
        }
        let known = versions.entry(key).or_insert(version);
        *known = version.max(*known);
        self.count.store(versions.len(), Release);
        true
    }

    /// Whether the row with this version in the cluster is outdated: a later update did not reach it, or one of the
    /// same version that replaces it. If not, the key is in sync, and is removed.
    pub(super) fn is_stale(&self, key: i64, version: Version) -> bool {
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

    /// Records that the cluster holds this version or a later one.
    pub(super) fn written(&self, key: i64, version: Version) {
        if self.count.load(Acquire) == 0 {
            return;
        }
        let mut versions = self.versions.lock();
        if versions.get(&key).is_some_and(|&known| version >= known) {
            versions.remove(&key);
            self.count.store(versions.len(), Release);
        }
    }

    /// The version that the cluster should hold; `None` if the key is in sync.
    pub(super) fn version(&self, key: i64) -> Option<Version> {
        if self.count.load(Acquire) == 0 {
            return None;
        }
        self.versions.lock().get(&key).copied()
    }

    /// The approximate number of bytes in memory.
    pub(super) fn memory(&self) -> u64 {
        self.count.load(Acquire) as u64 * 32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_not_believed_until_the_right_one_is_there() {
        let unsynced = UnsyncedUpdates::default();
        assert!(!unsynced.is_stale(1, Version(0)));
        assert!(unsynced.add(1, Version(5)) && unsynced.add(1, Version(3)));
        assert!(unsynced.version(1) == Some(Version(5)) && unsynced.memory() > 0);
        assert!(unsynced.is_stale(1, Version(4)) && !unsynced.is_stale(2, Version(0)));
        assert!(unsynced.is_stale(1, Version(5)), "it may be what was to be replaced");
        unsynced.written(1, Version(4));
        assert_eq!((unsynced.version(1), unsynced.version(2)), (Some(Version(5)), None));
        unsynced.written(1, Version(5));
        assert!(!unsynced.is_stale(1, Version(4)) && unsynced.version(1).is_none(), "forgotten");
        assert!(
            unsynced.add(1, Version(5)) && !unsynced.is_stale(1, Version(6)) && unsynced.version(1).is_none(),
            "another process has written a later version"
        );
    }
}
