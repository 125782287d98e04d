//! Limits how often a warning is logged.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// The shortest time between two warnings of one table.
const INTERVAL: Duration = Duration::from_secs(10);

/// The time of the last warning.
#[derive(Default)]
pub(super) struct LogThrottle(Mutex<Option<Instant>>);

impl LogThrottle {
    /// Whether a warning may be logged now. If so, the next one may be logged after an interval.
    pub(super) fn is_due(&self) -> bool {
        let mut last = self.0.lock();
        let due = last.is_none_or(|last| last.elapsed() > INTERVAL);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}
