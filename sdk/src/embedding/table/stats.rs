//! The counts of a lookup and of a table.

use crate::metrics::TableMetrics;

/// The counts of one lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct LookupStats {
    /// The number of unique keys. If the cache held all of them, duplicates are not removed: the number of keys as
    /// given.
    pub keys: usize,
    /// How many of them the cache held.
    pub hits: usize,
    /// How many of them got the default row, for any reason.
    pub defaults: usize,
}

/// The counts of a table since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct TableStats {
    /// Lookups.
    pub lookups: u64,
    /// Keys of all lookups, as in [`LookupStats`].
    pub keys: u64,
    /// Keys that the cache held.
    pub hits: u64,
    /// Keys that got the default row.
    pub defaults: u64,
    /// Keys that were to be fetched in the background and were dropped because the queue was full.
    pub dropped: u64,
    /// Rows in the cache.
    pub cached_rows: u64,
    /// Capacity of the cache in rows.
    pub cache_rows: u64,
    /// Approximate bytes of memory of the cache and the tiers.
    pub memory: u64,
    /// The longest time in seconds for which an update by another process may be unseen. Negative: without limit,
    /// because the cache is not refreshed.
    pub stale_seconds: i64,
}

impl TableMetrics {
    pub(in crate::embedding) fn count(&self, lookup: LookupStats) {
        self.lookups.add(1);
        self.asked.add(lookup.keys as u64);
        self.hit.add(lookup.hits as u64);
        self.default.add(lookup.defaults as u64);
    }
}
