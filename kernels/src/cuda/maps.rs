//! What the copy engine of Hopper has to know of a tensor.

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType_enum as DataType, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle, cuTensorMapEncodeTiled,
};

use super::{Attention, CUdeviceptr, CudaError, Type, asked};

/// Rows of a box of queries, keys and values; `BOX` of cuda/hopper.cu.
const BOX: usize = 64;

/// The tensors of a call; `Maps` of cuda/hopper.cu.
#[repr(C)]
pub struct Maps {
    query: CUtensorMap,
    key: CUtensorMap,
    value: CUtensorMap,
    pool: CUtensorMap,
}

impl Maps {
    pub fn of(call: &Attention) -> Result<Self, CudaError> {
        let rows = call.rows.total_rows;
        let key = map(call, call.key, rows, BOX)?;
        Ok(Self {
            query: map(call, call.query, rows, BOX)?,
            key,
            value: map(call, call.value, rows, BOX)?,
            // Where there are no pages, no tile asks for this.
            pool: match call.cache {
                Some(cache) if cache.pool_pages > 0 => map(call, cache.pool, cache.pool_rows(), granule(call))?,
                _ => key,
            },
        })
    }
}

/// How many keys are fetched from a page at once: as many as divide every page, up to a box.
pub fn granule(call: &Attention) -> usize {
    call.cache.map_or(BOX, |cache| 1 << cache.page_size.trailing_zeros().min(BOX.trailing_zeros()))
}

/// A tensor `[rows, H, D]`, to be fetched by `height` rows of up to 128 bytes of one head.
fn map(call: &Attention, address: CUdeviceptr, rows: usize, height: usize) -> Result<CUtensorMap, CudaError> {
    let (heads, head_size) = (call.rows.heads, call.rows.head_size);
    describe(call.element, address, [head_size, heads, rows], [head_size.min(64), 1, height])
}

/// Describes a tensor without gaps, innermost dimension first, to be fetched by boxes that are 128 or 64 bytes wide. Numbers
/// of f32 are rounded to TF32 on their way.
pub fn describe<const N: usize>(
    element: Type,
    address: CUdeviceptr,
    dims: [usize; N],
    boxed: [usize; N],
) -> Result<CUtensorMap, CudaError> {
    let kind = match element {
        Type::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        Type::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Type::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match boxed[0] * element.bytes() {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
    };
    let (dims, boxed, steps) = (dims.map(|dim| dim as u64), boxed.map(|dim| dim as u32), [1_u32; N]);
    // Of every dimension but the innermost.
    let bytes = element.bytes() as u64;
    let strides: Vec<u64> = (1..N).map(|outer| dims[..outer].iter().product::<u64>() * bytes).collect();
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: every array has as many entries as the tensor has dimensions; of strides there is one less.
    unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            kind,
            N as u32,
            address as *mut _,
            dims.as_ptr(),
            strides.as_ptr(),
            boxed.as_ptr(),
            steps.as_ptr(),
            Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(asked("describing a tensor to the copy engine"))?;
    Ok(map)
}
