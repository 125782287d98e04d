//! The negative cache: keys that no tier holds. Lookups do not search the tiers for them until they expire.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::embedding::hash::mix;
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;
/// The most keys of a shard. All shards together take about 2 MiB.
const MAX_KEYS: usize = 1 << 12;

/// The negative cache of one table.
pub(in crate::embedding) struct NegativeCache {
    shards: [Mutex<HashMap<i64, Instant>>; SHARDS],
    time_to_live: Duration,
}

impl NegativeCache {
    pub(in crate::embedding) fn new(time_to_live: Duration) -> Self {
        Self { shards: Default::default(), time_to_live }
    }

    /// Whether a key is known to be in no tier.
    pub(in crate::embedding) fn contains(&self, key: i64) -> bool {
        self.contains_at(key, Instant::now)
    }

    fn contains_at(&self, key: i64, now: impl FnOnce() -> Instant) -> bool {
        self.shard(key).get(&key).is_some_and(|until| now() < *until)
    }

    /// Adds a key, unless `current` returns false: the key was updated since it was looked up.
    pub(in crate::embedding) fn add(&self, key: i64, current: impl FnOnce() -> bool) {
        if self.time_to_live.is_zero() {
            return;
        }
        let now = Instant::now();
        let mut shard = self.shard(key);
        if shard.len() >= MAX_KEYS {
            shard.retain(|_, until| now < *until);
            // If none or few have expired, half of the keys leave.
            let mut left = MAX_KEYS / 2;
            shard.retain(|_, _| {
                left = left.saturating_sub(1);
                left > 0
            });
        }
        if current() {
            shard.insert(key, now + self.time_to_live);
        }
    }

    /// Removes keys: an update may have added them to a tier.
    pub(in crate::embedding) fn remove(&self, keys: &[i64]) {
        for key in keys {
            self.shard(*key).remove(key);
        }
    }

    fn shard(&self, key: i64) -> MutexGuard<'_, HashMap<i64, Instant>> {
        self.shards[mix(key, 3) as usize % SHARDS].lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_remembered_for_a_while() {
        let absent = NegativeCache::new(Duration::from_secs(3600));
        absent.add(1, || true);
        absent.add(2, || false);
        assert!(absent.contains(1) && !absent.contains(2) && !absent.contains(3));
        absent.remove(&[1, 3]);
        assert!(!absent.contains(1));
        absent.add(1, || true);
        assert!(!absent.contains_at(1, || Instant::now() + Duration::from_secs(3600)));
    }

    #[test]
    fn there_are_never_too_many() {
        let absent = NegativeCache::new(Duration::from_secs(3600));
        for key in 0..10 * (SHARDS * MAX_KEYS) as i64 {
            absent.add(key, || true);
        }
        assert!(absent.shards.iter().all(|shard| shard.lock().len() <= MAX_KEYS));
        assert!(absent.contains(10 * (SHARDS * MAX_KEYS) as i64 - 1));
    }
}
