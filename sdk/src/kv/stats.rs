//! What a cache counts.

use crate::metrics::{self, Count};

/// What a cache has and what it did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct KvStats {
    /// Pages of the pool.
    pub pages: u64,
    /// Those that are free.
    pub free_pages: u64,
    /// Those that more than one owner has.
    pub shared_pages: u64,
    /// Owners in the pool.
    pub resident_owners: u64,
    /// Their tokens.
    pub resident_tokens: u64,
    /// Tokens of prepared histories that were in the pool.
    pub tokens_from_pool: u64,
    /// Tokens of prepared histories that came from the store.
    pub tokens_from_store: u64,
    /// Tokens that were new.
    pub tokens_new: u64,
    /// Owners that left the pool.
    pub evicted_owners: u64,
    /// Owners that left the pool, or were committed, and could not be handed to the store.
    pub failed_offloads: u64,
    /// Histories that could not be read from the store.
    pub failed_onloads: u64,
}

/// What the cache counts, for itself and for the metrics of the process.
pub(super) struct Counters {
    pub(super) from_pool: Count,
    pub(super) from_store: Count,
    pub(super) new: Count,
    pub(super) evicted: Count,
    pub(super) failed_offloads: Count,
    pub(super) failed_onloads: Count,
}

impl Counters {
    pub(super) fn new() -> Self {
        let count = Count::new;
        Self {
            from_pool: count(metrics::kv_tokens("pool")),
            from_store: count(metrics::kv_tokens("store")),
            new: count(metrics::kv_tokens("new")),
            evicted: count(metrics::kv_events("evicted")),
            failed_offloads: count(metrics::kv_events("failed_offload")),
            failed_onloads: count(metrics::kv_events("failed_onload")),
        }
    }
}
