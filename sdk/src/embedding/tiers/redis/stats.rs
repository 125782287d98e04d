//! The counts of the Redis tier.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The counts of a Redis Cluster since it was opened, for all tables together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RedisStats {
    /// How often a circuit breaker opened because of failures of a node.
    pub trips: u64,
    /// Lookups and writes that exceeded their time limit.
    pub timeouts: u64,
    /// Lookups and writes that failed for some of their keys, for any reason.
    pub errors: u64,
    /// Rows that were evicted because their partition was full.
    pub evicted: u64,
}

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
