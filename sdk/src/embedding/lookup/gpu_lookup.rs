//! Lookups on a GPU: hits are read from the cache there, and a policy decides about the misses.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use pagoda_custom_ops::side_channel::tables::{DeviceBag, DeviceRows};

use super::Miss;
use super::background_fetch::BackgroundFetch;
use super::unique_keys::UniqueKeys;
use crate::device::{BagCall, CUstream, DeviceMemory, Gpu, MissList, RowCache};
use crate::embedding::options::DEVICES;
use crate::embedding::table::stats::LookupStats;
use crate::embedding::table::table_handle::EmbeddingTable;
use crate::embedding::table::{STEP_KEYS, Table};
use crate::embedding::tiers::gpu::device_cache::{DeviceCache, element};
use crate::embedding::tiers::gpu::miss_drain::{MissSink, PendingLookup};
use crate::error::{Error, Result, Status};

/// A table on a GPU, as one model uses it.
pub(super) struct GpuTable {
    handle: EmbeddingTable,
    cache: Arc<DeviceCache>,
    /// Receives the misses of lookups that do not wait.
    misses: Arc<dyn MissSink>,
    /// The default row, on the GPU.
    default: DeviceMemory,
    miss: Miss,
    no_key: Option<i64>,
}

impl GpuTable {
    /// The table of a handle on a GPU; `None` if the table is not cached there. `no_key` is padding: it is not looked
    /// up.
    pub(super) fn open(
        handle: &EmbeddingTable,
        gpu: &'static Gpu,
        miss: Miss,
        no_key: Option<i64>,
    ) -> Result<Option<Self>> {
        let (table, ordinal) = (&handle.table, gpu.ordinal());
        let Some(cache) = table.cache.as_ref().filter(|_| handle.cached) else { return Ok(None) };
        if !RowCache::takes(table.layout.dim(), element(table.layout)) {
            return Ok(None);
        }
        check_deployed(&table.name, &handle.devices, ordinal).map_err(handle.name_options)?;
        let opened = table.devices.on(gpu, &table.name, table.layout, cache.capacity());
        let (on_device, new) = opened.map_err(handle.name_options)?;
        let failed = |error| Error::new(Status::Runtime, format!("GPU {ordinal}: {error}"));
        let default = DeviceMemory::zeroed(gpu, size_of_val(&*handle.default)).map_err(failed)?;
        let stream = gpu.context().default_stream();
        // SAFETY: the memory is as long as the row, and nothing else refers to it yet.
        unsafe { gpu.write(default.address(), &handle.default, stream.cu_stream()) }.map_err(failed)?;
        if new {
            fill(handle, &on_device);
        }
        let misses = Arc::new(FetchMisses { table: Arc::downgrade(table), background: Arc::clone(&handle.background) });
        Ok(Some(Self { handle: handle.clone(), cache: on_device, misses, default, miss, no_key }))
    }

    /// Whether a lookup may have to wait for rows. If not, its misses are read after the call has returned.
    fn may_wait(&self) -> bool {
        match self.miss {
            Miss::ByHitRate => self.handle.hit_rate_threshold > 0.0,
            Miss::Default => false,
            Miss::Wait | Miss::Within(_) => true,
        }
    }

    /// Waits for a lookup. Fetches the missing rows if the policy says so, and computes the vectors again.
    ///
    /// # Safety
    /// As for [`DeviceRows::bag`], for a call that is on the stream.
    unsafe fn finish(&self, call: &BagCall, scratch: &mut MissList, stream: CUstream) -> Result<()> {
        let (gpu, table) = (self.cache.held.gpu(), &self.handle.table);
        let failed = |error| self.cache.failed(&error);
        // SAFETY: the caller's.
        unsafe { gpu.wait(stream) }.map_err(failed)?;
        if scratch.missing() == 0 {
            table.metrics.count(LookupStats { keys: call.count, hits: call.count, defaults: 0 });
            return Ok(());
        }
        let mut keys = vec![0_i64; call.count];
        // SAFETY: the caller's.
        unsafe { gpu.read(call.keys, &mut keys, stream) }.map_err(failed)?;
        let mut wanted = UniqueKeys::of(scratch.missing_keys().into_iter()).keys;
        let hits = self.unique_hits(&keys, &scratch.missing_places());
        let count = hits + wanted.len();
        let waits = match self.miss {
            Miss::ByHitRate => self.handle.below_threshold(hits, count),
            miss => miss != Miss::Default,
        };
        if !waits {
            table.metrics.count(LookupStats { keys: count, hits, defaults: wanted.len() });
            wanted.retain(|&key| !table.negative_cache.contains(key));
            self.handle.background.enqueue(table, wanted);
            return Ok(());
        }
        let mut rows = FetchedRows::default();
        // Rows that are cached may evict hits of this lookup. So it repeats until every row that exists was found.
        while self.fetch(&wanted, &mut rows) {
            let places: Vec<i32> = keys.iter().map(|key| rows.places.get(key).copied().unwrap_or(-1)).collect();
            // SAFETY: the caller's; the previous lookup is done.
            unsafe {
                scratch.give(gpu, &places, &rows.numbers, table.layout.dim(), stream).map_err(failed)?;
                self.cache.held.bag(call, scratch, stream).map_err(failed)?;
                gpu.wait(stream).map_err(failed)?;
            }
            wanted = UniqueKeys::of(scratch.missing_keys().into_iter()).keys;
            wanted.retain(|key| !rows.without_row.contains(key));
        }
        scratch.give_nothing();
        table.metrics.count(LookupStats { keys: count, hits, defaults: rows.without_row.len() });
        Ok(())
    }

    /// Fetches rows from the tiers. Returns whether any were found.
    fn fetch(&self, wanted: &[i64], rows: &mut FetchedRows) -> bool {
        let table = &self.handle.table;
        let (absent, sought): (Vec<i64>, Vec<i64>) =
            wanted.iter().partition(|&&key| table.negative_cache.contains(key));
        rows.without_row.extend(absent);
        if sought.is_empty() {
            return false;
        }
        let before = rows.places.len();
        let store = |found: &_| self.handle.background.store_shared(table, &sought, found);
        let found = table.fetch_rows(&sought, None, &mut |_| (), store);
        for (index, &key) in sought.iter().enumerate() {
            let Some(row) = found.row(index) else {
                rows.without_row.insert(key);
                continue;
            };
            let start = rows.numbers.len();
            rows.numbers.resize(start + table.layout.dim(), 0.0);
            table.layout.decode(row, &mut rows.numbers[start..]);
            rows.places.insert(key, rows.places.len() as i32);
        }
        rows.places.len() > before
    }

    /// The number of unique keys that the cache held.
    fn unique_hits(&self, keys: &[i64], missing: &[i32]) -> usize {
        let mut found = vec![true; keys.len()];
        for &place in missing {
            found[place as usize] = false;
        }
        let hits = keys.iter().zip(found).filter(|&(key, found)| found && Some(*key) != self.no_key);
        UniqueKeys::count(keys.len(), hits.map(|(&key, _)| key))
    }
}

impl DeviceRows for GpuTable {
    unsafe fn bag(&self, call: &DeviceBag, stream: CUstream) -> std::result::Result<(), String> {
        let DeviceCache { held, scratches, drain, .. } = &*self.cache;
        let DeviceBag { keys, count, slots, vectors, hit } = *call;
        let (default_row, no_key) = (self.default.address(), self.no_key);
        let call = BagCall { keys, count, slots, vectors, default_row, found: hit, no_key };
        let mut scratch = scratches.take(held.gpu(), count).map_err(|error| error.to_string())?;
        // SAFETY: the caller's; the scratch memory belongs to this lookup until it is done.
        unsafe { held.bag(&call, &mut scratch, stream) }.map_err(|error| error.to_string())?;
        if !self.may_wait() {
            let (sink, scratches) = (Arc::clone(&self.misses), Arc::clone(scratches));
            drain.send(PendingLookup { sink, keys: count, scratch, scratches });
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.finish(&call, &mut scratch, stream) }.map_err(|error| error.to_string())?;
        scratches.put_back(scratch);
        Ok(())
    }
}

/// Fetches the misses of GPU lookups in the background.
struct FetchMisses {
    /// Weak: the misses are dropped if the table is closed.
    table: Weak<Table>,
    background: Arc<BackgroundFetch>,
}

impl MissSink for FetchMisses {
    fn missed(&self, keys: usize, missing: Vec<i64>) {
        let Some(table) = self.table.upgrade() else { return };
        let hits = keys - missing.len().min(keys);
        let missing = UniqueKeys::of(missing.into_iter()).keys;
        // Duplicates among the hits are not removed: their keys are on the GPU.
        table.metrics.count(LookupStats { keys: hits + missing.len(), hits, defaults: missing.len() });
        let sought: Vec<i64> = missing.into_iter().filter(|&key| !table.negative_cache.contains(key)).collect();
        if !sought.is_empty() {
            self.background.enqueue(&table, sought);
        }
    }
}

/// The rows that were fetched for one lookup.
#[derive(Default)]
struct FetchedRows {
    /// For each key the index of its row in `numbers`.
    places: HashMap<i64, i32>,
    numbers: Vec<f32>,
    /// Keys that no tier holds, or whose tier did not answer.
    without_row: HashSet<i64>,
}

/// Refuses a GPU that the model may not use. An empty list allows all.
fn check_deployed(table: &str, devices: &[u32], ordinal: usize) -> Result<()> {
    if devices.is_empty() || devices.iter().any(|&device| device as usize == ordinal) {
        return Ok(());
    }
    let message = format!("the model runs on GPU {ordinal}, and table {table} is for {devices:?}: add {ordinal}");
    Err(Error::invalid(DEVICES, message))
}

/// Starts to copy the rows of the cache in host memory into a new cache on a GPU, in the background.
fn fill(handle: &EmbeddingTable, on_device: &Arc<DeviceCache>) {
    let (table, on_device) = (Arc::downgrade(&handle.table), Arc::downgrade(on_device));
    let mut at = 0;
    handle.background.run_steps(move || {
        let (Some(table), true) = (table.upgrade(), on_device.strong_count() > 0) else { return false };
        let Some(cache) = &table.cache else { return false };
        let mut keys = Vec::new();
        cache.keys(&mut at, STEP_KEYS, &mut keys);
        if !keys.is_empty() {
            table.promote(&keys, &[], true);
        }
        at > 0
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::embedding::config::PsJson;

    #[test]
    fn a_device_that_is_not_listed_is_refused() {
        assert!(check_deployed("m/t", &[], 3).is_ok() && check_deployed("m/t", &[0, 3], 3).is_ok());
        let error = check_deployed("m/t", &[0, 2], 3).unwrap_err();
        assert_eq!(error.argument(), Some("EmbeddingOptions.models.devices"));
        let error = PsJson::name_keys(error).to_string();
        assert!(
            error.contains("GPU 3") && error.contains("[0, 2]") && error.contains("deployed_device_list"),
            "{error}"
        );
    }
}
