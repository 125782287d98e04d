//! The limits of the tier in host memory.

use crate::embedding::eviction::Eviction;

/// How many rows of a table the tier holds, and what happens beyond that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::embedding) struct MemoryLimits {
    /// The number of partitions. Rows are spread over them by a hash of the key. Each has a lock of its own: more of
    /// them admit more threads at the same time.
    pub(in crate::embedding) partitions: usize,
    /// The most rows of a partition, tombstones included. 0: none.
    pub(in crate::embedding) max_rows: usize,
    /// Which rows a full partition evicts.
    pub(in crate::embedding) eviction: Eviction,
    /// The share of `max_rows` at which eviction ends, from 0 to 1. Each insertion evicts a few rows.
    pub(in crate::embedding) keep: f64,
}

#[cfg(test)]
impl Default for MemoryLimits {
    fn default() -> Self {
        Self { partitions: 16, max_rows: usize::MAX, eviction: Eviction::default(), keep: 0.8 }
    }
}
