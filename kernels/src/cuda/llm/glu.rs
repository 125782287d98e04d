//! `Glu` on the GPU.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use crate::GluActivation;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::{check_sizes, copy_width};

const THREADS: usize = 256;
/// Bytes that a thread of the wide kernels reads at once.
const VECTOR: usize = 16;

/// One call of the operator `Glu`, as [`crate::Glu`]. Addresses are those of the device.
#[derive(Clone, Copy, Debug)]
pub struct Glu {
    /// Of x and y.
    pub element: Type,
    /// T.
    pub rows: usize,
    /// F.
    pub width: usize,
    /// `[T, 2·F]`.
    pub x: CUdeviceptr,
    /// `[T, F]`: what is added to y before it is rounded.
    pub residual: Option<CUdeviceptr>,
    /// `[T, F]`.
    pub y: CUdeviceptr,
    /// What the gates go through.
    pub activation: GluActivation,
}

impl Gpu {
    /// Enqueues `Glu` on a stream.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn glu(&self, call: &Glu, stream: CUstream) -> Result<(), CudaError> {
        let Glu { element, rows, width, mut x, residual, mut y, activation } = *call;
        let mut residual = residual.unwrap_or(0);
        check_sizes(&[("T", rows), ("F", width)])?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        self.bind()?;
        let wide = copy_width(width * element.bytes(), x | residual | y) == VECTOR;
        let (per_thread, form) = if wide { (VECTOR / element.bytes(), "") } else { (1, "_any") };
        let blocks = width.div_ceil(THREADS * per_thread);
        let grid = rows.checked_mul(blocks).and_then(|grid| i32::try_from(grid).ok()).ok_or_else(|| {
            CudaError::Unsupported(format!("x of {rows} rows of 2·{width}, expected fewer: split the batch"))
        })?;
        let name = format!("glu_{}_{}{form}", activation.name(), element.name());
        let function = self.modules.glu.function(&name, 0)?;
        let (mut width, mut blocks) = (width as i32, blocks as i32);
        let mut arguments: [*mut c_void; 5] = [
            from_mut(&mut x).cast(),
            from_mut(&mut residual).cast(),
            from_mut(&mut y).cast(),
            from_mut(&mut width).cast(),
            from_mut(&mut blocks).cast(),
        ];
        // SAFETY: the kernel takes three addresses and two ints; the rest is the caller's.
        unsafe { function.launch(grid as u32, THREADS as u32, 0, stream, &mut arguments) }
    }
}
