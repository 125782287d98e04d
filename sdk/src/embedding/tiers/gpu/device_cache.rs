//! The cache of a table on a GPU, for the nodes of a graph that runs there.
//!
//! A table has at most one cache on each GPU. All sessions on that GPU share it, and it is freed when the last of them
//! is closed. It receives the same rows as the cache in host memory, on a stream of its own. Lookups read it on the
//! stream of their graph and take no lock.

use std::sync::{Arc, Weak};

use pagoda_kernels::cuda::Type;

use super::miss_drain::MissDrain;
use super::scratch_pool::ScratchPool;
use crate::device::{CudaError, Gpu, HostRows, RowCache};
use crate::embedding::options::CACHE_SIZE;
use crate::embedding::row::{Layout, RowType};
use crate::embedding::tiers::tier::Rows;
use crate::error::{Error, Result, Status};
use crate::sync::RwLock;

/// The cache of one table on one GPU.
pub(in crate::embedding) struct DeviceCache {
    pub(in crate::embedding) held: RowCache,
    layout: Layout,
    pub(in crate::embedding) scratches: Arc<ScratchPool>,
    pub(in crate::embedding) drain: MissDrain,
}

impl DeviceCache {
    /// Allocates GPU memory for `rows` rows.
    fn open(gpu: &'static Gpu, table: &str, layout: Layout, rows: usize) -> Result<Self> {
        let (dim, element) = (layout.dim(), element(layout));
        let held = RowCache::new(gpu, rows, dim, element).map_err(|error| {
            let bytes = RowCache::bytes_for(rows, dim, element);
            let message = format!("table {table}: {rows} rows of {dim} numbers take {bytes} bytes");
            let message = format!("{message} on GPU {}: {error}", gpu.ordinal());
            Error::new(Status::Capacity, format!("{message}: make the cache smaller")).about(CACHE_SIZE)
        })?;
        Ok(Self { held, layout, scratches: Arc::default(), drain: MissDrain::start()? })
    }

    /// The ordinal of its GPU.
    pub(in crate::embedding) fn ordinal(&self) -> usize {
        self.held.gpu().ordinal()
    }

    /// The number of rows.
    pub(in crate::embedding) fn len(&self) -> usize {
        self.held.len()
    }

    /// As `Cache::insert`.
    pub(in crate::embedding) fn insert(&self, rows: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()> {
        self.put(rows, false, &|index| !rows.deleted[index] && current(index))
    }

    /// As `Cache::update`.
    pub(in crate::embedding) fn update(&self, change: &Rows<'_>) -> Result<()> {
        self.put(change, true, &|_| true)
    }

    fn put(&self, rows: &Rows<'_>, only_present: bool, wanted: &dyn Fn(usize) -> bool) -> Result<()> {
        let decoded = decoded(self.layout, rows.rows);
        let Rows { keys, versions, deleted, .. } = *rows;
        let versions: Vec<u64> = versions.iter().map(|version| version.0).collect();
        let rows = HostRows { keys, versions: &versions, rows: decoded.as_deref().unwrap_or(rows.rows), deleted };
        self.held.put(&rows, only_present, wanted).map_err(|error| self.failed(&error))
    }

    /// As `Cache::keys`.
    pub(in crate::embedding) fn keys(&self, from: &mut usize, most: usize, into: &mut Vec<i64>) -> Result<()> {
        self.held.keys(from, most, into).map_err(|error| self.failed(&error))
    }

    /// Waits until the misses of all lookups are queued to be fetched.
    pub(in crate::embedding) fn wait(&self) {
        self.drain.wait();
    }

    pub(in crate::embedding) fn failed(&self, error: &CudaError) -> Error {
        Error::new(Status::Runtime, format!("the cache on GPU {}: {error}", self.ordinal()))
    }
}

/// The type of the elements on a GPU. Kernels have no rows with a scale.
pub(in crate::embedding) fn element(layout: Layout) -> Type {
    match layout.row_type() {
        RowType::F16 => Type::F16,
        RowType::F32 | RowType::I8 => Type::F32,
    }
}

/// Rows in the type of the GPU; `None` if it is that of the table.
fn decoded(layout: Layout, rows: &[u8]) -> Option<Vec<u8>> {
    if layout.row_type() != RowType::I8 {
        return None;
    }
    let mut numbers = vec![0.0; layout.dim()];
    let mut decoded = Vec::with_capacity(rows.len() / layout.row_bytes() * layout.dim() * size_of::<f32>());
    for row in rows.chunks_exact(layout.row_bytes()) {
        layout.decode(row, &mut numbers);
        decoded.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    }
    Some(decoded)
}

/// The caches of one table on all GPUs.
#[derive(Default)]
pub(in crate::embedding) struct DeviceCaches(RwLock<Vec<(usize, Weak<DeviceCache>)>>);

impl DeviceCaches {
    /// The caches that are in use.
    pub(in crate::embedding) fn live(&self) -> Vec<Arc<DeviceCache>> {
        let known = self.0.read();
        known.iter().filter_map(|(_, cache)| cache.upgrade()).collect()
    }

    /// The cache with an index, which is stable, if it is in use; and the number of indices.
    pub(in crate::embedding) fn at(&self, place: usize) -> (Option<Arc<DeviceCache>>, usize) {
        let known = self.0.read();
        (known.get(place).and_then(|(_, cache)| cache.upgrade()), known.len())
    }

    /// The cache on a GPU. Opens one if there is none; the flag tells whether it did.
    pub(in crate::embedding) fn on(
        &self,
        gpu: &'static Gpu,
        table: &str,
        layout: Layout,
        rows: usize,
    ) -> Result<(Arc<DeviceCache>, bool)> {
        let mut known = self.0.write();
        let place = known.iter().position(|(ordinal, _)| *ordinal == gpu.ordinal());
        if let Some(cache) = place.and_then(|place| known[place].1.upgrade()) {
            return Ok((cache, false));
        }
        let cache = Arc::new(DeviceCache::open(gpu, table, layout, rows)?);
        let entry = (gpu.ordinal(), Arc::downgrade(&cache));
        match place {
            Some(place) => known[place] = entry,
            None => known.push(entry),
        }
        Ok((cache, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_with_a_scale_are_numbers_on_a_device() {
        let layout = Layout::new(3, RowType::I8).unwrap();
        let numbers = [127.0, -1.0, 0.0, 254.0, 2.0, -254.0];
        let mut rows = vec![0; 2 * layout.row_bytes()];
        layout.encode(&numbers, &mut rows);
        let expected: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        assert_eq!(decoded(layout, &rows), Some(expected));
        assert_eq!(element(layout), Type::F32);
        for (row_type, expected) in [(RowType::F32, Type::F32), (RowType::F16, Type::F16)] {
            let layout = Layout::new(3, row_type).unwrap();
            assert_eq!((decoded(layout, &[0; 12]), element(layout)), (None, expected));
        }
    }

    #[test]
    fn a_table_begins_without_caches_on_devices() {
        let devices = DeviceCaches::default();
        assert!(devices.live().is_empty());
        assert!(matches!(devices.at(0), (None, 0)));
    }
}
