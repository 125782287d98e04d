//! `Linear` and `BlockLinear` on the GPU: few rows by a kernel that reads the weight at the speed of memory, where the chip has wgmma
//! (Hopper); more rows by cuBLASLt, with our kernels around it. A weight in blocks is opened for that.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::gated_gemm::GatedProduct;
use super::glu::Glu;
use super::raw::{FewRows, FewRowsMaps};
use crate::cuda::common::blas::{BlasProduct, WORKSPACE};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::raw::TensorMap;
use crate::cuda::common::sizes::{check_sizes, copy_width};
use crate::cuda::common::tensor_map::{describe_matrix, describe_strided};
use crate::{BLOCK, CodeBits, GluActivation};

/// Rows up to which a kernel goes, and the stages of its ring; `KERNELS` of cuda/llm/projection_sm90.cu, and of
/// cuda/llm/block_projection_sm90.cu for weights of 4 and of 8 bits.
const SHAPES: [(usize, usize); 4] = [(8, 12), (16, 12), (32, 10), (64, 8)];
const SHAPES_OF_4: [(usize, usize); 4] = [(8, 4), (16, 3), (32, 5), (64, 3)];
const SHAPES_OF_8: [(usize, usize); 4] = [(8, 5), (16, 4), (32, 4), (64, 3)];
/// As in cuda/llm/projection_sm90.cuh.
const HEIGHT: usize = 128;
const DEPTH: usize = 64;
const ROW_BYTES: usize = 128;
const THREADS: u32 = 288;
/// The columns of a step over a weight in blocks, and what x has for it: them, and a box with their sums; cuda/llm/rms_norm.cu.
const BLOCK_DEPTH: usize = 256;
const BLOCK_PITCH: usize = BLOCK_DEPTH + 64;
/// The bytes that wgmma and the TMA want the scales of a step to be aligned to.
const SCALE_ALIGNMENT: usize = 16;
/// Rows from which on a weight in blocks is opened: few rows at a time would read it once more.
const OPENED_ROWS: usize = 257;
/// The most bytes of an opened weight, where it need not be opened.
const MOST_OPENED: usize = 512 << 20;
/// Threads of a block that opens, and the numbers of each.
const OPENING_THREADS: u32 = 256;
const OPENED: usize = 8;
/// Of a block that norms; cuda/llm/rms_norm.cu.
const NORM_THREADS: u32 = 256;
/// Rows below which several outputs are cut out of one product.
const CUT_ROWS: usize = 1024;
/// Of a block that cuts.
const CUT_THREADS: usize = 256;
/// Scratch memory is cut at multiples of it.
const ALIGNMENT: usize = 256;

/// The weight of a [`Projection`], `[N, K]`.
#[derive(Clone, Copy, Debug)]
pub enum Weight {
    /// Numbers of the call's type.
    Numbers(CUdeviceptr),
    /// Codes in blocks of [`BLOCK`], as [`crate::BlockLinear`] has them without offsets. K is a multiple of it, and not 0.
    Blocks {
        /// `[N, K / 32, 4 · bits]`.
        codes: CUdeviceptr,
        /// `[N, K / 32]`.
        scales: CUdeviceptr,
        /// The bits of a code.
        bits: CodeBits,
    },
}

/// One call of the operator `Linear`, as [`crate::Linear`], or of `BlockLinear` in f16 or bf16. Addresses are those of the device.
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// Of all tensors but codes.
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
    pub weight: Weight,
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
        } else if self.gated_product(0).is_some_and(|product| product.pays(gpu)) {
            0
        } else {
            self.product_bytes() + WORKSPACE
        };
        self.rows_bytes(gpu) + self.opened_bytes(gpu) + product
    }

    /// Of the weight, where it is opened.
    fn opened_bytes(&self, gpu: &Gpu) -> usize {
        match self.weight {
            Weight::Blocks { .. } if !self.is_few(gpu) => self.weight_bytes().next_multiple_of(ALIGNMENT),
            _ => 0,
        }
    }

    fn weight_bytes(&self) -> usize {
        self.width * self.inner * self.element.bytes()
    }

    /// The call as one product with SwiGLU, if it is no more than that. Rows that are normed first are in scratch memory, which is
    /// aligned as it has to be.
    fn gated_product(&self, weight: CUdeviceptr) -> Option<GatedProduct> {
        let is_plain = self.bias.is_none() && self.residual.is_none() && self.gate == Some(GluActivation::Silu);
        let Self { element, rows, inner, constant, .. } = *self;
        // What is opened is written on the stream.
        let constant = constant && matches!(self.weight, Weight::Numbers(_));
        let (y, width) = self.outputs[0];
        let x = if self.norm.is_some() { 0 } else { self.x };
        is_plain.then_some(GatedProduct { element, rows, inner, width, x, weight, y, constant })
    }

    /// Of the rows that are multiplied, where they are not x: they are normed, or in the order that codes ask for.
    fn rows_bytes(&self, gpu: &Gpu) -> usize {
        let columns = match self.weight {
            Weight::Blocks { .. } if self.is_few(gpu) => self.inner.div_ceil(BLOCK_DEPTH) * BLOCK_PITCH,
            _ if self.norm.is_some() => self.inner,
            _ => 0,
        };
        (self.rows * columns * self.element.bytes()).next_multiple_of(ALIGNMENT)
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
        gpu.multiprocessors as usize * columns * HEIGHT * size_of::<f32>()
    }

    fn shapes(&self) -> &'static [(usize, usize); 4] {
        match self.weight {
            Weight::Numbers(_) => &SHAPES,
            Weight::Blocks { bits: CodeBits::Four, .. } => &SHAPES_OF_4,
            Weight::Blocks { bits: CodeBits::Eight, .. } => &SHAPES_OF_8,
        }
    }

    /// Rows that the kernel for few rows takes at a time, and its stages.
    fn shape(&self) -> (usize, usize) {
        let shapes = self.shapes();
        shapes.iter().copied().find(|(columns, _)| self.rows <= *columns).unwrap_or(shapes[shapes.len() - 1])
    }

    /// Whether the kernel for few rows takes the call. It depends on sizes and addresses alone.
    fn is_few(&self, gpu: &Gpu) -> bool {
        let (depth, (most, _)) = (self.step(), self.shapes()[SHAPES.len() - 1]);
        let units = self.width.div_ceil(HEIGHT).saturating_mul(self.inner.div_ceil(depth));
        let is_gated = self.gate.is_some();
        let fits = match self.weight {
            Weight::Numbers(weight) => {
                gpu.modules.projection_sm90.is_some()
                    && self.rows <= most
                    && self.inner.is_multiple_of(8)
                    && (self.x | weight).is_multiple_of(16)
            }
            Weight::Blocks { codes, .. } => {
                gpu.modules.block_projection_sm90.is_some()
                    && (self.rows < OPENED_ROWS || self.weight_bytes() > MOST_OPENED)
                    && (self.x | codes).is_multiple_of(16)
            }
        };
        fits && self.element != Type::F32
            && self.constant
            && self.inner > 0
            && (!is_gated || self.width.is_multiple_of(16))
            // The kernel counts steps in 32 bits.
            && units < (1 << 31) / (gpu.multiprocessors as usize + 1)
    }

    /// Columns of a step of the kernel for few rows.
    fn step(&self) -> usize {
        if matches!(self.weight, Weight::Numbers(_)) { DEPTH } else { BLOCK_DEPTH }
    }

    /// Rows of the weight, or of what belongs to them, `columns` elements each: as they are, or eight ups behind eight gates.
    fn rows_map(
        &self,
        element: Type,
        address: CUdeviceptr,
        columns: usize,
        depth: usize,
    ) -> Result<TensorMap, CudaError> {
        let row = columns * element.bytes();
        if self.gate.is_none() {
            let all = row * self.width;
            return describe_strided(
                element,
                address,
                [columns, self.width, 1, 1],
                &[row, all, all],
                [depth, HEIGHT, 1, 1],
            );
        }
        let (dims, strides) = ([columns, 8, 2, self.width / 16], [row, self.width / 2 * row, 8 * row]);
        describe_strided(element, address, dims, &strides, [depth, 8, 2, HEIGHT / 16])
    }

    /// The scales where the kernel reads them itself because the TMA can not, or 0; and the tensors of the kernel for few rows, of
    /// which `columns` rows are in a step.
    fn maps(&self, columns: usize) -> Result<(CUdeviceptr, FewRowsMaps), CudaError> {
        match self.weight {
            Weight::Numbers(weight) => {
                let x = describe_matrix(self.element, self.x, [self.rows, self.inner], [columns, DEPTH])?;
                let weight = self.rows_map(self.element, weight, self.inner, DEPTH)?;
                Ok((0, FewRowsMaps { weight, scales: TensorMap([0; 16]), x }))
            }
            Weight::Blocks { codes, scales, bits } => {
                let blocks = self.inner / BLOCK;
                let (steps, row) = (self.inner.div_ceil(BLOCK_DEPTH), ROW_BYTES / self.element.bytes());
                let boxes = BLOCK_PITCH / row;
                let x = describe_strided(
                    self.element,
                    self.x,
                    [row, self.rows, steps * boxes],
                    &[steps * BLOCK_PITCH * self.element.bytes(), ROW_BYTES],
                    [row, columns, boxes],
                )?;
                // An element of it is two bytes.
                let weight = self.rows_map(Type::F16, codes, blocks * bits.block_bytes() / 2, ROW_BYTES / 2)?;
                let per_step = BLOCK_DEPTH / BLOCK;
                if blocks.is_multiple_of(per_step) && scales.is_multiple_of(SCALE_ALIGNMENT as CUdeviceptr) {
                    let scales = self.rows_map(self.element, scales, blocks, per_step)?;
                    return Ok((0, FewRowsMaps { weight, scales, x }));
                }
                Ok((scales, FewRowsMaps { weight, scales: TensorMap([0; 16]), x }))
            }
        }
    }

    /// The rows from `first` on, as many as the kernel for few rows takes at a time; x is as it takes them.
    fn part(&self, first: usize) -> Self {
        let (most, _) = self.shapes()[SHAPES.len() - 1];
        let rows = (self.rows - first).min(most);
        let behind =
            |address: CUdeviceptr, width: usize| address + (first * width * self.element.bytes()) as CUdeviceptr;
        let pitch = match self.weight {
            Weight::Numbers(_) => self.inner,
            Weight::Blocks { .. } => self.inner.div_ceil(BLOCK_DEPTH) * BLOCK_PITCH,
        };
        Self {
            rows,
            x: behind(self.x, pitch),
            residual: self.residual.map(|residual| behind(residual, self.outputs[0].1)),
            outputs: self.outputs.map(|(address, width)| (behind(address, width), width)),
            ..*self
        }
    }

    fn check(&self) -> Result<(), CudaError> {
        let Self { element, rows, inner, width, x, weight, .. } = *self;
        let refuse = |message: String| Err(CudaError::Unsupported(message));
        check_sizes(&[("T", rows), ("K", inner), ("N", width)])?;
        let Weight::Blocks { codes, .. } = weight else { return Ok(()) };
        check_sizes(&[("N · K", width.saturating_mul(inner.div_ceil(OPENED)))])?;
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
        call.check()?;
        if call.rows == 0 || call.width == 0 {
            return Ok(());
        }
        if call.inner == 0 {
            let message = "Linear: K is 0, and products on a GPU have at least one column: run this model on the CPU";
            return Err(CudaError::Unsupported(message.into()));
        }
        if matches!(call.weight, Weight::Blocks { .. }) && self.modules.block_projection_sm90.is_none() {
            let message = "BlockLinear needs a Hopper GPU: run this model on the CPU, or as it was exported";
            return Err(CudaError::Unsupported(message.into()));
        }
        self.bind()?;
        let few = call.is_few(self);
        let in_blocks = few && matches!(call.weight, Weight::Blocks { .. });
        let rows_bytes = call.rows_bytes(self);
        if rows_bytes > 0 {
            // SAFETY: the caller's.
            unsafe { self.rms_norm(call, in_blocks, scratch, stream) }?;
        }
        let product = Projection { x: if rows_bytes > 0 { scratch } else { call.x }, norm: None, ..*call };
        let behind = scratch + rows_bytes as CUdeviceptr;
        let counters =
            if few { self.counters.of(stream, self.multiprocessors as usize * size_of::<u32>()) } else { None };
        // SAFETY: the caller's.
        unsafe {
            match counters {
                Some(ready) => {
                    let mut first = 0;
                    while first < call.rows {
                        let part = product.part(first);
                        self.few_rows(&part, behind, ready.address, stream)?;
                        first += part.rows;
                    }
                    Ok(())
                }
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

    /// Rows for a product: normed, or as they are; and in the order that codes ask for.
    unsafe fn rms_norm(
        &self,
        call: &Projection,
        in_blocks: bool,
        mut to: CUdeviceptr,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        let (element, mut x) = (call.element, call.x);
        let (mut weight, mut epsilon) = call.norm.unwrap_or((0, 0.0));
        let wide = copy_width(call.inner * element.bytes(), x | weight | to) == 16;
        let variant = match (in_blocks, wide) {
            (true, _) => "_in_blocks",
            (false, true) => "",
            (false, false) => "_any",
        };
        let name = format!("rms_norm_{}{variant}", element.name());
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
        let (columns, stages) = call.shape();
        let x_bytes = columns * ROW_BYTES;
        let (name, stage, module) = match call.weight {
            Weight::Numbers(_) => ("few_rows".to_owned(), HEIGHT * ROW_BYTES + x_bytes, &self.modules.projection_sm90),
            Weight::Blocks { bits, .. } => {
                let codes = BLOCK_DEPTH / BLOCK * (bits.block_bytes() + call.element.bytes());
                let boxes = BLOCK_PITCH * call.element.bytes() / ROW_BYTES;
                let name = format!("few_blocks_{}", bits.block_bytes() * 8 / BLOCK);
                (name, HEIGHT * codes + boxes * x_bytes, &self.modules.block_projection_sm90)
            }
        };
        let shared = stages * (stage + 16);
        let name = format!("{name}_{}_{columns}", call.element.name());
        let function = module.as_ref().expect("few rows are Hopper's").function(&name, shared)?;
        let (scales, mut maps) = call.maps(columns)?;
        let mut raw = FewRows {
            scales,
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
        let mut arguments = [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut maps).cast()];
        // SAFETY: the kernel takes a `FewRows` and a `FewRowsMaps`, and waits for the kernel in front before it touches what is
        // not constant.
        unsafe { self.launch_dependent(function, self.multiprocessors, THREADS, shared, stream, &mut arguments) }
    }

    unsafe fn many_rows(&self, call: &Projection, scratch: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
        let Projection { element, rows, inner, width, x, .. } = *call;
        // SAFETY: the caller's.
        let weight = unsafe { self.opened(call, scratch, stream) }?;
        let scratch = scratch + call.opened_bytes(self) as CUdeviceptr;
        let (y, columns) = call.outputs[0];
        if let Some(product) = call.gated_product(weight).filter(|product| product.pays(self)) {
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

    /// The weight as numbers: opened in the beginning of the scratch memory, if it is in blocks.
    unsafe fn opened(
        &self,
        call: &Projection,
        mut scratch: CUdeviceptr,
        stream: CUstream,
    ) -> Result<CUdeviceptr, CudaError> {
        let (mut codes, mut scales, bits) = match call.weight {
            Weight::Numbers(weight) => return Ok(weight),
            Weight::Blocks { codes, scales, bits } => (codes, scales, bits),
        };
        let module = self.modules.block_projection_sm90.as_ref().expect("the caller looked");
        let name = format!("open_{}_{}", bits.block_bytes() * 8 / BLOCK, call.element.name());
        let function = module.function(&name, 0)?;
        let mut count = (call.width * call.inner) as i64;
        let blocks = (call.width * (call.inner / OPENED)).div_ceil(OPENING_THREADS as usize) as u32;
        let mut arguments: [*mut c_void; 4] = [
            from_mut(&mut codes).cast(),
            from_mut(&mut scales).cast(),
            from_mut(&mut scratch).cast(),
            from_mut(&mut count).cast(),
        ];
        // SAFETY: the kernel takes three addresses and an int64, and waits for the kernel in front; the rest is the caller's.
        unsafe { self.launch_dependent(function, blocks, OPENING_THREADS, 0, stream, &mut arguments) }?;
        Ok(scratch)
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
