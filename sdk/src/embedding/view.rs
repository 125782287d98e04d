//! A table as one model sees it.

use std::sync::Arc;

use super::later::Later;
use super::row::RowType;
use super::stats::TableStats;
use super::table::Table;
use super::update::Reach;
use crate::error::Result;

/// A table as one model sees it: several models can share the rows and the cache, each with a default vector and a
/// threshold of its own. Any number of threads may use one at the same time; it stays good when its model is retired.
#[derive(Clone)]
pub struct EmbeddingTable {
    pub(super) table: Arc<Table>,
    pub(super) later: Arc<Later>,
    /// What a key that is not there gets.
    pub(super) default: Arc<[f32]>,
    pub(super) hit_rate_threshold: f64,
    /// Whether the model uses the cache that the table may have for another's sake.
    pub(super) cached: bool,
    /// The GPUs that the model may run on; none: any.
    pub(super) devices: Arc<[u32]>,
}

impl EmbeddingTable {
    /// Its name: `model/table`, of the first model that brought it.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    /// How many numbers a row has.
    pub fn dim(&self) -> usize {
        self.table.layout.dim()
    }

    /// How rows are kept.
    pub fn row_type(&self) -> RowType {
        self.table.layout.row_type()
    }

    /// What a key that is not there gets.
    pub fn default_row(&self) -> &[f32] {
        &self.default
    }

    /// Replaces rows or adds them: `numbers` has one for each key; of a key that comes twice the last one counts. A row
    /// that has a higher version already stays.
    pub fn upsert(&self, version: u64, keys: &[i64], numbers: &[f32], reach: Reach) -> Result<()> {
        self.table.upsert(version, keys, numbers, reach)
    }

    /// Deletes rows, unless they have a higher version.
    pub fn delete(&self, version: u64, keys: &[i64], reach: Reach) -> Result<()> {
        self.table.delete(version, keys, reach)
    }

    /// Begins to bring keys that are expected soon into the cache and returns at once. Says how many were not there and
    /// found room in the queue; with a cache on a GPU all of them count as not there.
    pub fn prefetch(&self, keys: &[i64]) -> usize {
        let Some(cache) = &self.table.cache else { return 0 };
        let mut missing = Vec::new();
        if self.table.devices.live().is_empty() {
            cache.probe(keys, &mut missing);
        } else {
            // What a device has no one knows here.
            missing.extend(0..keys.len() as u32);
        }
        let missing = super::distinct::Distinct::of(missing.iter().map(|&place| keys[place as usize]));
        self.later.insert(&self.table, missing.keys)
    }

    /// Reads what is in the cache again from the floors below, all of it, now.
    pub fn refresh(&self) {
        self.table.refresh_all();
    }

    /// What it did since it was opened.
    pub fn stats(&self) -> TableStats {
        let Table { counters, cache, .. } = &*self.table;
        TableStats {
            lookups: counters.lookups.get(),
            keys: counters.asked.get(),
            hits: counters.hit.get(),
            defaults: counters.default.get(),
            dropped: counters.dropped.get(),
            cached_rows: cache.as_ref().map_or(0, |cache| cache.len() as u64),
            cache_rows: cache.as_ref().map_or(0, |cache| cache.capacity() as u64),
            memory: self.table.memory(),
            stale_seconds: self.table.stale().map_or(-1, |stale| stale.as_secs() as i64),
        }
    }
}
