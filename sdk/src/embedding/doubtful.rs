//! Keys in the cache that a floor may know better, which did not answer when they were looked up.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most of them: what comes beyond is not cached.
const MOST: usize = 1 << 16;
/// How often a table complains in the log.
const QUIET: Duration = Duration::from_secs(10);

/// The doubtful keys of one table.
#[derive(Default)]
pub(super) struct Doubtful(Mutex<HashSet<i64>>);

impl Doubtful {
    /// Notes a key, if there is room.
    pub(super) fn add(&self, key: i64) -> bool {
        let mut keys = self.lock();
        (keys.len() < MOST || keys.contains(&key)) && {
            keys.insert(key);
            true
        }
    }

    /// Takes out up to `most` keys, to be read again.
    pub(super) fn take(&self, most: usize) -> Vec<i64> {
        let mut keys = self.lock();
        let taken: Vec<i64> = keys.iter().copied().take(most).collect();
        for key in &taken {
            keys.remove(key);
        }
        taken
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<i64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When it was last complained of something.
#[derive(Default)]
pub(super) struct Complaints(Mutex<Option<Instant>>);

impl Complaints {
    /// Whether it is time to complain again.
    pub(super) fn now(&self) -> bool {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() > QUIET);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_taken_once_and_there_are_never_too_many() {
        let doubtful = Doubtful::default();
        assert!((0..MOST as i64).all(|key| doubtful.add(key)));
        assert!(!doubtful.add(-1) && doubtful.add(7));
        let mut taken = doubtful.take(1000);
        assert!(doubtful.add(-1));
        taken.extend(doubtful.take(usize::MAX));
        taken.sort_unstable();
        assert!(taken.iter().copied().eq(-1..MOST as i64));
    }
}
