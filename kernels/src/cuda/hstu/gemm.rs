//! The matrix products of `HstuProject` and `HstuOutput` on the GPU: which kernel takes a call.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::CUstream;

use super::dense_call::{DensePath, Output, Project};
use super::gemm_sm90;
use super::raw::Product;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;

/// Rows and columns of a block of the SIMT product, and its threads; cuda/hstu/hstu_gemm_simt.cu.
const PLAIN_TILE: usize = 64;
const PLAIN_THREADS: u32 = 256;

impl Gpu {
    /// Enqueues `HstuProject` on a stream, by the fastest kernel that takes the call.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm); the outputs are apart from one another.
    pub unsafe fn project(&self, call: &Project, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.multiplied(None, call.raw()?, call.element, stream) }
    }

    /// As [`project`](Self::project), by the kernel given.
    ///
    /// # Safety
    /// As for [`project`](Self::project).
    pub unsafe fn project_by(&self, path: DensePath, call: &Project, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.multiplied(Some(path), call.raw()?, call.element, stream) }
    }

    /// Enqueues `HstuOutput` on a stream, by the fastest kernel that takes the call. Of an index as for
    /// [`gate`](Self::gate).
    ///
    /// # Safety
    /// As for [`norm`](Self::norm).
    pub unsafe fn output(&self, call: &Output, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.multiplied(None, call.raw()?, call.element, stream) }
    }

    /// As [`output`](Self::output), by the kernel given.
    ///
    /// # Safety
    /// As for [`output`](Self::output).
    pub unsafe fn output_by(&self, path: DensePath, call: &Output, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.multiplied(Some(path), call.raw()?, call.element, stream) }
    }

    /// The kernels that take a call of `HstuProject` on this device, slowest first.
    pub fn project_paths(&self, call: &Project) -> Result<Vec<DensePath>, CudaError> {
        Ok(self.product_paths(&call.raw()?, call.element))
    }

    /// The kernels that take a call of `HstuOutput` on this device, slowest first.
    pub fn output_paths(&self, call: &Output) -> Result<Vec<DensePath>, CudaError> {
        Ok(self.product_paths(&call.raw()?, call.element))
    }

    fn product_paths(&self, call: &Product, element: Type) -> Vec<DensePath> {
        let mut paths = vec![DensePath::Plain];
        paths
            .extend((self.modules.gemm_sm90.is_some() && gemm_sm90::takes(call, element)).then_some(DensePath::Hopper));
        paths
    }

    /// # Safety
    /// As for [`norm`](Self::norm).
    pub(super) unsafe fn multiplied(
        &self,
        path: Option<DensePath>,
        mut raw: Product,
        element: Type,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let paths = self.product_paths(&raw, element);
        let path = path.unwrap_or(*paths.last().expect("there is always a plain one"));
        if !paths.contains(&path) {
            return Err(CudaError::Unsupported(format!(
                "the {path:?} kernel does not take this product on this device"
            )));
        }
        if raw.rows == 0 || raw.columns == 0 {
            return Ok(());
        }
        self.bind()?;
        if path == DensePath::Hopper {
            // SAFETY: the caller's.
            return unsafe { gemm_sm90::launch(self, raw, element, stream) };
        }
        let function = self.modules.gemm_simt.function(&format!("product_{}", element.name()), 0)?;
        let tiles = (raw.rows as usize).div_ceil(PLAIN_TILE) * (raw.columns as usize).div_ceil(PLAIN_TILE);
        check_sizes(&[("tiles", tiles)])?;
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes a `Product`; as above.
        unsafe { self.launch_dependent(function, tiles as u32, PLAIN_THREADS, 0, stream, &mut arguments) }
    }
}
