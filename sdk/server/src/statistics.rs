//! What requests to a model have cost since it was opened, for Triton's extension of statistics.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use serde::Serialize;

/// How often something happened, and how long it took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Measured {
    /// How often.
    pub count: u64,
    /// Nanoseconds.
    pub ns: u64,
}

impl Measured {
    fn add(&mut self, took: Duration) {
        self.count += 1;
        self.ns += took.as_nanos() as u64;
    }
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that were answered: from the model's door to the last of the answer.
    pub success: Measured,
    /// Requests that failed, were refused by the model, or whose client went away.
    pub fail: Measured,
    /// The waiting of those that were answered, where it is measured.
    pub queue: Measured,
    /// The rest of their time.
    pub compute: Measured,
    /// When the last one ended, in milliseconds since 1970.
    pub last_ms: u64,
}

/// Counts the requests of a model.
#[derive(Default)]
pub struct Statistics(Mutex<Counts>);

impl Statistics {
    /// What was counted until now.
    pub fn counts(&self) -> Counts {
        *self.0.lock()
    }

    /// A request has come to the model.
    pub fn begin(self: &Arc<Self>) -> Timing {
        Timing { statistics: Arc::clone(self), since: Instant::now(), has_ended: false }
    }

    fn end(&self, took: Duration, count: impl FnOnce(&mut Counts, Duration)) {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mut counts = self.0.lock();
        counts.last_ms = now.as_millis() as u64;
        count(&mut counts, took);
    }
}

/// A request that runs. Dropped before its end, it has failed.
pub struct Timing {
    statistics: Arc<Statistics>,
    since: Instant,
    has_ended: bool,
}

impl Timing {
    /// It was answered, after it had waited so long, if that is known.
    pub fn succeeded(mut self, queued: Option<Duration>) {
        self.has_ended = true;
        self.statistics.end(self.since.elapsed(), |counts, took| {
            counts.success.add(took);
            if let Some(queued) = queued {
                counts.queue.add(queued);
            }
            counts.compute.add(took.saturating_sub(queued.unwrap_or_default()));
        });
    }
}

impl Drop for Timing {
    fn drop(&mut self) {
        if !self.has_ended {
            self.statistics.end(self.since.elapsed(), |counts, took| counts.fail.add(took));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_has_failed() {
        let statistics = Arc::new(Statistics::default());
        drop(statistics.begin());
        let timing = statistics.begin();
        std::thread::sleep(Duration::from_millis(2));
        timing.succeeded(Some(Duration::from_millis(1)));
        statistics.begin().succeeded(None);
        let counts = statistics.counts();
        assert_eq!((counts.success.count, counts.fail.count, counts.queue.count, counts.compute.count), (2, 1, 1, 2));
        assert_eq!(counts.queue.ns, 1_000_000);
        assert!(counts.success.ns >= 2_000_000 && counts.compute.ns == counts.success.ns - counts.queue.ns);
        assert!(counts.last_ms > 1_600_000_000_000);
    }
}
