//! The versions of updates that were acknowledged to callers.
//!
//! A tier that is not a disk tier of this process can lose an acknowledged update: a Redis node restarts from an older
//! snapshot, or host memory evicts the row. Lookups compare versions with these and do not serve an older one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::version::Version;
use crate::embedding::hash::mix;
use crate::sync::RwLock;

const SHARDS: usize = 64;
/// The most keys of a shard. All shards together take about 100 MB.
const MAX_KEYS: usize = 1 << 16;

/// The acknowledged versions of one table.
pub(in crate::embedding) struct AcknowledgedVersions {
    shards: [RwLock<HashMap<i64, Version>>; SHARDS],
    /// The number of keys. Read without a lock: most tables are never updated.
    count: AtomicUsize,
}

impl AcknowledgedVersions {
    pub(in crate::embedding) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::default()), count: AtomicUsize::new(0) }
    }

    /// Adds the version of keys. Returns how many other keys were dropped because a shard was full.
    pub(in crate::embedding) fn add(&self, keys: &[i64], version: Version) -> usize {
        let mut dropped = 0;
        for &key in keys {
            let mut shard = self.shard(key).write();
            if shard.len() >= MAX_KEYS && !shard.contains_key(&key) {
                // Every second one: the order of updates is not recorded.
                let before = shard.len();
                let mut keep = false;
                shard.retain(|_, _| {
                    keep = !keep;
                    keep
                });
                dropped += before - shard.len();
                self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
            }
            let known = shard.entry(key).or_insert_with(|| {
                self.count.fetch_add(1, Ordering::Release);
                version
            });
            *known = version.max(*known);
        }
        dropped
    }

    /// The acknowledged version of a key; [`Version::LOADED`] if none is known.
    pub(in crate::embedding) fn version(&self, key: i64) -> Version {
        if self.count.load(Ordering::Acquire) == 0 {
            return Version::LOADED;
        }
        self.shard(key).read().get(&key).copied().unwrap_or_default()
    }

    /// The approximate number of bytes in memory.
    pub(in crate::embedding) fn memory(&self) -> u64 {
        self.count.load(Ordering::Relaxed) as u64 * 24
    }

    fn shard(&self, key: i64) -> &RwLock<HashMap<i64, Version>> {
        &self.shards[mix(key, 5) as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_counts_and_there_are_never_too_many() {
        let acknowledged = AcknowledgedVersions::new();
        assert_eq!((acknowledged.version(1), acknowledged.memory()), (Version(0), 0));
        acknowledged.add(&[1, 2], Version(5));
        acknowledged.add(&[1], Version(3));
        assert_eq!([1, 2, 3].map(|key| acknowledged.version(key).0), [5, 5, 0]);
        let keys: Vec<i64> = (0..2 * (SHARDS * MAX_KEYS) as i64).collect();
        let dropped = acknowledged.add(&keys, Version(6));
        let left = acknowledged.memory() / 24;
        assert_eq!(left + dropped as u64, keys.len() as u64);
        assert!(left <= (SHARDS * MAX_KEYS) as u64);
        assert_eq!(acknowledged.version(*keys.last().unwrap()), Version(6));
    }
}
