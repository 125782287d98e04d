//! Rows of an embedding table in device memory, by their keys.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw::{Lookup, Put, Table};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::{MOST, copy_width};

/// Rows of a set; `WAYS` of cuda/embedding/embedding_table.cuh.
const WAYS: usize = 7;
const SET_BYTES: usize = 64;
/// `PRESENT_SHIFT` of cuda/embedding/embedding_table.cuh.
const PRESENT_SHIFT: u32 = 2;
pub(super) const THREADS: u32 = 256;
/// Keys that a block looks up; `TILE` of cuda/embedding/embedding_table.cu.
const TILE: usize = 128;
/// Blocks for each multiprocessor: more than fit at once. Each loops until all rows are put.
const PUT_BLOCKS: u32 = 8;

/// A table, by the addresses of its memory. All of it is zeros at first: a table without rows.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTable {
    /// [`sets_bytes`](Self::sets_bytes) of them.
    pub sets: CUdeviceptr,
    /// [`places`](Self::places) rows.
    pub rows: CUdeviceptr,
    /// [`places`](Self::places) numbers of 64 bits.
    pub versions: CUdeviceptr,
    /// How many sets there are, 1 or more; [`sets_for`](Self::sets_for).
    pub set_count: usize,
    /// Numbers of a row.
    pub dim: usize,
    /// What they are: f32 or f16.
    pub element: Type,
}

impl DeviceTable {
    /// How many sets have room for so many rows.
    pub fn sets_for(rows: usize) -> usize {
        rows.div_ceil(WAYS)
    }

    /// Bytes of a set: a word with its state, and a key for each of its rows.
    pub const SET_BYTES: usize = SET_BYTES;
    /// Rows of a set.
    pub const WAYS: usize = WAYS;

    /// The keys that a set holds, from the words of the set.
    pub fn keys_of_set(set: &[u64; SET_BYTES / size_of::<u64>()]) -> impl Iterator<Item = i64> {
        let [head, keys @ ..] = set;
        let present = move |way: &usize| head >> (PRESENT_SHIFT + *way as u32) & 1 == 1;
        (0..WAYS).filter(present).map(move |way| keys[way].cast_signed())
    }

    /// How long `sets` is.
    pub fn sets_bytes(&self) -> usize {
        self.set_count * SET_BYTES
    }

    /// How many rows there is room for.
    pub fn places(&self) -> usize {
        self.set_count * WAYS
    }

    /// Refuses a table that no kernel takes.
    pub fn check(&self) -> Result<(), CudaError> {
        // Kernels have the number of a set in 32 bits.
        if !(1..=u32::MAX as usize).contains(&self.set_count) || !(1..=MOST).contains(&self.dim) {
            let shape = format!("{} sets of rows of {}", self.set_count, self.dim);
            let message = format!("{shape}: expected 1 to {} sets, and rows of 1 to {MOST}", u32::MAX);
            return Err(CudaError::Unsupported(message));
        }
        if self.element == Type::Bf16 {
            return Err(CudaError::Unsupported("a table of bf16, expected f32 or f16".into()));
        }
        Ok(())
    }

    pub(super) fn raw(&self) -> Table {
        Table {
            sets: self.sets,
            rows: self.rows,
            versions: self.versions,
            set_count: self.set_count as u64,
            dim: self.dim as i32,
        }
    }
}

/// A lookup of keys, any number of times each.
#[derive(Clone, Copy, Debug)]
pub struct TableLookup {
    /// Where.
    pub table: DeviceTable,
    /// `[count]` of i64.
    pub keys: CUdeviceptr,
    /// How many keys.
    pub count: usize,
    /// `[count, dim]` of f32: their rows.
    pub output: CUdeviceptr,
    /// `[dim]` of f32: what missing keys get; without it their output is left as it was.
    pub default_row: Option<CUdeviceptr>,
    /// `[count]` of u8: which were found.
    pub found: Option<CUdeviceptr>,
    /// `[count]` of i32: the places of missing keys, in no order.
    pub missing: CUdeviceptr,
    /// `[count]` of i64: the keys there, in the same order.
    pub missing_keys: Option<CUdeviceptr>,
    /// An i32: how many there are.
    pub missing_count: CUdeviceptr,
    /// A number of 64 bits of this lookup's own: 0 before it, and after it again.
    pub progress: CUdeviceptr,
}

/// Rows to be put into a table, or removed from it. Not put are those of which a higher version is there.
#[derive(Clone, Copy, Debug)]
pub struct TablePut {
    /// Where.
    pub table: DeviceTable,
    /// `[key_count]` of i64.
    pub keys: CUdeviceptr,
    /// How many keys.
    pub key_count: usize,
    /// `[count]` of i32: which key each row is of, such as the missing ones of a lookup; without it they are in order.
    pub places: Option<CUdeviceptr>,
    /// An i32: how many rows there are, if fewer than `count`.
    pub place_count: Option<CUdeviceptr>,
    /// `[count, dim]` of the table's type.
    pub rows: CUdeviceptr,
    /// `[count]` of u64; without them all are 0.
    pub versions: Option<CUdeviceptr>,
    /// `[count]` of u8: those that are to be removed instead.
    pub deleted: Option<CUdeviceptr>,
    /// An i64: how many rows the table has; added to.
    pub row_count: CUdeviceptr,
    /// How many rows, at most.
    pub count: usize,
    /// Keys that the table does not have are passed over.
    pub only_present: bool,
}

pub(super) fn counted(count: usize) -> Result<i32, CudaError> {
    let message = || CudaError::Unsupported(format!("{count} keys in one call, expected up to {MOST}"));
    i32::try_from(count).ok().filter(|_| count <= MOST).ok_or_else(message)
}

impl Gpu {
    /// Enqueues a lookup in an embedding table on a stream. It may run while rows are put into the table on other
    /// streams: what it finds is whole, as it was before or after.
    ///
    /// # Safety
    /// Every address of the call is one of this device, of memory as long as the call says and alive until the stream has
    /// done this; nothing but lookups and puts uses the table's meanwhile, and nothing else the rest of what is written.
    pub unsafe fn table_lookup(&self, call: &TableLookup, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { self::lookup(self, call, stream) }
    }

    /// Enqueues the insertion of rows into an embedding table on a stream. A full set evicts its least recently used
    /// row. It may run at the same time as lookups and other puts.
    ///
    /// # Safety
    /// As for [`table_lookup`](Self::table_lookup).
    pub unsafe fn table_put(&self, call: &TablePut, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { self::put(self, call, stream) }
    }
}

/// # Safety
/// As for [`Gpu::table_lookup`].
unsafe fn lookup(gpu: &Gpu, call: &TableLookup, stream: CUstream) -> Result<(), CudaError> {
    call.table.check()?;
    let mut raw = Lookup {
        keys: call.keys,
        output: call.output,
        default_row: call.default_row.unwrap_or(0),
        found: call.found.unwrap_or(0),
        missing: call.missing,
        missing_keys: call.missing_keys.unwrap_or(0),
        missing_count: call.missing_count,
        progress: call.progress,
        count: counted(call.count)?,
    };
    let DeviceTable { dim, element, rows, .. } = call.table;
    // Four elements at a time, where those of every row begin at a multiple of their size.
    let fours = dim.is_multiple_of(4) && rows.is_multiple_of(16) && call.output.is_multiple_of(16);
    let kernel = match dim {
        _ if !fours => "odd",
        ..=32 => "32",
        33..=64 => "64",
        65..=128 => "128",
        _ => "long",
    };
    let function = gpu.modules.embedding_table.function(&format!("lookup_{}_{kernel}", element.name()), 0)?;
    let mut table = call.table.raw();
    let mut arguments = [from_mut(&mut table).cast::<c_void>(), from_mut(&mut raw).cast()];
    // One block even for no keys: it writes that none are missing.
    let blocks = call.count.div_ceil(TILE).max(1) as u32;
    // SAFETY: the kernel takes a `Table` and a `Lookup`.
    unsafe { function.launch(blocks, THREADS, 0, stream, &mut arguments) }
}

/// # Safety
/// As for [`Gpu::table_put`].
unsafe fn put(gpu: &Gpu, call: &TablePut, stream: CUstream) -> Result<(), CudaError> {
    call.table.check()?;
    if call.count == 0 {
        return Ok(());
    }
    let mut raw = Put {
        keys: call.keys,
        places: call.places.unwrap_or(0),
        place_count: call.place_count.unwrap_or(0),
        rows: call.rows,
        versions: call.versions.unwrap_or(0),
        deleted: call.deleted.unwrap_or(0),
        row_count: call.row_count,
        key_count: counted(call.key_count)?,
        count: counted(call.count)?,
        only_present: call.only_present.into(),
    };
    let mut element_bytes = call.table.element.bytes() as i32;
    let bytes = call.table.dim * call.table.element.bytes();
    let width = copy_width(bytes, call.rows | call.table.rows);
    let function = gpu.modules.embedding_table.function(&format!("put_{width}"), 0)?;
    let mut table = call.table.raw();
    let mut arguments =
        [from_mut(&mut table).cast::<c_void>(), from_mut(&mut raw).cast(), from_mut(&mut element_bytes).cast()];
    let blocks = (call.count as u32).div_ceil(THREADS / 32).min(gpu.multiprocessors * PUT_BLOCKS);
    // SAFETY: the kernel takes a `Table`, a `Put` and an `int`.
    unsafe { function.launch(blocks, THREADS, 0, stream, &mut arguments) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_that_no_kernel_takes_are_refused() {
        let good = DeviceTable { sets: 0, rows: 0, versions: 0, set_count: 1, dim: 1, element: Type::F16 };
        assert!(good.check().is_ok());
        let most = u32::MAX as usize;
        assert!(DeviceTable { set_count: most, dim: MOST, ..good }.check().is_ok());
        for (bad, words) in [
            (DeviceTable { set_count: 0, ..good }, "0 sets of rows of 1"),
            (DeviceTable { set_count: most + 1, ..good }, "4294967296 sets"),
            (DeviceTable { dim: 0, ..good }, "rows of 0"),
            (DeviceTable { dim: MOST + 1, ..good }, "rows of 1 to"),
            (DeviceTable { element: Type::Bf16, ..good }, "expected f32 or f16"),
        ] {
            let error = bad.check().unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
