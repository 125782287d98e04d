//! Rows of a table on a GPU, above everything in host memory: for the nodes of a graph that runs there.
//!
//! A table has at most one cache on each device, which all sessions there share, as long as one of them is open. Rows come
//! into it with those of the cache in host memory, on a stream of the table's own; lookups read it on the stream of their
//! graph, and take no lock.

mod bag;
mod drain;

use std::sync::{Arc, Weak};

use pagoda_kernels::cuda::Type;

use self::drain::Drain;
use super::floor::Rows;
use super::row::{Layout, RowType};
use crate::device::{BagScratch, CudaError, Gpu, HeldTable, HostRows};
use crate::error::{Error, Result, Status};
use crate::sync::{Mutex, RwLock};

pub(super) use bag::DeviceView;

/// The cache of one table on one device.
pub(super) struct DeviceCache {
    held: HeldTable,
    layout: Layout,
    scratches: Arc<Scratches>,
    drain: Drain,
}

impl DeviceCache {
    /// Takes memory for `rows` rows.
    fn open(gpu: &'static Gpu, layout: Layout, rows: usize) -> Result<Self> {
        let (dim, element) = (layout.dim(), element(layout));
        let held = HeldTable::new(gpu, rows, dim, element).map_err(|error| {
            let bytes = HeldTable::bytes_for(rows, dim, element);
            let message = format!("{rows} rows of {dim} numbers take {bytes} bytes on GPU {}: {error}", gpu.ordinal());
            let hint = "make the cache smaller (gpucacheper, cache_rows or cache_bytes)";
            Error::new(Status::Capacity, format!("{message}; {hint}"))
        })?;
        Ok(Self { held, layout, scratches: Arc::default(), drain: Drain::start()? })
    }

    /// Which device it is on.
    pub(super) fn ordinal(&self) -> usize {
        self.held.gpu().ordinal()
    }

    /// How many rows there are.
    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    /// As `Cache::insert`.
    pub(super) fn insert(&self, rows: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()> {
        self.put(rows, false, &|index| !rows.deleted[index] && current(index))
    }

    /// As `Cache::update`.
    pub(super) fn update(&self, change: &Rows<'_>) -> Result<()> {
        self.put(change, true, &|_| true)
    }

    fn put(&self, rows: &Rows<'_>, only_present: bool, wanted: &dyn Fn(usize) -> bool) -> Result<()> {
        let decoded = decoded(self.layout, rows.rows);
        let Rows { keys, versions, deleted, .. } = *rows;
        let rows = HostRows { keys, versions, rows: decoded.as_deref().unwrap_or(rows.rows), deleted };
        self.held.put(&rows, only_present, wanted).map_err(|error| self.failed(&error))
    }

    /// As `Cache::keys`.
    pub(super) fn keys(&self, from: &mut usize, most: usize, into: &mut Vec<i64>) -> Result<()> {
        self.held.keys(from, most, into).map_err(|error| self.failed(&error))
    }

    /// Waits until what lookups found missing is queued to be fetched.
    pub(super) fn wait(&self) {
        self.drain.wait();
    }

    fn failed(&self, error: &CudaError) -> Error {
        Error::new(Status::Runtime, format!("the cache on GPU {}: {error}", self.ordinal()))
    }
}

/// How rows are kept on a device: kernels know no scales.
fn element(layout: Layout) -> Type {
    match layout.row_type() {
        RowType::F16 => Type::F16,
        RowType::F32 | RowType::I8 => Type::F32,
    }
}

/// Rows as they are kept on a device, where that differs from what a table has.
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

/// Memory of past lookups, for those that come.
#[derive(Default)]
struct Scratches(Mutex<Vec<BagScratch>>);

impl Scratches {
    /// One with room for so many keys.
    fn take(&self, gpu: &'static Gpu, keys: usize) -> std::result::Result<BagScratch, CudaError> {
        let mut kept = self.0.lock();
        if let Some(place) = kept.iter().position(|scratch| scratch.room() >= keys) {
            return Ok(kept.swap_remove(place));
        }
        // One that is too small is of no use to anyone who asks as this one does.
        let small = kept.pop();
        drop(kept);
        drop(small);
        BagScratch::new(gpu, keys.next_power_of_two().max(1024))
    }

    /// Takes it back when nothing is under way that uses it.
    fn put_back(&self, scratch: BagScratch) {
        self.0.lock().push(scratch);
    }
}

/// The caches of one table.
#[derive(Default)]
pub(super) struct Devices(RwLock<Vec<(usize, Weak<DeviceCache>)>>);

impl Devices {
    /// Those that someone uses.
    pub(super) fn live(&self) -> Vec<Arc<DeviceCache>> {
        let known = self.0.read();
        known.iter().filter_map(|(_, cache)| cache.upgrade()).collect()
    }

    /// One by its place, which stays the same, if someone uses it; and how many places there are.
    pub(super) fn at(&self, place: usize) -> (Option<Arc<DeviceCache>>, usize) {
        let known = self.0.read();
        (known.get(place).and_then(|(_, cache)| cache.upgrade()), known.len())
    }

    /// The one on a device, opened if there is none; and whether it was.
    fn on(&self, gpu: &'static Gpu, layout: Layout, rows: usize) -> Result<(Arc<DeviceCache>, bool)> {
        let mut known = self.0.write();
        let place = known.iter().position(|(ordinal, _)| *ordinal == gpu.ordinal());
        if let Some(cache) = place.and_then(|place| known[place].1.upgrade()) {
            return Ok((cache, false));
        }
        let cache = Arc::new(DeviceCache::open(gpu, layout, rows)?);
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
        let devices = Devices::default();
        assert!(devices.live().is_empty());
        assert!(matches!(devices.at(0), (None, 0)));
    }
}
