//! Keys in the cache that a floor may know better, which did not answer when they were looked up.

use crate::sync::{Mutex, MutexGuard};
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

/// The most of them: what comes beyond is not cached.
const MOST: usize = 1 << 16;
/// How often a table complains in the log.
const QUIET: Duration = Duration::from_secs(10);

/// The doubtful keys of one table.
#[derive(Default)]
pub(super) struct Doubtful(Mutex<Keys>);

/// In the order in which they came: whoever stays doubtful goes to the end, so that the others have their turn.
#[derive(Default)]
struct Keys {
    order: VecDeque<i64>,
    all: HashSet<i64>,
}

impl Doubtful {
    /// Notes a key, if there is room.
    pub(super) fn add(&self, key: i64) -> bool {
        let mut keys = self.lock();
        if keys.all.len() >= MOST {
            return keys.all.contains(&key);
        }
        if keys.all.insert(key) {
            keys.order.push_back(key);
        }
        true
    }

    /// Takes out up to `most` keys, to be read again.
    pub(super) fn take(&self, most: usize) -> Vec<i64> {
        let mut keys = self.lock();
        let most = most.min(keys.order.len());
        let taken: Vec<i64> = keys.order.drain(..most).collect();
        for key in &taken {
            keys.all.remove(key);
        }
        taken
    }

    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.0.lock()
    }
}

/// When it was last complained of something.
#[derive(Default)]
pub(super) struct Complaints(Mutex<Option<Instant>>);

impl Complaints {
    /// Whether it is time to complain again.
    pub(super) fn now(&self) -> bool {
        let mut last = self.0.lock();
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
        let taken = doubtful.take(1000);
        assert!(taken.iter().copied().eq(0..1000));
        assert!(doubtful.add(-1) && doubtful.add(5));
        assert!(doubtful.take(usize::MAX).into_iter().eq((1000..MOST as i64).chain([-1, 5])));
        assert!(doubtful.take(1).is_empty());
    }
}
