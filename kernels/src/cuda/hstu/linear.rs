//! `HstuLinear` on the GPU: which kernel takes a call.
//!
//! It is chosen by the weight alone and by where tensors lie, for each adds up in an order of its own: what is in the
//! batch beside a row must not change a bit of it.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::dense_call::Output;
use super::raw::{LinearMaps, Product};
use crate::Activation;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;
use crate::cuda::common::tensor_map::describe_matrix;

/// Columns up to which there is a kernel that is not by tiles, its rows of a block, and threads; `product_few` of
/// cuda/hstu/hstu_gemm_simt.cu.
const FEW: i32 = 8;
const FEW_ROWS: usize = 32;
const FEW_THREADS: u32 = 256;

/// As in cuda/hstu/hstu_linear_sm90.cu.
const CLUSTER: usize = 2;
const TILE: [usize; 2] = [64, 128];
const DEPTH: usize = 32;
const THREADS: u32 = 160;
const SHARED: usize = 8 * (TILE[0] + TILE[1]) * DEPTH * size_of::<f32>() + 128;
const _: () = assert!(SHARED <= 227 * 1024, "a block has to fit into a multiprocessor");

/// One call of the operator `HstuLinear`, as [`crate::HstuLinear`].
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// R.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// N.
    pub width: usize,
    /// `[R, K]`.
    pub x: CUdeviceptr,
    /// `[N, K]`.
    pub weight: CUdeviceptr,
    /// `[N]`.
    pub bias: Option<CUdeviceptr>,
    /// `[R, N]`.
    pub y: CUdeviceptr,
    /// What every sum goes through.
    pub activation: Activation,
    /// Whether 10 bits of the fractions of x and weight are enough (TF32), where that is faster.
    pub tf32: bool,
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

impl Linear {
    /// As `HstuOutput` without a residual, but for what sums go through.
    fn raw(&self) -> Result<Product, CudaError> {
        let output = Output {
            element: Type::F32,
            rows: self.rows,
            inner: self.inner,
            width: self.width,
            y: self.x,
            weight: self.weight,
            bias: self.bias,
            residual: None,
            taken: None,
            output: self.y,
            constant: self.constant,
        };
        Ok(Product { activation: self.activation as i32, ..output.raw()? })
    }

    /// Whether four numbers of a row lie together everywhere.
    fn lies_in_fours(&self) -> bool {
        self.inner > 0 && self.inner.is_multiple_of(4) && (self.x | self.weight | self.y).is_multiple_of(16)
    }
}

impl Gpu {
    /// Enqueues `HstuLinear` on a stream.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn linear(&self, call: &Linear, stream: CUstream) -> Result<(), CudaError> {
        let mut raw = call.raw()?;
        if raw.rows == 0 || raw.columns == 0 {
            return Ok(());
        }
        self.bind()?;
        if call.lies_in_fours() && raw.columns <= FEW {
            let function = self.modules.gemm_simt.function("product_few", 0)?;
            let blocks = call.rows.div_ceil(FEW_ROWS) as u32;
            let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
            // SAFETY: the kernel takes a `Product`, and waits for the kernel before it on chips that let it begin
            // earlier.
            return unsafe { self.launch_dependent(function, blocks, FEW_THREADS, 0, stream, &mut arguments) };
        }
        match &self.modules.linear_sm90 {
            Some(module) if call.tf32 && call.lies_in_fours() => {
                let [high, wide] = TILE;
                let mut maps = LinearMaps {
                    x: describe_matrix(Type::F32, call.x, [call.rows, call.inner], [high, DEPTH])?,
                    weight: describe_matrix(Type::F32, call.weight, [call.width, call.inner], [wide, DEPTH])?,
                };
                let blocks = CLUSTER * call.rows.div_ceil(high) * call.width.div_ceil(wide);
                check_sizes(&[("blocks", blocks)])?;
                let function = module.function("linear_tf32", SHARED)?;
                let mut arguments = [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut maps).cast()];
                // SAFETY: the kernel takes a `Product` and `Maps`, and waits for the kernel before it.
                unsafe { self.launch_dependent(function, blocks as u32, THREADS, SHARED, stream, &mut arguments) }
            }
            // SAFETY: the caller's.
            _ => unsafe { self.multiplied(None, raw, Type::F32, stream) },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_vectors_go_the_fast_ways() {
        let (x, weight, y, bias, activation) = (16, 32, 48, None, Activation::None);
        let call =
            |inner, y| Linear { rows: 3, inner, width: 2, x, weight, bias, y, activation, tf32: true, constant: true };
        assert!(call(4, y).lies_in_fours());
        assert!(!call(6, y).lies_in_fours() && !call(0, y).lies_in_fours() && !call(4, 40).lies_in_fours());
    }
}
