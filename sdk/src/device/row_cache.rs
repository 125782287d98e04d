//! A cache of an embedding table's rows in GPU memory. Rows are put from the host on a stream of the cache's own;
//! lookups run on the streams of their callers.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaStream, result};

use pagoda_kernels::cuda::{
    CUdeviceptr, CUstream, CudaError, DeviceTable, Gpu, Slots, TableBag, TableLookup, TablePut, Type, asked, no_capture,
};

use super::memory::{DeviceMemory, PinnedMemory};
use super::miss_list::MissList;
use crate::sync::{Mutex, MutexGuard};

/// Bytes of the staging buffers, by which rows go to the device.
const STAGED_BYTES: usize = 8 << 20;

/// The rows of one table on a device. Any number of threads may use it: puts are serialised, lookups take no lock.
#[derive(Debug)]
pub struct RowCache {
    gpu: &'static Gpu,
    table: DeviceTable,
    /// Sets, rows, versions.
    memory: [DeviceMemory; 3],
    row_count: DeviceMemory,
    /// On which rows are put.
    stream: Arc<CudaStream>,
    staging: Mutex<Staging>,
    /// What `row_count` was after the last put.
    rows: AtomicU64,
}

/// Staging buffers: pinned memory that the device copies from, and memory on the device.
#[derive(Debug)]
struct Staging {
    host: PinnedMemory,
    device: DeviceMemory,
}

/// Rows in host memory, to be put or removed.
#[derive(Clone, Copy, Debug)]
pub struct HostRows<'a> {
    /// Different from one another.
    pub keys: &'a [i64],
    /// One for each key.
    pub versions: &'a [u64],
    /// One for each key, in the table's type; what is here of those that are removed does not matter.
    pub rows: &'a [u8],
    /// One for each key: those that are to be removed.
    pub deleted: &'a [bool],
}

/// A lookup on the device, by addresses, as of [`TableBag`].
#[derive(Clone, Copy, Debug)]
pub struct BagCall {
    /// `[count]` of i64.
    pub keys: CUdeviceptr,
    /// How many keys.
    pub count: usize,
    /// Which keys make a slot; without it there is a slot for each key.
    pub slots: Option<Slots>,
    /// `[slots, dim]` of f32.
    pub vectors: CUdeviceptr,
    /// `[dim]` of f32: what a missing key counts as.
    pub default_row: CUdeviceptr,
    /// `[count]` of u8: which keys were found.
    pub found: Option<CUdeviceptr>,
    /// A key that is none: it counts as zeros, and is neither found nor missing.
    pub no_key: Option<i64>,
}

impl RowCache {
    /// Whether lookups combine rows of so many numbers.
    pub fn takes(dim: usize, element: Type) -> bool {
        TableBag::takes(dim, element)
    }

    /// Takes memory for `rows` rows, or a few more: a table consists of whole sets.
    pub fn new(gpu: &'static Gpu, rows: usize, dim: usize, element: Type) -> Result<Self, CudaError> {
        let mut table = DeviceTable { sets: 0, rows: 0, versions: 0, set_count: sets(rows), dim, element };
        table.check()?;
        let row_bytes = dim * element.bytes();
        let places = table.places();
        let memory = [
            DeviceMemory::zeroed(gpu, table.sets_bytes())?,
            DeviceMemory::zeroed(gpu, places.saturating_mul(row_bytes))?,
            DeviceMemory::zeroed(gpu, places * size_of::<u64>())?,
        ];
        [table.sets, table.rows, table.versions] = [0, 1, 2].map(|part: usize| memory[part].address());
        let staged = STAGED_BYTES.max(staged_bytes(row_bytes));
        let staging = Staging { host: PinnedMemory::zeroed(gpu, staged)?, device: DeviceMemory::zeroed(gpu, staged)? };
        Ok(Self {
            row_count: DeviceMemory::zeroed(gpu, size_of::<u64>())?,
            stream: gpu.context().new_stream().map_err(asked("making a stream"))?,
            staging: Mutex::new(staging),
            rows: AtomicU64::new(0),
            gpu,
            table,
            memory,
        })
    }

    /// How much memory on the device a table for so many rows takes.
    pub fn bytes_for(rows: usize, dim: usize, element: Type) -> u64 {
        let row_bytes = (dim * element.bytes()) as u64;
        let place_bytes = (DeviceTable::SET_BYTES / DeviceTable::WAYS + 1 + size_of::<u64>()) as u64 + row_bytes;
        let staged = STAGED_BYTES.max(staged_bytes(row_bytes as usize)) as u64;
        ((sets(rows) * DeviceTable::WAYS) as u64).saturating_mul(place_bytes).saturating_add(staged)
    }

    /// How much memory on the device it takes.
    pub fn bytes(&self) -> u64 {
        let parts: usize = self.memory.iter().map(DeviceMemory::bytes).sum();
        (parts + self.lock().device.bytes()) as u64
    }

    /// The device.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// The most rows there can be.
    pub fn capacity(&self) -> usize {
        self.table.places()
    }

    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.rows.load(Ordering::Relaxed) as usize
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts the rows for which `wanted` returns true, called while no other thread can put any; unless a higher version
    /// is there, and with `only_present` unless none is. When this returns every lookup that begins sees them.
    ///
    /// # Panics
    /// If there is not one row, version and mark for each key.
    pub fn put(
        &self,
        rows: &HostRows<'_>,
        only_present: bool,
        wanted: &dyn Fn(usize) -> bool,
    ) -> Result<(), CudaError> {
        let row_bytes = self.table.dim * self.table.element.bytes();
        let (count, HostRows { versions, deleted, .. }) = (rows.keys.len(), rows);
        assert_eq!((rows.rows.len(), versions.len(), deleted.len()), (count * row_bytes, count, count));
        // Before the staging lock, whose holder takes it too: one order of the two locks everywhere.
        let _hold = no_capture();
        let staging = self.lock();
        let room = staging.host.bytes() / staged_bytes(row_bytes);
        let mut left = 0..count;
        while !left.is_empty() {
            let chosen: Vec<usize> = left.by_ref().filter(|&index| wanted(index)).take(room).collect();
            if !chosen.is_empty() {
                self.put_some(&staging, rows, &chosen, only_present)?;
            }
        }
        Ok(())
    }

    fn put_some(
        &self,
        staging: &Staging,
        rows: &HostRows<'_>,
        chosen: &[usize],
        only_present: bool,
    ) -> Result<(), CudaError> {
        let row_bytes = self.table.dim * self.table.element.bytes();
        let parts = Parts::of(chosen.len(), row_bytes);
        let start = staging.host.data();
        for (place, &index) in chosen.iter().enumerate() {
            let put = |part: &Range<usize>, bytes: &[u8]| {
                let at = part.start + place * bytes.len();
                assert!(at + bytes.len() <= staging.host.bytes(), "rows are staged as far as there is room");
                // SAFETY: by the line above; nothing else uses the memory, for it is locked and every put was waited
                // for.
                unsafe { start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            };
            put(&parts.keys, &rows.keys[index].to_ne_bytes());
            put(&parts.versions, &rows.versions[index].to_ne_bytes());
            put(&parts.rows, &rows.rows[index * row_bytes..][..row_bytes]);
            put(&parts.deleted, &[rows.deleted[index].into()]);
        }
        let at = |part: &Range<usize>| staging.device.address() + part.start as CUdeviceptr;
        let call = TablePut {
            table: self.table,
            keys: at(&parts.keys),
            key_count: chosen.len(),
            places: None,
            place_count: None,
            rows: at(&parts.rows),
            versions: Some(at(&parts.versions)),
            deleted: Some(at(&parts.deleted)),
            row_count: self.row_count.address(),
            count: chosen.len(),
            only_present,
        };
        self.gpu.bind()?;
        let stream = self.stream.cu_stream();
        // SAFETY: both memories have room for the parts, and the table's are as long as the table says. All of it is
        // waited for before the lock is given back.
        unsafe {
            let content = std::slice::from_raw_parts(start, parts.deleted.end);
            result::memcpy_htod_async(staging.device.address(), content, stream).map_err(asked("copying rows"))?;
            self.gpu.table_put(&call, stream)?;
        }
        let mut count = [0_u64];
        // SAFETY: it is one number.
        unsafe { self.gpu.read(self.row_count.address(), &mut count, stream) }?;
        self.rows.store(count[0], Ordering::Relaxed);
        Ok(())
    }

    /// Appends up to about `most` keys that are here to `into`, beginning at `from`, which is then where to go on. It
    /// is 0 at first, and again when all that is here was walked over.
    pub fn keys(&self, from: &mut usize, most: usize, into: &mut Vec<i64>) -> Result<(), CudaError> {
        let enough = into.len().saturating_add(most);
        let _hold = no_capture();
        // No other thread puts rows meanwhile: every set is read whole.
        let _alone = self.lock();
        while *from < self.table.set_count && into.len() < enough {
            let count = (enough - into.len()).div_ceil(DeviceTable::WAYS).min(self.table.set_count - *from);
            let mut sets = vec![[0_u64; DeviceTable::SET_BYTES / size_of::<u64>()]; count];
            let at = self.table.sets + (*from * DeviceTable::SET_BYTES) as CUdeviceptr;
            // SAFETY: so many sets there are from there on.
            unsafe { self.gpu.read(at, &mut sets, self.stream.cu_stream()) }?;
            into.extend(sets.iter().flat_map(DeviceTable::keys_of_set));
            *from += count;
        }
        if *from >= self.table.set_count {
            *from = 0;
        }
        Ok(())
    }

    /// Puts a lookup on a stream, in one launch; `scratch` says afterwards what is missing.
    ///
    /// # Safety
    /// As for [`Gpu::table_bag`]. The scratch memory is this lookup's alone, until it was waited for.
    ///
    /// # Panics
    /// If `scratch` has no room for so many keys.
    pub unsafe fn bag(&self, call: &BagCall, scratch: &mut MissList, stream: CUstream) -> Result<(), CudaError> {
        assert!(call.count <= scratch.room(), "{} keys, room for {}", call.count, scratch.room());
        let BagCall { keys, count, slots, vectors, default_row, found, no_key } = *call;
        let (missing, missing_keys) = (scratch.places_at(), Some(scratch.keys_at()));
        let (missing_count, progress, table) = (scratch.count_at(), scratch.progress_at(), self.table);
        let given = scratch.given();
        // SAFETY: the caller's; what the scratch memory has is as long as its room, and its rows as they were given.
        unsafe {
            if slots.is_none() && given.is_none() && no_key.is_none() {
                let default_row = Some(default_row);
                let output = vectors;
                let lookup = TableLookup {
                    table,
                    keys,
                    count,
                    output,
                    default_row,
                    found,
                    missing,
                    missing_keys,
                    missing_count,
                    progress,
                };
                self.gpu.table_lookup(&lookup, stream)?;
            } else {
                let bag = TableBag {
                    table,
                    keys,
                    count,
                    slots,
                    vectors,
                    default_row,
                    found,
                    missing,
                    missing_keys,
                    missing_count,
                    progress,
                    given,
                    no_key,
                };
                self.gpu.table_bag(&bag, stream)?;
            }
            scratch.asked(stream)
        }
    }

    fn lock(&self) -> MutexGuard<'_, Staging> {
        self.staging.lock()
    }
}

fn sets(rows: usize) -> usize {
    DeviceTable::sets_for(rows).max(1)
}

/// What one row takes on its way, with its key, version and mark.
fn staged_bytes(row_bytes: usize) -> usize {
    row_bytes + 2 * size_of::<u64>() + 1
}

/// Where the parts of some rows lie on their way: each begins at a multiple of its elements' size.
struct Parts {
    keys: Range<usize>,
    versions: Range<usize>,
    rows: Range<usize>,
    deleted: Range<usize>,
}

impl Parts {
    fn of(count: usize, row_bytes: usize) -> Self {
        let ends = [0, 8, 16, 16 + row_bytes, 17 + row_bytes].map(|bytes| bytes * count);
        let part = |number: usize| ends[number]..ends[number + 1];
        Self { keys: part(0), versions: part(1), rows: part(2), deleted: part(3) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_one_after_the_other() {
        let parts = Parts::of(3, 8);
        assert_eq!((parts.keys, parts.versions), (0..24, 24..48));
        assert_eq!((parts.rows, parts.deleted), (48..72, 72..75));
        assert_eq!(staged_bytes(8) * 3, 75);
    }

    #[test]
    fn what_a_table_takes_grows_with_its_rows() {
        let bytes = |rows, element| RowCache::bytes_for(rows, 128, element);
        assert!(bytes(0, Type::F32) >= STAGED_BYTES as u64);
        let million = bytes(1 << 20, Type::F32);
        assert!(million > (1 << 20) * 512 && million < (1 << 20) * 560, "{million}");
        assert!(bytes(1 << 20, Type::F16) < million - (200 << 20));
    }
}
