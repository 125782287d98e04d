//! Counts jobs and batches.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Status};
use crate::metrics::{self, Count};

/// The counters of one scheduler.
pub(in super::super) struct Counters {
    answered: Count,
    failed: AtomicU64,
    batches: AtomicU64,
}

impl Counters {
    pub(in super::super) fn new() -> Self {
        Self { answered: Count::new(metrics::engine_requests(Status::Ok)), failed: 0.into(), batches: 0.into() }
    }

    pub(super) fn count_answered(&self) {
        self.answered.add(1);
    }

    pub(in super::super) fn count_failed(&self, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        metrics::engine_requests(error.status()).inc();
    }

    /// Counts a batch. `waited` has the queue time of each of its jobs.
    pub(super) fn count_batch(&self, waited: impl ExactSizeIterator<Item = Duration>) {
        let (sizes, seconds) = metrics::engine_batches();
        self.batches.fetch_add(1, Ordering::Relaxed);
        sizes.observe(waited.len() as f64);
        waited.for_each(|waited| seconds.observe(waited.as_secs_f64()));
    }

    /// The jobs that succeeded, the jobs that failed, and the batches.
    pub(in super::super) fn totals(&self) -> (u64, u64, u64) {
        (self.answered.get(), self.failed.load(Ordering::Relaxed), self.batches.load(Ordering::Relaxed))
    }
}
