//! The limits of the GPU: a large matrix product by cuBLAS, and a copy.

use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    cublasComputeType_t as Compute, cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType_t as DataType,
    is_culib_present,
};
use pagoda::Result;

use super::{Bench, failed};

const SIZE: u64 = 8192;
const WORKSPACE: usize = 32 << 20;

/// FLOP/s of a bf16 matrix product 8192 x 8192 x 8192 with sums in f32; none where cuBLAS is not installed.
pub fn matmul(bench: &Bench) -> Result<Option<f64>> {
    // SAFETY: only tries to load the library.
    if !unsafe { is_culib_present() } {
        eprintln!("cuBLAS is not installed (libcublasLt.so.13): no ceiling for arithmetic");
        return Ok(None);
    }
    let elements = (SIZE * SIZE) as usize;
    let [a, b, d] = [bench.numbers(elements, 1)?, bench.numbers(elements, 2)?, bench.numbers(elements, 3)?];
    // SAFETY: as long as the library is told below.
    let workspace = unsafe { bench.stream.alloc::<u8>(WORKSPACE) }.map_err(failed)?;
    let [a, b, d] = [&a, &b, &d].map(|tensor| bench.address(tensor) as *mut c_void);
    let workspace = bench.address(&workspace) as *mut c_void;
    let prepare = || -> std::result::Result<_, CublasError> {
        let handle = result::create_handle()?;
        let layout = result::create_matrix_layout(DataType::CUDA_R_16BF, SIZE, SIZE, SIZE as i64)?;
        let product = result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?;
        let preference = result::create_matmul_pref()?;
        let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: handles made just now; the attribute is a size_t.
        let found = unsafe {
            let bytes = (&raw const WORKSPACE_BYTES).cast();
            result::set_matmul_pref_attribute(preference, most, bytes, size_of::<usize>())?;
            result::get_matmul_algo_heuristic(handle, product, layout, layout, layout, layout, preference)?
        };
        Ok((handle, layout, product, found))
    };
    let (handle, layout, product, found) = prepare().map_err(failed)?;
    let (one, zero) = (1.0_f32, 0.0_f32);
    let seconds = bench.seconds(|_| {
        // SAFETY: three matrices of that size, which outlive the measurement; scalars are read during the call.
        unsafe {
            result::matmul(
                handle,
                product,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                a,
                layout,
                b,
                layout,
                d,
                layout,
                d,
                layout,
                &found.algo,
                workspace,
                WORKSPACE,
                bench.stream.cu_stream().cast(),
            )
        }
        .map_err(failed)
    })?;
    Ok(Some(2.0 * (SIZE as f64).powi(3) / seconds))
}

static WORKSPACE_BYTES: usize = WORKSPACE;

/// Bytes that a copy within the device's memory reads and writes in a second.
pub fn copy(bench: &Bench) -> Result<f64> {
    let bytes = 2_usize << 30;
    let [from, to] = [bench.numbers(bytes / 2, 4)?, bench.numbers(bytes / 2, 5)?];
    let (source, target) = (bench.address(&from), bench.address(&to));
    let seconds = bench.seconds(|_| {
        // SAFETY: both are that long and live until the measurement has ended.
        unsafe { cudarc::driver::result::memcpy_dtod_async(target, source, bytes, bench.stream.cu_stream()) }
            .map_err(failed)
    })?;
    Ok(2.0 * bytes as f64 / seconds)
}
