//! `BlockLinear` on the GPU, with weights of 4 bits: few rows by a kernel that reads the codes at the speed of memory; more rows by
//! cuBLASLt, over the opened matrix.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw;
use crate::BLOCK;
use crate::cuda::common::blas::{BlasProduct, WORKSPACE};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;
use crate::cuda::common::tensor_map::describe_matrix;

/// Of cuda/llm/block_linear_sm90.cu: threads of a block, its rows of the matrix, the blocks of numbers that are a step, and the rows
/// of x that a kernel takes.
const THREADS: u32 = 256;
const HEIGHT: usize = 128;
const STEP: usize = 8;
const FEW: [usize; 3] = [8, 16, 32];
/// The stages of the matrix and of x, and their bytes: x has those of its rows, and those of what the middle of the codes adds.
const STAGES: usize = 4;
const MATRIX_BYTES: usize = HEIGHT * (STEP + 1) * 16;
const X_STAGES: usize = 2;
const X_ROW_BYTES: usize = (STEP * BLOCK / 8 + 4) * 16 + STEP * 4;
/// The largest cluster.
const CLUSTER: usize = 8;
/// Rows from which on the matrix is opened: few rows at a time would read it a third time.
const MANY: usize = 65;
/// The most bytes of an opened matrix.
const MOST_OPENED: usize = 512 << 20;
/// Numbers that a thread opens.
const OPENED: usize = 8;
/// Scratch memory is cut at multiples of it.
const ALIGNMENT: usize = 256;

/// One call of the operator `BlockLinear` with codes of 4 bits and no offsets, as [`crate::BlockLinear`]. Addresses are those of
/// the device.
#[derive(Clone, Copy, Debug)]
pub struct BlockProduct {
    /// Of x, scales, bias and y: f16 or bf16.
    pub element: Type,
    /// T.
    pub rows: usize,
    /// K, a multiple of 32, and not 0.
    pub inner: usize,
    /// N.
    pub width: usize,
    /// `[T, K]`.
    pub x: CUdeviceptr,
    /// `[N, K / 32, 16]`.
    pub codes: CUdeviceptr,
    /// `[N, K / 32]`.
    pub scales: CUdeviceptr,
    /// `[N]`.
    pub bias: Option<CUdeviceptr>,
    /// `[T, N]`; written.
    pub y: CUdeviceptr,
    /// Whether nothing on the stream writes codes, scales and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

impl BlockProduct {
    /// Bytes of scratch memory for [`Gpu::block_linear`].
    pub fn scratch_bytes(&self) -> usize {
        if self.is_opened() { self.opened_bytes() + WORKSPACE } else { 0 }
    }

    fn opened_bytes(&self) -> usize {
        (self.width * self.inner * self.element.bytes()).next_multiple_of(ALIGNMENT)
    }

    /// It depends on sizes alone.
    fn is_opened(&self) -> bool {
        self.rows >= MANY && self.opened_bytes() <= MOST_OPENED || !self.constant
    }

    fn check(&self) -> Result<(), CudaError> {
        let Self { element, rows, inner, width, x, codes, .. } = *self;
        check_sizes(&[
            ("T", rows),
            ("K", inner),
            ("N", width),
            ("N · K", width.saturating_mul(inner.div_ceil(OPENED))),
        ])?;
        let refuse = |message: String| Err(CudaError::Unsupported(message));
        if element == Type::F32 {
            return refuse("BlockLinear in f32: on a GPU it takes f16 and bf16: run this model on the CPU".into());
        }
        if inner == 0 || !inner.is_multiple_of(BLOCK) {
            return refuse(format!(
                "BlockLinear: rows of {inner} numbers, expected a multiple of {BLOCK}, and at least that"
            ));
        }
        if !(x | codes).is_multiple_of(16) {
            return refuse(format!("BlockLinear: x at {x:#x} and codes at {codes:#x}, expected multiples of 16"));
        }
        Ok(())
    }

    fn raw(&self) -> raw::BlockProduct {
        raw::BlockProduct {
            x: self.x,
            codes: self.codes,
            scales: self.scales,
            bias: self.bias.unwrap_or(0),
            y: self.y,
            rows: self.rows as i32,
            inner: self.inner as i32,
            width: self.width as i32,
        }
    }

    /// The rows from `first` on, as many as the kernels take at once.
    fn part(&self, first: usize) -> Self {
        let at = |address: CUdeviceptr, width: usize| address + (first * width * self.element.bytes()) as CUdeviceptr;
        let rows = (self.rows - first).min(FEW[FEW.len() - 1]);
        Self { rows, x: at(self.x, self.inner), y: at(self.y, self.width), ..*self }
    }

    /// The blocks of a cluster, so that there is work for each multiprocessor, which holds two; and the steps that each goes over.
    /// It depends on the matrix alone.
    fn cluster(&self, multiprocessors: usize) -> (usize, usize) {
        let (all, steps) = (self.width.div_ceil(HEIGHT), (self.inner / BLOCK).div_ceil(STEP));
        let mut blocks = 1;
        while blocks < CLUSTER && blocks < steps && all * blocks < multiprocessors {
            blocks *= 2;
        }
        (blocks, steps.div_ceil(blocks))
    }
}

impl Gpu {
    /// Enqueues `BlockLinear` on a stream, with [`BlockProduct::scratch_bytes`] bytes of scratch memory.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm); the scratch memory is not used by anything else on another stream meanwhile.
    pub unsafe fn block_linear(
        &self,
        call: &BlockProduct,
        scratch: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        call.check()?;
        if call.rows == 0 || call.width == 0 {
            return Ok(());
        }
        let Some(module) = &self.modules.block_linear_sm90 else {
            let message = "BlockLinear needs a Hopper GPU: run this model on the CPU, or as it was exported";
            return Err(CudaError::Unsupported(message.into()));
        };
        self.bind()?;
        if call.is_opened() {
            // SAFETY: the caller's.
            return unsafe { self.many_rows_of_blocks(call, scratch, stream) };
        }
        // An element of it is two bytes: four codes.
        let (dims, boxed) = ([call.width, call.inner / 4], [HEIGHT, STEP * BLOCK / 4]);
        let mut codes = describe_matrix(Type::F16, call.codes, dims, boxed)?;
        let (mut first, (cluster, steps)) = (0, call.cluster(self.multiprocessors as usize));
        let (blocks, mut steps) = ((call.width.div_ceil(HEIGHT) * cluster) as u32, steps as i32);
        while first < call.rows {
            let part = call.part(first);
            let form = FEW.iter().position(|columns| part.rows <= *columns).expect("a part is as long as the last");
            let shared = STAGES * MATRIX_BYTES + X_STAGES * FEW[form] * X_ROW_BYTES;
            let function = module.function(&format!("few_rows_{}_{}", call.element.name(), FEW[form]), shared)?;
            let mut raw = part.raw();
            let mut arguments =
                [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut codes).cast(), from_mut(&mut steps).cast()];
            // SAFETY: the kernel takes a `BlockProduct`, a description and an int, and waits for the kernel in front before it
            // touches what is not constant; the rest is the caller's.
            unsafe {
                function.launch_clusters(cluster as u32, [blocks, THREADS, shared as u32], stream, &mut arguments)
            }?;
            first += part.rows;
        }
        Ok(())
    }

    unsafe fn many_rows_of_blocks(
        &self,
        call: &BlockProduct,
        scratch: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let module = self.modules.block_linear_sm90.as_ref().expect("the caller looked");
        let function = module.function(&format!("open_{}", call.element.name()), 0)?;
        let mut raw = raw::BlockProduct { y: scratch, ..call.raw() };
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let blocks = (call.width * (call.inner / OPENED)).div_ceil(THREADS as usize) as u32;
        let BlockProduct { element, rows, inner, width, x, bias, y, .. } = *call;
        let workspace = scratch + call.opened_bytes() as CUdeviceptr;
        let product =
            BlasProduct { element, rows, inner, width, x, weight: scratch, bias, residual: None, y, workspace };
        // SAFETY: the kernel takes a `BlockProduct`, and waits for the kernel in front; the product reads what it wrote; the rest
        // is the caller's.
        unsafe {
            self.launch_dependent(function, blocks, THREADS, 0, stream, &mut arguments)?;
            self.blas.multiply(&product, stream)
        }
    }
}
