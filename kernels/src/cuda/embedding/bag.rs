//! Lookups in an embedding table that give one vector for each slot of keys.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw::Bag;
use super::table::{DeviceTable, THREADS, counted};
use crate::Combiner;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;

/// Slots of a block, where a warp has one.
const SLOTS: usize = THREADS as usize / 32;
/// The longest row that a block keeps aside until it is known to be whole: every chip since sm_80 has as much shared
/// memory.
const MOST_ROW_BYTES: usize = 96 << 10;

/// A lookup of keys, any number of times each, whose rows are combined as [`crate::Pool`] does it: the vectors are the
/// same to the bit.
#[derive(Clone, Copy, Debug)]
pub struct TableBag {
    /// Where.
    pub table: DeviceTable,
    /// `[count]` of i64.
    pub keys: CUdeviceptr,
    /// How many keys.
    pub count: usize,
    /// Which keys make a slot, and how they are combined; without it there is a slot for each key.
    pub slots: Option<Slots>,
    /// `[slots, dim]` of f32, written; a slot without keys becomes zeros.
    pub vectors: CUdeviceptr,
    /// `[dim]` of f32: what a missing key counts as.
    pub default_row: CUdeviceptr,
    /// `[count]` of u8: which keys were found.
    pub found: Option<CUdeviceptr>,
    /// `[count]` of i32: the places of missing keys, in no order.
    pub missing: CUdeviceptr,
    /// `[count]` of i64: the keys there, in the same order.
    pub missing_keys: Option<CUdeviceptr>,
    /// An i32: how many there are.
    pub missing_count: CUdeviceptr,
    /// 64 bits of this lookup's own: 0 before it, and after it again.
    pub progress: CUdeviceptr,
    /// Rows that are taken instead of the table's.
    pub given: Option<GivenRows>,
    /// A key that is none: it counts as zeros, and is neither found nor missing.
    pub no_key: Option<i64>,
}

impl TableBag {
    /// Whether there is a kernel for rows of so many numbers.
    pub fn takes(dim: usize, element: Type) -> bool {
        dim * element.bytes() <= MOST_ROW_BYTES
    }
}

/// The slots of a lookup.
#[derive(Clone, Copy, Debug)]
pub struct Slots {
    /// `[count + 1]` of i64: where the keys of each slot begin. No value in them makes a kernel read outside the keys.
    pub offsets: CUdeviceptr,
    /// How many slots there are.
    pub count: usize,
    /// How the rows of a slot become one vector.
    pub combiner: Combiner,
}

/// Rows of some of the keys of a lookup.
#[derive(Clone, Copy, Debug)]
pub struct GivenRows {
    /// An i32 for each key: which of the rows is its own; -1: the table says.
    pub places: CUdeviceptr,
    /// `[count, dim]` of f32.
    pub rows: CUdeviceptr,
    /// How many rows there are.
    pub count: usize,
}

impl Gpu {
    /// As [`table_lookup`](Self::table_lookup), and combines the rows into a vector for each slot of keys, in one
    /// launch.
    ///
    /// # Safety
    /// As for [`table_lookup`](Self::table_lookup).
    pub unsafe fn table_bag(&self, call: &TableBag, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { launch(self, call, stream) }
    }
}

/// # Safety
/// As for [`Gpu::table_bag`].
unsafe fn launch(gpu: &Gpu, call: &TableBag, stream: CUstream) -> Result<(), CudaError> {
    call.table.check()?;
    let slots = call.slots.map_or(call.count, |slots| slots.count);
    let (given, given_rows, given_count) =
        call.given.map_or((0, 0, 0), |given| (given.places, given.rows, given.count));
    let mut raw = Bag {
        keys: call.keys,
        offsets: call.slots.map_or(0, |slots| slots.offsets),
        vectors: call.vectors,
        default_row: call.default_row,
        found: call.found.unwrap_or(0),
        missing: call.missing,
        missing_keys: call.missing_keys.unwrap_or(0),
        missing_count: call.missing_count,
        progress: call.progress,
        given,
        given_rows,
        no_key: call.no_key.unwrap_or(0),
        has_no_key: call.no_key.is_some().into(),
        given_count: counted(given_count)?,
        count: counted(call.count)?,
        slots: counted(slots)?,
        // As cuda/embedding/embedding_bag.cu has them.
        combiner: match call.slots.map_or(Combiner::Sum, |slots| slots.combiner) {
            Combiner::Sum => 0,
            Combiner::Mean => 1,
            Combiner::SqrtN => 2,
        },
    };
    let (kernel, per_block, shared) = kernel(&call.table, call.vectors)?;
    // The limit of a kernel is set once, so it is the most that any table needs.
    let most = if shared > 0 { MOST_ROW_BYTES } else { 0 };
    let function = gpu.modules.embedding_bag.function(&format!("bag_{}_{kernel}", call.table.element.name()), most)?;
    let mut table = call.table.raw();
    let mut arguments = [from_mut(&mut table).cast::<c_void>(), from_mut(&mut raw).cast()];
    // One block even for no slots: it writes that none are missing.
    let blocks = slots.div_ceil(per_block).max(1) as u32;
    // SAFETY: the kernel takes a `Table` and a `Bag`.
    unsafe { function.launch(blocks, THREADS, shared, stream, &mut arguments) }
}

/// The kernel for a table's rows and vectors that begin there, how many slots a block of it has, and how much shared
/// memory.
fn kernel(table: &DeviceTable, vectors: CUdeviceptr) -> Result<(&'static str, usize, usize), CudaError> {
    let DeviceTable { dim, rows, element, .. } = *table;
    // Four elements at a time, where those of every row begin at a multiple of their size.
    let fours = dim.is_multiple_of(4) && (rows | vectors).is_multiple_of(16);
    let bytes = dim * element.bytes();
    match dim {
        ..=128 if fours => Ok(("128", SLOTS, 0)),
        129..=256 if fours => Ok(("256", SLOTS, 0)),
        257..=512 if fours => Ok(("512", SLOTS, 0)),
        ..=128 => Ok(("odd", SLOTS, 0)),
        _ if bytes <= MOST_ROW_BYTES => Ok(("long", 1, bytes)),
        _ => {
            let most = MOST_ROW_BYTES / element.bytes();
            let message = format!("rows of {dim} can not be combined, expected up to {most} numbers");
            Err(CudaError::Unsupported(message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_kernel_until_it_is_too_long() {
        let table = |dim, element| DeviceTable { sets: 0, rows: 0, versions: 0, set_count: 1, dim, element };
        let name = |dim, element| kernel(&table(dim, element), 0).map(|(name, ..)| name);
        for (dim, expected) in [(1, "odd"), (4, "128"), (127, "odd"), (128, "128"), (130, "long"), (132, "256")] {
            assert_eq!(name(dim, Type::F32).unwrap(), expected, "{dim}");
        }
        assert_eq!(name(512, Type::F16).unwrap(), "512");
        assert_eq!(kernel(&DeviceTable { rows: 8, ..table(128, Type::F32) }, 0).unwrap().0, "odd");
        assert_eq!(kernel(&table(128, Type::F32), 4).unwrap().0, "odd");
        assert_eq!(kernel(&table(1000, Type::F16), 0).unwrap(), ("long", 1, 2000));
        assert_eq!(name(MOST_ROW_BYTES / 4, Type::F32).unwrap(), "long");
        let error = name(MOST_ROW_BYTES / 4 + 1, Type::F32).unwrap_err().to_string();
        assert!(error.contains("24577") && error.contains("24576"), "{error}");
        assert_eq!(name(MOST_ROW_BYTES / 2, Type::F16).unwrap(), "long");
    }
}
