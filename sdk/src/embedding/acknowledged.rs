//! Which versions callers were told that a table has.
//!
//! Where changes are kept by no disk of this process, what keeps them can lose them: a Redis node that comes back with an
//! older snapshot, rows that leave host memory. An older version that is found then is not served.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::mix::mix;
use crate::sync::RwLock;

const SHARDS: usize = 64;
/// The most keys of a shard: about 100 MB in all.
const MOST: usize = 1 << 16;

/// The acknowledged versions of one table.
pub(super) struct Acknowledged {
    shards: [RwLock<HashMap<i64, u64>>; SHARDS],
    /// How many there are, to be read without a lock: most tables are never changed.
    count: AtomicUsize,
}

impl Acknowledged {
    pub(super) fn new() -> Self {
        Self { shards: std::array::from_fn(|_| RwLock::default()), count: AtomicUsize::new(0) }
    }

    /// Remembers the version of keys. Gives how many others were forgotten for want of room.
    pub(super) fn add(&self, keys: &[i64], version: u64) -> usize {
        let mut forgotten = 0;
        for &key in keys {
            let mut shard = self.shard(key).write();
            if shard.len() >= MOST && !shard.contains_key(&key) {
                // Any: which ones were changed first is not known.
                let before = shard.len();
                let mut keep = false;
                shard.retain(|_, _| {
                    keep = !keep;
                    keep
                });
                forgotten += before - shard.len();
                self.count.fetch_sub(before - shard.len(), Ordering::Relaxed);
            }
            let known = shard.entry(key).or_insert_with(|| {
                self.count.fetch_add(1, Ordering::Release);
                version
            });
            *known = version.max(*known);
        }
        forgotten
    }

    /// The version of a key that was acknowledged; 0 if none is known.
    pub(super) fn version(&self, key: i64) -> u64 {
        if self.count.load(Ordering::Acquire) == 0 {
            return 0;
        }
        self.shard(key).read().get(&key).copied().unwrap_or(0)
    }

    /// Bytes of memory, about.
    pub(super) fn memory(&self) -> u64 {
        self.count.load(Ordering::Relaxed) as u64 * 24
    }

    fn shard(&self, key: i64) -> &RwLock<HashMap<i64, u64>> {
        &self.shards[mix(key, 5) as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_version_counts_and_there_are_never_too_many() {
        let acknowledged = Acknowledged::new();
        assert_eq!((acknowledged.version(1), acknowledged.memory()), (0, 0));
        acknowledged.add(&[1, 2], 5);
        acknowledged.add(&[1], 3);
        assert_eq!([1, 2, 3].map(|key| acknowledged.version(key)), [5, 5, 0]);
        let keys: Vec<i64> = (0..2 * (SHARDS * MOST) as i64).collect();
        let forgotten = acknowledged.add(&keys, 6);
        let left = acknowledged.memory() / 24;
        assert_eq!(left + forgotten as u64, keys.len() as u64);
        assert!(left <= (SHARDS * MOST) as u64);
        assert_eq!(acknowledged.version(*keys.last().unwrap()), 6);
    }
}
