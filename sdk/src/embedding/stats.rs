//! What a table counts.

use super::lookup::Looked;
use crate::metrics::{self, Count};

/// What a table did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Lookups.
    pub lookups: u64,
    /// Different keys of each.
    pub keys: u64,
    /// Those that the cache had.
    pub hits: u64,
    /// Those that got the default vector.
    pub defaults: u64,
    /// Keys that were to be inserted in the background and found no room in the queue.
    pub dropped: u64,
    /// Rows that are in the cache.
    pub cached_rows: u64,
    /// Rows that it has room for.
    pub cache_rows: u64,
    /// Bytes of memory that the cache and the floors take, about.
    pub memory: u64,
    /// For how many seconds at most a change that did not go through this process may not have been seen; negative if it
    /// may not be seen at all, because nothing refreshes the cache.
    pub stale_seconds: i64,
}

/// The counters, for the table and for the metrics of the process.
pub(super) struct Counters {
    pub(super) lookups: Count,
    pub(super) keys: Count,
    pub(super) hits: Count,
    pub(super) defaults: Count,
    pub(super) dropped: Count,
}

impl Counters {
    pub(super) fn new(table: &str) -> Self {
        let count = |kind| Count::new(metrics::embedding_keys(table, kind));
        Self {
            lookups: Count::new(metrics::embedding_lookups(table)),
            keys: count("asked"),
            hits: count("hit"),
            defaults: count("default"),
            dropped: count("dropped"),
        }
    }

    pub(super) fn count(&self, looked: Looked) {
        self.lookups.add(1);
        self.keys.add(looked.keys as u64);
        self.hits.add(looked.hits as u64);
        self.defaults.add(looked.defaults as u64);
    }
}
