//! What a table counts.

use super::lookup::Looked;
use crate::metrics::TableMetrics;

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

impl TableMetrics {
    pub(super) fn count(&self, looked: Looked) {
        self.lookups.add(1);
        self.asked.add(looked.keys as u64);
        self.hit.add(looked.hits as u64);
        self.default.add(looked.defaults as u64);
    }
}
