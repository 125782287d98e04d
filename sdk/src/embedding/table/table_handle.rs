//! A handle of a table, as one model uses it.

use std::sync::Arc;

use super::Table;
use super::stats::TableStats;
use crate::embedding::lookup::background_fetch::BackgroundFetch;
use crate::embedding::lookup::unique_keys::UniqueKeys;
use crate::embedding::options::NameOptions;
use crate::embedding::row::RowType;
use crate::embedding::update::Reach;
use crate::embedding::update::version::Version;
use crate::error::Result;

/// A handle of a table, as one model uses it. Models can share the rows and the cache of a table; each has a default
/// row and a hit rate threshold of its own. Any number of threads may use a handle at the same time. It stays valid
/// after its model is retired.
#[derive(Clone)]
pub struct EmbeddingTable {
    pub(in crate::embedding) table: Arc<Table>,
    pub(in crate::embedding) background: Arc<BackgroundFetch>,
    /// The row of keys that are not found.
    pub(in crate::embedding) default: Arc<[f32]>,
    pub(in crate::embedding) hit_rate_threshold: f64,
    /// Whether the model uses the cache. A shared table may have one for another model.
    pub(in crate::embedding) cached: bool,
    /// The GPUs that the model may run on. Empty: any.
    pub(in crate::embedding) devices: Arc<[u32]>,
    pub(in crate::embedding) name_options: NameOptions,
}

impl EmbeddingTable {
    /// The name: `model/table`, with the model that opened the table first.
    pub fn name(&self) -> &str {
        &self.table.name
    }

    /// The number of elements of a row.
    pub fn dim(&self) -> usize {
        self.table.layout.dim()
    }

    /// The type of the stored rows.
    pub fn row_type(&self) -> RowType {
        self.table.layout.row_type()
    }

    /// The row of keys that are not found.
    pub fn default_row(&self) -> &[f32] {
        &self.default
    }

    /// Replaces rows or adds them. `numbers` has a row for each key; the last row of a duplicate key counts. Rows with
    /// a higher version stay.
    pub fn upsert(&self, version: u64, keys: &[i64], numbers: &[f32], reach: Reach) -> Result<()> {
        self.table.upsert(Version(version), keys, numbers, reach).map_err(self.name_options)
    }

    /// Deletes rows. Rows with a higher version stay.
    pub fn delete(&self, version: u64, keys: &[i64], reach: Reach) -> Result<()> {
        self.table.delete(Version(version), keys, reach).map_err(self.name_options)
    }

    /// Starts to fetch keys into the cache in the background and returns at once. Returns how many keys were queued:
    /// those that are not cached, as far as the queue has room. If the table has a cache on a GPU, no key counts as
    /// cached.
    pub fn prefetch(&self, keys: &[i64]) -> usize {
        let Some(cache) = &self.table.cache else { return 0 };
        let mut missing = Vec::new();
        if self.table.devices.live().is_empty() {
            cache.probe(keys, &mut missing);
        } else {
            // The host does not know which keys a GPU holds.
            missing.extend(0..keys.len() as u32);
        }
        let missing = UniqueKeys::of(missing.iter().map(|&place| keys[place as usize]));
        self.background.enqueue(&self.table, missing.keys)
    }

    /// Reads all cached rows again from the tiers below.
    pub fn refresh(&self) {
        self.table.refresh_all();
    }

    /// The counts since the table was opened.
    pub fn stats(&self) -> TableStats {
        let Table { metrics, cache, .. } = &*self.table;
        TableStats {
            lookups: metrics.lookups.get(),
            keys: metrics.asked.get(),
            hits: metrics.hit.get(),
            defaults: metrics.default.get(),
            dropped: metrics.dropped.get(),
            cached_rows: cache.as_ref().map_or(0, |cache| cache.len() as u64),
            cache_rows: cache.as_ref().map_or(0, |cache| cache.capacity() as u64),
            memory: self.table.memory(),
            stale_seconds: self.table.stale().map_or(-1, |stale| stale.as_secs() as i64),
        }
    }
}
