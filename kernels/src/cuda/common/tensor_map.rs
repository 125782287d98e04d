//! Descriptions of tensors for the TMA (Tensor Memory Accelerator), Hopper's copy engine.

use cudarc::driver::sys::{
    CUdeviceptr, CUtensorMap, CUtensorMapDataType_enum as DataType, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle, cuTensorMapEncodeTiled,
};

use super::element_type::Type;
use super::error::{CudaError, asked};
use super::raw::TensorMap;

const _: () =
    assert!(size_of::<TensorMap>() == size_of::<CUtensorMap>() && align_of::<TensorMap>() == align_of::<CUtensorMap>());

/// Describes a tensor without gaps, innermost dimension first, to be fetched by boxes that are 128 or 64 bytes wide, or by narrower
/// ones, whose chunks stay in order. Numbers of f32 are rounded to TF32 on their way.
pub fn describe<const N: usize>(
    element: Type,
    address: CUdeviceptr,
    dims: [usize; N],
    boxed: [usize; N],
) -> Result<TensorMap, CudaError> {
    let strides: Vec<usize> = (1..N).map(|outer| dims[..outer].iter().product::<usize>() * element.bytes()).collect();
    describe_strided(element, address, dims, &strides, boxed)
}

/// As [`describe`], with other distances in bytes: between neighbours in each of the outer dimensions, one less than there are
/// dimensions.
pub fn describe_strided<const N: usize>(
    element: Type,
    address: CUdeviceptr,
    dims: [usize; N],
    strides: &[usize],
    boxed: [usize; N],
) -> Result<TensorMap, CudaError> {
    let kind = match element {
        Type::F32 => DataType::CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        Type::F16 => DataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        Type::Bf16 => DataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match boxed[0] * element.bytes() {
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    assert_eq!(strides.len() + 1, N, "a stride for every dimension but the innermost");
    let (dims, boxed, steps) = (dims.map(|dim| dim as u64), boxed.map(|dim| dim as u32), [1_u32; N]);
    // Of every dimension but the innermost.
    let strides: Vec<u64> = strides.iter().map(|stride| *stride as u64).collect();
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: every array has as many entries as the tensor has dimensions, and strides have one less.
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
    .map_err(asked("describing a tensor to the TMA"))?;
    Ok(TensorMap(map.opaque))
}

/// A tensor of rows and columns, to be moved by boxes of so many.
pub fn describe_matrix(
    element: Type,
    address: CUdeviceptr,
    [rows, columns]: [usize; 2],
    [height, width]: [usize; 2],
) -> Result<TensorMap, CudaError> {
    describe(element, address, [columns, rows], [width, height])
}
