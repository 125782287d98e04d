//! `Linear` on the GPU: few rows by a kernel that reads the weight at the speed of memory, where the chip has wgmma (Hopper); more
//! rows by cuBLASLt, with our kernels around it.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::gated_gemm::GatedProduct;
use super::glu::Glu;
use super::raw::{FewRows, FewRowsMaps};
use crate::GluActivation;
use crate::cuda::common::blas::{BlasProduct, WORKSPACE};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::raw::TensorMap;
use crate::cuda::common::sizes::{check_sizes, copy_width};
use crate::cuda::common::tensor_map::{describe_matrix, describe_strided};

/// Rows up to which a kernel goes, and the stages of its ring; `KERNELS` of cuda/llm/projection_sm90.cu.
const SHAPES: [(usize, usize); 3] = [(8, 12), (16, 12), (32, 10)];
/// As in cuda/llm/projection_sm90.cuh.
const TILE: usize = 128;
const DEPTH: usize = 64;
const THREADS: u32 = 288;
/// Of a block that norms; cuda/llm/rms_norm.cu.
const NORM_THREADS: u32 = 256;
/// Rows below which several outputs are cut out of one product.
const CUT_ROWS: usize = 1024;
/// Of a block that cuts.
const CUT_THREADS: usize = 256;
/// Scratch memory is cut at multiples of it.
const ALIGNMENT: usize = 256;

/// One call of the operator `Linear`, as [`crate::Linear`]. Addresses are those of the device.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// Of all tensors.
    pub element: Type,
    /// T.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// N.
    pub width: usize,
    /// `[T, K]`.
    pub x: CUdeviceptr,
    /// `[N, K]`.
    pub weight: CUdeviceptr,
    /// `[N]`.
    pub bias: Option<CUdeviceptr>,
    /// As the output, of which there is one then.
    pub residual: Option<CUdeviceptr>,
    /// `[K]`, and epsilon: x is normed first.
    pub norm: Option<(CUdeviceptr, f32)>,
    /// The first half of the columns are gates of the second half; there is one output then.
    pub gate: Option<GluActivation>,
    /// Address and width of each output, which follow each other; those behind the last one have a width of 0.
    pub outputs: [(CUdeviceptr, usize); 3],
    /// Whether nothing on the stream writes weight and bias: they are then read while the kernel in front still runs.
    pub constant: bool,
}

impl Projection {
    /// Bytes of scratch memory for [`Gpu::projection`].
    pub fn scratch_bytes(&self, gpu: &Gpu) -> usize {
        if self.rows == 0 || self.width == 0 {
            return 0;
        }
        let product = if self.is_few(gpu) {
            self.parts_bytes(gpu)
        } else if self.gated_product().is_some_and(|product| product.pays(gpu)) {
            0
        } else {
            self.product_bytes() + WORKSPACE
        };
        self.normed_bytes() + product
    }

    /// The call with the normed rows, which are in scratch memory, in the place of its own.
    fn normed(&self, scratch: CUdeviceptr) -> Self {
        if self.norm.is_some() { Self { norm: None, x: scratch, ..*self } } else { *self }
    }

    /// The call as one product with SwiGLU, if it is no more than that. Rows that are normed first are in scratch memory, which is
    /// aligned as it has to be.
    fn gated_product(&self) -> Option<GatedProduct> {
        let is_plain = self.bias.is_none() && self.residual.is_none() && self.gate == Some(GluActivation::Silu);
        let Self { element, rows, inner, weight, constant, .. } = *self;
        let (y, width) = self.outputs[0];
        let x = if self.norm.is_some() { 0 } else { self.x };
        is_plain.then_some(GatedProduct { element, rows, inner, width, x, weight, y, constant })
    }

    fn normed_bytes(&self) -> usize {
        if self.norm.is_some() {
            (self.rows * self.inner * self.element.bytes()).next_multiple_of(ALIGNMENT)
        } else {
            0
        }
    }

    /// Of the product where something follows it: a gate, or the cut into outputs.
    fn product_bytes(&self) -> usize {
        let follows = self.gate.is_some() || self.is_cut();
        if follows { (self.rows * self.width * self.element.bytes()).next_multiple_of(ALIGNMENT) } else { 0 }
    }

    /// Whether outputs are cut out of one product. With many rows a product for each is cheaper than to copy.
    fn is_cut(&self) -> bool {
        self.outputs[1].1 + self.outputs[2].1 > 0 && self.rows < CUT_ROWS
    }

    fn parts_bytes(&self, gpu: &Gpu) -> usize {
        let (columns, _) = self.shape();
        gpu.multiprocessors as usize * columns * TILE * size_of::<f32>()
    }

    /// Rows that the kernel for few rows takes, and its stages.
    fn shape(&self) -> (usize, usize) {
        SHAPES.into_iter().find(|(columns, _)| self.rows <= *columns).unwrap_or(SHAPES[SHAPES.len() - 1])
    }

    /// Whether the kernel for few rows takes the call. It depends on sizes and addresses alone.
    fn is_few(&self, gpu: &Gpu) -> bool {
        let units = self.width.div_ceil(TILE).saturating_mul(self.inner.div_ceil(DEPTH));
        gpu.modules.projection_sm90.is_some()
            && self.element != Type::F32
            && self.constant
            && self.rows <= SHAPES[SHAPES.len() - 1].0
            && self.inner > 0
            && self.inner.is_multiple_of(8)
            && self.width.is_multiple_of(16)
            && (self.x | self.weight).is_multiple_of(16)
            // The kernel counts steps in 32 bits.
            && units < (1 << 31) / (gpu.multiprocessors as usize + 1)
    }

    /// Rows of the weight eight by eight: as they are, or eight ups behind eight gates.
    fn weight_map(&self) -> Result<TensorMap, CudaError> {
        let row = self.inner * self.element.bytes();
        let (other, next) = if self.gate.is_some() { (self.width / 2, 8) } else { (8, 16) };
        let dims = [self.inner, 8, 2, self.width / 16];
        describe_strided(self.element, self.weight, dims, [row, other * row, next * row], [DEPTH, 8, 2, TILE / 16])
    }
}

impl Gpu {
    /// Enqueues `Linear` on a stream, with [`Projection::scratch_bytes`] bytes of scratch memory.
    ///
    /// # Safety
    /// As for [`norm`](Self::norm); the scratch memory is not used by anything else on another stream meanwhile.
    pub unsafe fn projection(
        &self,
        call: &Projection,
        scratch: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let Projection { rows, inner, width, .. } = *call;
        check_sizes(&[("T", rows), ("K", inner), ("N", width)])?;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        if inner == 0 {
            let message = "Linear: K is 0, and products on a GPU have at least one column: run this model on the CPU";
            return Err(CudaError::Unsupported(message.into()));
        }
        self.bind()?;
        let few = call.is_few(self);
        let product = call.normed(scratch);
        if let Some((weight, epsilon)) = call.norm {
            // SAFETY: the caller's.
            unsafe { self.rms_norm(call, weight, epsilon, scratch, stream) }?;
        }
        let behind = scratch + call.normed_bytes() as CUdeviceptr;
        let counters =
            if few { self.counters.of(stream, self.multiprocessors as usize * size_of::<u32>()) } else { None };
        // SAFETY: the caller's.
        unsafe {
            match counters {
                Some(ready) => self.few_rows(&product, behind, ready.address, stream),
                None if few => Err(CudaError::Unsupported(
                    "Linear needs counters, and this stream has none: run on a stream of its own, not on the default stream of \
                     each thread; a CUDA graph that is captured gets them from a reserve, which the next launch outside of a \
                     graph fills"
                        .into(),
                )),
                None => self.many_rows(&product, behind, stream),
            }
        }
    }

    unsafe fn rms_norm(
        &self,
        call: &Projection,
        mut weight: CUdeviceptr,
        mut epsilon: f32,
        mut to: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let (element, mut x) = (call.element, call.x);
        let wide = copy_width(call.inner * element.bytes(), x | weight | to) == 16;
        let name = format!("rms_norm_{}{}", element.name(), if wide { "" } else { "_any" });
        let function = self.modules.rms_norm.function(&name, 0)?;
        let mut size = call.inner as i32;
        let mut arguments: [*mut c_void; 5] = [
            from_mut(&mut x).cast(),
            from_mut(&mut weight).cast(),
            from_mut(&mut to).cast(),
            from_mut(&mut size).cast(),
            from_mut(&mut epsilon).cast(),
        ];
        // SAFETY: the kernel takes three addresses, an int and a float, and waits for the kernel in front; the rest is the
        // caller's.
        unsafe { self.launch_dependent(function, call.rows as u32, NORM_THREADS, 0, stream, &mut arguments) }
    }

    unsafe fn few_rows(
        &self,
        call: &Projection,
        parts: CUdeviceptr,
        ready: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let ((columns, stages), module) = (call.shape(), self.modules.projection_sm90.as_ref());
        let shared = stages * ((TILE + columns) * DEPTH * 2 + 16);
        let name = format!("few_rows_{}_{columns}", call.element.name());
        let function = module.expect("few rows are Hopper's").function(&name, shared)?;
        let mut raw = FewRows {
            bias: call.bias.unwrap_or(0),
            residual: call.residual.unwrap_or(0),
            outputs: call.outputs.map(|(address, _)| address),
            parts,
            ready,
            widths: call.outputs.map(|(_, width)| width as i32),
            rows: call.rows as i32,
            depth: call.inner as i32,
            columns: call.width as i32,
            gate: call.gate.map_or(0, gate_number),
            unused: 0,
        };
        let mut maps = FewRowsMaps {
            weight: call.weight_map()?,
            x: describe_matrix(call.element, call.x, [call.rows, call.inner], [columns, DEPTH])?,
        };
        let mut arguments = [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut maps).cast()];
        // SAFETY: the kernel takes a `FewRows` and a `FewRowsMaps`, and waits for the kernel in front before it touches what is
        // not constant.
        unsafe { self.launch_dependent(function, self.multiprocessors, THREADS, shared, stream, &mut arguments) }
    }

    unsafe fn many_rows(&self, call: &Projection, scratch: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
        let Projection { element, rows, inner, width, x, weight, .. } = *call;
        let (y, columns) = call.outputs[0];
        if let Some(product) = call.gated_product().filter(|product| product.pays(self)) {
            // SAFETY: the caller's.
            return unsafe { product.launch(self, stream) };
        }
        let workspace = scratch + call.product_bytes() as CUdeviceptr;
        let follows = call.gate.is_some() || call.is_cut();
        let outputs = if follows { [(scratch, width), (0, 0), (0, 0)] } else { call.outputs };
        let mut first = 0;
        for (y, width) in outputs.into_iter().filter(|(_, width)| *width > 0) {
            let product = BlasProduct {
                element,
                rows,
                inner,
                width,
                x,
                weight: weight + (first * inner * element.bytes()) as CUdeviceptr,
                bias: call.bias.map(|bias| bias + (first * element.bytes()) as CUdeviceptr),
                residual: call.residual.filter(|_| call.gate.is_none()),
                y,
                workspace,
            };
            // SAFETY: the caller's; rows of the weight behind those of the outputs before.
            unsafe { self.blas.multiply(&product, stream) }?;
            first += width;
        }
        // SAFETY: the caller's; the product wrote what is read.
        unsafe {
            match call.gate {
                Some(activation) => {
                    let residual = call.residual;
                    self.glu(&Glu { element, rows, width: columns, x: scratch, residual, y, activation }, stream)
                }
                None if call.is_cut() => self.cut_rows(call, scratch, stream),
                None => Ok(()),
            }
        }
    }

    unsafe fn cut_rows(&self, call: &Projection, mut from: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
        let widths = call.outputs.map(|(_, width)| width * call.element.bytes());
        let addresses = call.outputs.iter().fold(from, |all, (address, _)| all | address);
        let word = widths.iter().fold(16, |word, width| word.min(copy_width(*width, addresses)));
        let [wide, second, third] = widths.map(|width| width / word);
        let (mut wide, mut wider, mut width) = (wide as i32, (wide + second) as i32, (wide + second + third) as i32);
        let mut all = (call.rows * width as usize) as i64;
        let [mut a, mut b, mut c] = call.outputs.map(|(address, _)| address);
        let mut arguments: [*mut c_void; 8] = [
            from_mut(&mut from).cast(),
            from_mut(&mut a).cast(),
            from_mut(&mut b).cast(),
            from_mut(&mut c).cast(),
            from_mut(&mut wide).cast(),
            from_mut(&mut wider).cast(),
            from_mut(&mut width).cast(),
            from_mut(&mut all).cast(),
        ];
        let blocks = (all as usize).div_ceil(CUT_THREADS);
        check_sizes(&[("T", blocks)])?;
        let function = self.modules.cut_rows.function(&format!("cut_rows_{word}"), 0)?;
        // SAFETY: the kernel takes four addresses, three ints and an int64, and waits for the kernel in front.
        unsafe { self.launch_dependent(function, blocks as u32, CUT_THREADS as u32, 0, stream, &mut arguments) }
    }
}

/// `Activation` of cuda/llm/projection_sm90.cuh.
fn gate_number(activation: GluActivation) -> i32 {
    match activation {
        GluActivation::Silu => 1,
        GluActivation::Gelu => 2,
        GluActivation::GeluTanh => 3,
    }
}
