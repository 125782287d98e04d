//! What an engine counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::{Error, Status};
use crate::metrics::{self, Count};

/// What an engine did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed, for whatever reason.
    pub failed: u64,
    /// Batches that ran.
    pub batches: u64,
    /// Rows of histories that were cached.
    pub cached_rows: u64,
    /// Rows of histories that were computed.
    pub computed_rows: u64,
    /// Requests that wait now.
    pub waiting: u64,
    /// Users whose events are remembered.
    pub remembered_users: u64,
    /// Bytes that those take.
    pub remembered_bytes: u64,
}

/// The same, while it is counted.
pub(super) struct Counters {
    answered: Count,
    failed: AtomicU64,
    batches: AtomicU64,
    cached: Count,
    computed: Count,
}

impl Counters {
    pub(super) fn new() -> Self {
        Self {
            answered: Count::new(metrics::engine_requests(Status::Ok)),
            failed: 0.into(),
            batches: 0.into(),
            cached: Count::new(metrics::engine_rows("cached")),
            computed: Count::new(metrics::engine_rows("computed")),
        }
    }

    pub(super) fn answered(&self) {
        self.answered.add(1);
    }

    pub(super) fn failed(&self, error: &Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        metrics::engine_requests(error.status()).inc();
    }

    /// A batch is put together; `waited` says for how long each of its requests has waited.
    pub(super) fn batch(&self, waited: impl ExactSizeIterator<Item = Duration>) {
        let (sizes, seconds) = metrics::engine_batches();
        self.batches.fetch_add(1, Ordering::Relaxed);
        sizes.observe(waited.len() as f64);
        waited.for_each(|waited| seconds.observe(waited.as_secs_f64()));
    }

    pub(super) fn rows(&self, cached: u64, computed: u64) {
        self.cached.add(cached);
        self.computed.add(computed);
    }

    pub(super) fn stats(&self, waiting: usize, (remembered_users, remembered_bytes): (u64, u64)) -> EngineStats {
        EngineStats {
            answered: self.answered.get(),
            failed: self.failed.load(Ordering::Relaxed),
            batches: self.batches.load(Ordering::Relaxed),
            cached_rows: self.cached.get(),
            computed_rows: self.computed.get(),
            waiting: waiting as u64,
            remembered_users,
            remembered_bytes,
        }
    }
}
