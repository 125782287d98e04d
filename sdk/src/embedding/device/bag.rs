//! A lookup on a device: what the cache there has at once, and what becomes of the rest.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pagoda_custom_ops::tables::{DeviceBag, DeviceRows};

use super::super::distinct::Distinct;
use super::super::lookup::{Looked, Miss};
use super::super::view::EmbeddingTable;
use super::drain::Asked;
use super::{DeviceCache, element};
use crate::device::{BagCall, BagScratch, CUstream, DeviceMemory, Gpu, HeldTable};
use crate::error::{Error, Result, Status};

/// How many rows of the cache in host memory a new one on a device takes at a time.
const STEP: usize = 4096;

/// A table on a device as one model sees it.
pub(in super::super) struct DeviceView {
    view: EmbeddingTable,
    cache: Arc<DeviceCache>,
    /// What a key that is not there gets.
    default: DeviceMemory,
    miss: Miss,
    no_key: Option<i64>,
}

impl DeviceView {
    /// The view's table on a device; `None` if nothing of it is cached. Keys that are `no_key` are none.
    pub(in super::super) fn open(
        view: &EmbeddingTable,
        gpu: &'static Gpu,
        miss: Miss,
        no_key: Option<i64>,
    ) -> Result<Option<Self>> {
        let (table, ordinal) = (&view.table, gpu.ordinal());
        let Some(cache) = table.cache.as_ref().filter(|_| view.cached) else { return Ok(None) };
        if !HeldTable::takes(table.layout.dim(), element(table.layout)) {
            return Ok(None);
        }
        check_deployed(&view.devices, ordinal)?;
        let (on_device, new) = table.devices.on(gpu, table.layout, cache.capacity())?;
        let failed = |error| Error::new(Status::Runtime, format!("GPU {ordinal}: {error}"));
        let default = DeviceMemory::zeroed(gpu, size_of_val(&*view.default)).map_err(failed)?;
        let stream = gpu.context().default_stream();
        // SAFETY: the memory is as long as the vector, and no one else has it yet.
        unsafe { gpu.write(default.address(), &view.default, stream.cu_stream()) }.map_err(failed)?;
        if new {
            fill(view, &on_device);
        }
        Ok(Some(Self { view: view.clone(), cache: on_device, default, miss, no_key }))
    }

    /// Whether a lookup may have to wait for rows; otherwise nothing of it comes back before the next.
    fn may_wait(&self) -> bool {
        match self.miss {
            Miss::ByHitRate => self.view.hit_rate_threshold > 0.0,
            Miss::Default => false,
            Miss::Wait | Miss::Within(_) => true,
        }
    }

    /// Waits for a lookup, and fetches what is missing if the hit rate says so; the vectors are then made anew.
    ///
    /// # Safety
    /// As for [`DeviceRows::bag`], of a call that is on the stream.
    unsafe fn settle(&self, call: &BagCall, scratch: &mut BagScratch, stream: CUstream) -> Result<()> {
        let (gpu, table) = (self.cache.held.gpu(), &self.view.table);
        let failed = |error| self.cache.failed(&error);
        // SAFETY: the caller's.
        unsafe { gpu.wait(stream) }.map_err(failed)?;
        if scratch.missing() == 0 {
            table.counters.count(Looked { keys: call.count, hits: call.count, defaults: 0 });
            return Ok(());
        }
        let mut keys = vec![0_i64; call.count];
        // SAFETY: the caller's.
        unsafe { gpu.read(call.keys, &mut keys, stream) }.map_err(failed)?;
        let mut wanted = Distinct::of(scratch.missing_keys().into_iter()).keys;
        let hits = self.distinct_hits(&keys, &scratch.missing_places());
        let count = hits + wanted.len();
        let waits = match self.miss {
            Miss::ByHitRate => self.view.below_threshold(hits, count),
            miss => miss != Miss::Default,
        };
        if !waits {
            table.counters.count(Looked { keys: count, hits, defaults: wanted.len() });
            wanted.retain(|&key| !table.absent.contains(key));
            self.view.later.insert(table, wanted);
            return Ok(());
        }
        let mut rows = Given::default();
        // Bringing rows may evict others that were found: until nothing is missing that could be there.
        while self.fetch(&wanted, &mut rows) {
            let places: Vec<i32> = keys.iter().map(|key| rows.places.get(key).copied().unwrap_or(-1)).collect();
            // SAFETY: the caller's; the lookup before is done.
            unsafe {
                scratch.give(gpu, &places, &rows.numbers, table.layout.dim(), stream).map_err(failed)?;
                self.cache.held.bag(call, scratch, stream).map_err(failed)?;
                gpu.wait(stream).map_err(failed)?;
            }
            wanted = Distinct::of(scratch.missing_keys().into_iter()).keys;
            wanted.retain(|key| !rows.nowhere.contains(key));
        }
        scratch.give_nothing();
        table.counters.count(Looked { keys: count, hits, defaults: rows.nowhere.len() });
        Ok(())
    }

    /// Fetches rows from below. Says whether there are more now.
    fn fetch(&self, wanted: &[i64], rows: &mut Given) -> bool {
        let table = &self.view.table;
        let (absent, sought): (Vec<i64>, Vec<i64>) = wanted.iter().partition(|&&key| table.absent.contains(key));
        rows.nowhere.extend(absent);
        if sought.is_empty() {
            return false;
        }
        let before = rows.places.len();
        let walked = table.walk(&sought, None, Some(&self.view.later), &mut |_| ());
        for (place, &key) in sought.iter().enumerate() {
            let Some(row) = walked.row(place) else {
                rows.nowhere.insert(key);
                continue;
            };
            let start = rows.numbers.len();
            rows.numbers.resize(start + table.layout.dim(), 0.0);
            table.layout.decode(row, &mut rows.numbers[start..]);
            rows.places.insert(key, rows.places.len() as i32);
        }
        rows.places.len() > before
    }

    /// How many different keys the cache had.
    fn distinct_hits(&self, keys: &[i64], missing: &[i32]) -> usize {
        let mut found = vec![true; keys.len()];
        for &place in missing {
            found[place as usize] = false;
        }
        let hits = keys.iter().zip(found).filter(|&(key, found)| found && Some(*key) != self.no_key);
        Distinct::count(keys.len(), hits.map(|(&key, _)| key))
    }
}

impl DeviceRows for DeviceView {
    unsafe fn bag(&self, call: &DeviceBag, stream: CUstream) -> std::result::Result<(), String> {
        let DeviceCache { held, scratches, drain, .. } = &*self.cache;
        let DeviceBag { keys, count, slots, vectors, hit } = *call;
        let (default_row, no_key) = (self.default.address(), self.no_key);
        let call = BagCall { keys, count, slots, vectors, default_row, found: hit, no_key };
        let mut scratch = scratches.take(held.gpu(), count).map_err(|error| error.to_string())?;
        // SAFETY: the caller's; the scratch memory is this lookup's until it is done.
        unsafe { held.bag(&call, &mut scratch, stream) }.map_err(|error| error.to_string())?;
        if !self.may_wait() {
            let EmbeddingTable { table, later, .. } = &self.view;
            let (table, later, scratches) = (Arc::downgrade(table), Arc::clone(later), Arc::clone(scratches));
            drain.send(Asked { table, later, keys: count, scratch, scratches });
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.settle(&call, &mut scratch, stream) }.map_err(|error| error.to_string())?;
        scratches.put_back(scratch);
        Ok(())
    }
}

/// Rows that were fetched for one lookup.
#[derive(Default)]
struct Given {
    /// Where in `numbers` the row of a key is, counted in rows.
    places: HashMap<i64, i32>,
    numbers: Vec<f32>,
    /// Keys that no floor has, or that none could be asked for.
    nowhere: HashSet<i64>,
}

/// Refuses a device that the model is not to use; an empty list names all.
fn check_deployed(devices: &[u32], ordinal: usize) -> Result<()> {
    if devices.is_empty() || devices.iter().any(|&device| device as usize == ordinal) {
        return Ok(());
    }
    let message = format!("the model runs on GPU {ordinal}, and its tables are for {devices:?}: add {ordinal}");
    Err(Error::invalid("deployed_device_list", message))
}

/// Begins to bring what the cache in host memory holds into a new one on a device.
fn fill(view: &EmbeddingTable, on_device: &Arc<DeviceCache>) {
    let (table, on_device) = (Arc::downgrade(&view.table), Arc::downgrade(on_device));
    let mut at = 0;
    view.later.steps(move || {
        let (Some(table), true) = (table.upgrade(), on_device.strong_count() > 0) else { return false };
        let Some(cache) = &table.cache else { return false };
        let mut keys = Vec::new();
        cache.keys(&mut at, STEP, &mut keys);
        if !keys.is_empty() {
            table.raise(&keys, &[], true);
        }
        at > 0
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_listed_is_refused() {
        assert!(check_deployed(&[], 3).is_ok() && check_deployed(&[0, 3], 3).is_ok());
        let error = check_deployed(&[0, 2], 3).unwrap_err().to_string();
        assert!(
            error.contains("GPU 3") && error.contains("[0, 2]") && error.contains("deployed_device_list"),
            "{error}"
        );
    }
}
