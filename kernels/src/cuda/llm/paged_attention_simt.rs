//! `PagedAttention` without tensor cores: every type and option, and what the faster kernels leave to it.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::paged_call::{PagedAttention, blocks};
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;

const THREADS: u32 = 128;

/// The append and the attention, row by row, and the weights of slots.
///
/// # Safety
/// As for [`Gpu::paged_attention`]; the call is checked.
pub unsafe fn launch(gpu: &Gpu, call: &PagedAttention, stream: CUstream) -> Result<(), CudaError> {
    let weights = call.key_weights.map_or(0, |weights| call.sequences * call.kv_heads * weights.len);
    let tasks = [
        ("append", call.total_rows * call.kv_heads * 2),
        ("attend", call.total_rows * call.query_heads),
        ("weigh", weights),
    ];
    for (kernel, warps) in tasks {
        // SAFETY: the kernel takes a `PagedCall`; the rest is the caller's.
        unsafe { launch_warps(gpu, call, kernel, warps, None, stream) }?;
    }
    Ok(())
}

/// What the call has appended is in the pool: its norms, where they are asked for.
///
/// # Safety
/// As for [`Gpu::paged_attention`]; the call is checked.
pub unsafe fn norms(gpu: &Gpu, call: &PagedAttention, stream: CUstream) -> Result<(), CudaError> {
    let Some(to) = call.kv_norms else { return Ok(()) };
    // SAFETY: the kernel takes a `PagedCall` and an address; the rest is the caller's.
    unsafe { launch_warps(gpu, call, "norms", call.total_rows * call.kv_heads, Some(to), stream) }
}

/// Launches a kernel of cuda/llm/paged_attention_simt.cu with so many warps.
///
/// # Safety
/// As for [`Gpu::paged_attention`]; the kernel takes a `PagedCall` and, where there is one, the address.
unsafe fn launch_warps(
    gpu: &Gpu,
    call: &PagedAttention,
    kernel: &str,
    warps: usize,
    mut to: Option<CUdeviceptr>,
    stream: CUstream,
) -> Result<(), CudaError> {
    if warps == 0 {
        return Ok(());
    }
    let name = format!("paged_{kernel}_{}", call.element.name());
    let function = gpu.modules.paged_attention_simt.function(&name, 0)?;
    let mut raw = call.raw();
    let mut arguments = vec![from_mut(&mut raw).cast::<c_void>()];
    arguments.extend(to.as_mut().map(|to| from_mut(to).cast::<c_void>()));
    let blocks = blocks(warps.div_ceil(THREADS as usize / 32))?;
    // SAFETY: the caller's.
    unsafe { function.launch(blocks, THREADS, 0, stream, &mut arguments) }
}
