//! Lookups: hits are read from the cache at once, and a policy decides about the misses.

pub(in crate::embedding) mod background_fetch;
pub(in crate::embedding) mod gpu_lookup;
mod graph_tables;
mod miss_list;
pub(in crate::embedding) mod negative_cache;
pub(in crate::embedding) mod pooling;
pub(in crate::embedding) mod tier_lookup;
pub(in crate::embedding) mod tier_result;
pub(in crate::embedding) mod unique_keys;

use std::time::{Duration, Instant};

use self::miss_list::MissList;
use self::tier_result::KeyState;
use self::unique_keys::UniqueKeys;
use crate::embedding::table::stats::LookupStats;
use crate::embedding::table::table_handle::EmbeddingTable;
use crate::error::{Error, Result};

/// Longer than any deadline.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// What a lookup does about keys that the cache does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Miss {
    /// Below the table's `hit_rate_threshold` as [`Miss::Wait`], otherwise as [`Miss::Default`].
    #[default]
    ByHitRate,
    /// Fetches the rows from the tiers below and returns them.
    Wait,
    /// Returns the table's default row, and fetches the rows into the cache in the background.
    Default,
    /// Fetches the rows, and returns the default row for keys whose row does not arrive within the time limit. Late
    /// rows are cached when they arrive.
    Within(Duration),
}

impl EmbeddingTable {
    /// Looks up keys, which may contain duplicates. Writes a row for each key to `numbers`, and to `found` whether it
    /// is the row of the key (true) or the default row.
    pub fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool], miss: Miss) -> Result<LookupStats> {
        self.check(keys, numbers, found)?;
        let mut missing = Vec::new();
        match self.table.cache.as_ref().filter(|_| self.cached) {
            Some(cache) => cache.lookup(keys, numbers, &mut missing),
            None => missing.extend(0..keys.len() as u32),
        }
        found.fill(true);
        let stats = if missing.is_empty() {
            LookupStats { keys: keys.len(), hits: keys.len(), defaults: 0 }
        } else {
            self.look_up_misses(keys, &missing, numbers, found, miss)
        };
        self.table.metrics.count(stats);
        Ok(stats)
    }

    fn check(&self, keys: &[i64], numbers: &[f32], found: &[bool]) -> Result<()> {
        if keys.len() > u32::MAX as usize / 2 {
            return Err(Error::invalid("keys", format!("{} keys are too many for one call", keys.len())));
        }
        let (dim, count) = (self.dim(), keys.len());
        if numbers.len() != count * dim {
            let message = format!(
                "there is room for {} numbers and {count} keys of table {} take {dim} each: make it {}",
                numbers.len(),
                self.table.name,
                count * dim
            );
            return Err(Error::invalid("numbers", message));
        }
        if found.len() != count {
            return Err(Error::invalid("found", format!("there is room for {} marks and {count} keys", found.len())));
        }
        Ok(())
    }

    /// Serves the keys at the places `missing`, which the cache does not hold.
    fn look_up_misses(
        &self,
        keys: &[i64],
        missing: &[u32],
        numbers: &mut [f32],
        found: &mut [bool],
        miss: Miss,
    ) -> LookupStats {
        let table = &self.table;
        let mut misses = MissList::new(table.layout, missing.iter().map(|&place| keys[place as usize]));
        let hits = self.unique_hits(keys, missing);
        let count = hits + misses.keys().len();
        let miss = match miss {
            // Without a cache there is no hit rate: every lookup waits for the tiers.
            Miss::ByHitRate if !self.cached || table.cache.is_none() || self.below_threshold(hits, count) => Miss::Wait,
            Miss::ByHitRate => Miss::Default,
            miss => miss,
        };
        // The misses that may be in a tier, and their indices in the list.
        let (indices, sought): (Vec<u32>, Vec<i64>) =
            (0..).zip(misses.keys().iter().copied()).filter(|&(_, key)| !table.negative_cache.contains(key)).unzip();
        match miss {
            _ if sought.is_empty() => {}
            Miss::Wait | Miss::ByHitRate => {
                let store = |found: &_| self.background.store_shared(table, &sought, found);
                misses.take(&indices, &table.fetch_rows(&sought, None, &mut |_| (), store));
            }
            Miss::Default => {
                self.background.enqueue(table, sought);
            }
            Miss::Within(limit) => self.fetch_within(limit, &indices, &sought, &mut misses),
        }
        for (&place, &index) in missing.iter().zip(misses.indices()) {
            let place = place as usize;
            match misses.row(index as usize) {
                Some(row) => numbers[place * row.len()..][..row.len()].copy_from_slice(row),
                None => {
                    numbers[place * self.dim()..][..self.dim()].copy_from_slice(&self.default);
                    found[place] = false;
                }
            }
        }
        LookupStats { keys: count, hits, defaults: misses.without_row() }
    }

    /// Fetches rows from host memory, and within a time limit from the tiers below it.
    fn fetch_within(&self, limit: Duration, indices: &[u32], sought: &[i64], misses: &mut MissList) {
        // A limit beyond the range of the clock is never reached.
        let deadline = Instant::now().checked_add(limit).unwrap_or_else(|| Instant::now() + FOREVER);
        let (mut indices, mut sought) = (indices.to_vec(), sought.to_vec());
        if let Some(found) = self.table.fetch_from_memory(&sought) {
            misses.take(&indices, &found);
            let unknown = found.indices(|index| found.states[index] == KeyState::Unknown);
            indices = unknown.iter().map(|&index| indices[index as usize]).collect();
            sought = unknown.iter().map(|&index| sought[index as usize]).collect();
        }
        if !sought.is_empty() {
            self.background.fetch_until(&self.table, sought, deadline, |found| misses.take(&indices, found));
        }
    }

    /// Whether the hit rate is below the threshold. At the threshold it is not.
    pub(in crate::embedding) fn below_threshold(&self, hits: usize, keys: usize) -> bool {
        // A division: 7 of 10 keys are exactly at a threshold of 0.7. The product 0.7 * 10 may be rounded to another
        // number.
        (hits as f64 / keys as f64) < self.hit_rate_threshold
    }

    /// The number of unique keys that the cache held.
    fn unique_hits(&self, keys: &[i64], missing: &[u32]) -> usize {
        let mut missing = missing.iter().copied().peekable();
        let hits = (0..).zip(keys).filter(|(place, _)| missing.next_if_eq(place).is_none());
        // A duplicate key whose row was cached or evicted during the lookup counts as a hit and as a miss.
        UniqueKeys::count(keys.len(), hits.map(|(_, &key)| key))
    }
}
