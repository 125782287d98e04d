//! Keys that no floor holds, remembered for a while, so that they are not looked for again and again.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::mix::mix;
use crate::sync::{Mutex, MutexGuard};

const SHARDS: usize = 16;
/// The most keys of a shard: about 2 MiB in all.
const MOST: usize = 1 << 12;

/// The absent keys of one table.
pub(super) struct Absent {
    shards: [Mutex<HashMap<i64, Instant>>; SHARDS],
    time_to_live: Duration,
}

impl Absent {
    pub(super) fn new(time_to_live: Duration) -> Self {
        Self { shards: Default::default(), time_to_live }
    }

    /// Whether a key is known to be nowhere.
    pub(super) fn contains(&self, key: i64) -> bool {
        self.shard(key).get(&key).is_some_and(|until| Instant::now() < *until)
    }

    /// Remembers a key, if `current` says that it was not updated meanwhile.
    pub(super) fn add(&self, key: i64, current: impl FnOnce() -> bool) {
        if self.time_to_live.is_zero() {
            return;
        }
        let now = Instant::now();
        let mut shard = self.shard(key);
        if shard.len() >= MOST {
            shard.retain(|_, until| now < *until);
            // Those that were added long ago are gone now; if all are new, some of them go.
            let mut left = MOST / 2;
            shard.retain(|_, _| {
                left = left.saturating_sub(1);
                left > 0
            });
        }
        if current() {
            shard.insert(key, now + self.time_to_live);
        }
    }

    /// Forgets keys: they are there now.
    pub(super) fn remove(&self, keys: &[i64]) {
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
        let absent = Absent::new(Duration::from_secs(3600));
        absent.add(1, || true);
        absent.add(2, || false);
        assert!(absent.contains(1) && !absent.contains(2) && !absent.contains(3));
        absent.remove(&[1, 3]);
        assert!(!absent.contains(1));
        let short = Absent::new(Duration::from_millis(1));
        short.add(1, || true);
        std::thread::sleep(Duration::from_millis(2));
        assert!(!short.contains(1));
    }

    #[test]
    fn there_are_never_too_many() {
        let absent = Absent::new(Duration::from_secs(3600));
        for key in 0..10 * (SHARDS * MOST) as i64 {
            absent.add(key, || true);
        }
        assert!(absent.shards.iter().all(|shard| shard.lock().len() <= MOST));
        assert!(absent.contains(10 * (SHARDS * MOST) as i64 - 1));
    }
}
