//! `PagedKvAppend` on the GPU.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::CUstream;

use super::call::Append;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::copy_width;

const THREADS: u32 = 256;

impl Gpu {
    /// Enqueues `PagedKvAppend` on a stream, in place on the pool.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention); nothing else touches the slots that are written.
    pub unsafe fn append(&self, call: &Append, stream: CUstream) -> Result<(), CudaError> {
        call.check()?;
        if call.rows.total_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { launch(self, call, stream) }
    }
}

/// # Safety
/// As for [`Gpu::append`].
pub unsafe fn launch(gpu: &Gpu, call: &Append, stream: CUstream) -> Result<(), CudaError> {
    let bytes = call.rows.heads * call.rows.head_size * call.element.bytes();
    let width = copy_width(bytes, call.key | call.value | call.cache.pool);
    let function = gpu.modules.paged_kv_append.function(&format!("append_{width}"), 0)?;
    // A warp a row.
    let blocks = (call.rows.total_rows as u32).div_ceil(THREADS / 32);
    let (mut raw, mut element_bytes) = (call.raw(), call.element.bytes() as i32);
    let mut arguments = [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut element_bytes).cast()];
    // SAFETY: the kernel takes a `Call` and an `int`, and waits for the kernel before it on chips that let it begin
    // earlier.
    unsafe { gpu.launch_dependent(function, blocks, THREADS, 0, stream, &mut arguments) }
}
