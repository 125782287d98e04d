//! What a cluster counts.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::stats::RedisStats;

/// The counts of all tables.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) trips: AtomicU64,
    pub(super) timeouts: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) evicted: AtomicU64,
}

impl Counters {
    pub(super) fn stats(&self) -> RedisStats {
        RedisStats {
            trips: self.trips.load(Relaxed),
            timeouts: self.timeouts.load(Relaxed),
            errors: self.errors.load(Relaxed),
            evicted: self.evicted.load(Relaxed),
        }
    }
}
