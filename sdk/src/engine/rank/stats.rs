//! What an engine reports: where its model runs, and its counters.

use crate::metrics::{self, Count};
use crate::runtime::Provider;

/// Where the model of an engine runs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct EngineProvider {
    /// [`Provider::Cpu`] or [`Provider::Cuda`].
    pub provider: Provider,
    /// The number of the GPU; `None` on the CPU.
    pub device_id: Option<u32>,
    /// Why [`Provider::Auto`] chose the CPU; empty in all other cases.
    pub reason: String,
}

/// The counters of an engine since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct EngineStats {
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed, for any reason.
    pub failed: u64,
    /// Batches.
    pub batches: u64,
    /// Rows of histories that were cached.
    pub cached_rows: u64,
    /// Rows of histories that were computed.
    pub computed_rows: u64,
    /// Requests in the queue.
    pub waiting: u64,
    /// Users in the event log.
    pub remembered_users: u64,
    /// The size of those events in bytes.
    pub remembered_bytes: u64,
}

/// Counts rows of histories.
pub(super) struct RowCounters {
    cached: Count,
    computed: Count,
}

impl RowCounters {
    pub(super) fn new() -> Self {
        Self {
            cached: Count::new(metrics::engine_rows("cached")),
            computed: Count::new(metrics::engine_rows("computed")),
        }
    }

    pub(super) fn add(&self, cached: u64, computed: u64) {
        self.cached.add(cached);
        self.computed.add(computed);
    }

    /// The cached rows and the computed rows.
    pub(super) fn totals(&self) -> (u64, u64) {
        (self.cached.get(), self.computed.get())
    }
}
