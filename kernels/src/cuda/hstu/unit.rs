//! The operators around the layers of a model on the GPU.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::norm::{NORM_WARPS, form_of};
use super::raw;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;

/// One call of the operator `HstuUnit`, as [`crate::HstuUnit`].
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// Of x.
    pub element: Type,
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// `[R, E]`.
    pub x: CUdeviceptr,
    /// `[R, E]` of f32.
    pub y: CUdeviceptr,
    /// What a row is divided by where it is shorter.
    pub epsilon: f32,
}

impl Gpu {
    /// Enqueues `HstuUnit` on a stream.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn unit(&self, call: &Unit, stream: CUstream) -> Result<(), CudaError> {
        let Unit { element, rows, width, x, y, epsilon } = *call;
        check_sizes(&[("rows", rows), ("E", width)])?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        self.bind()?;
        let form = form_of(width * element.bytes(), x | y);
        let (warps, form) = form.map_or((1, "any".into()), |(warps, vectors)| (warps, format!("{warps}_{vectors}")));
        let function = self.modules.unit.function(&format!("unit_{}_{form}", element.name()), 0)?;
        let mut raw = raw::Unit { x, y, rows: rows as i64, size: width as i32, epsilon };
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let (blocks, threads) = (rows.div_ceil(NORM_WARPS / warps) as u32, 32 * NORM_WARPS as u32);
        // SAFETY: the kernel takes a `Unit`, and waits for the kernel before it on chips that let it begin earlier.
        unsafe { self.launch_dependent(function, blocks, threads, 0, stream, &mut arguments) }
    }
}
