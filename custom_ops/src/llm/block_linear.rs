//! `ai.pagoda.BlockLinear`: the product with a matrix of 4 or 8 bits.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{BlockProduct, CUstream, Gpu, Type};
use pagoda_kernels::{BLOCK, CodeBits, OUTPUT_BLOCK};

use crate::ort::{
    Dim, F32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output,
    OutputTensor, Shape, ShapeInferContext, U8,
};

/// The places of the inputs that a graph may omit.
const OFFSETS: usize = 3;
const BIAS: usize = 4;

/// The inputs of either kind, which differ in their type alone.
macro_rules! declared_inputs {
    ($element:expr) => {
        &[
            Input::required("x", $element),
            Input::required("codes", U8),
            Input::required("scales", $element),
            Input::optional("offsets", $element),
            Input::optional("bias", $element),
        ]
    };
}

/// The product in f32 with a matrix whose weights are stored in blocks.
pub struct BlockLinear;

impl Operator for BlockLinear {
    const INPUTS: &'static [Input] = declared_inputs!(F32);
    const OUTPUTS: &'static [Output] = &[Output::required("y", F32), Output::optional("maxima", F32)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(_info: &KernelInfo) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Tensors { x, codes, bits, scales, offsets, bias, y, maxima, rows, inner, width } = Tensors::read(context)?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::BlockLinear {
                rows,
                inner,
                width,
                x: x.slice(),
                codes: codes.slice(),
                bits,
                scales: scales.slice(),
                offsets: offsets.as_ref().map(|offsets| offsets.slice()),
                bias: bias.as_ref().map(|bias| bias.slice()),
            };
            Ok(call.run(y.slice_mut(), maxima.as_ref().map(|maxima| maxima.slice_mut()), context)?)
        }
    }
}

/// The same in f16 or bf16, for graphs that run on a GPU. On the CPU it computes in f32, over copies.
pub struct HalfBlockLinear<T> {
    /// Whether nothing writes the matrix while the graph runs.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HalfBlockLinear<T> {
    const INPUTS: &'static [Input] = declared_inputs!(T::ONNX);
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX), Output::optional("maxima", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        if info.has_output(1)? {
            return Err(OpError::invalid("maxima: this output is one of products in f32: leave it out"));
        }
        Ok(Self { constant: info.all_constant(&[1, 2, BIAS])?, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Tensors { x, codes, bits, scales, offsets, bias, y, rows, inner, width, .. } = Tensors::read(context)?;
        // SAFETY: as above.
        unsafe {
            let wide = |tensor: &InputTensor<'_>| -> Vec<f32> {
                tensor.slice::<T>().iter().map(|number| number.to_f32()).collect()
            };
            let (x, scales) = (wide(&x), wide(&scales));
            let (offsets, bias) = (offsets.as_ref().map(wide), bias.as_ref().map(wide));
            let call = pagoda_kernels::BlockLinear {
                rows,
                inner,
                width,
                x: &x,
                codes: codes.slice(),
                bits,
                scales: &scales,
                offsets: offsets.as_deref(),
                bias: bias.as_deref(),
            };
            let mut computed = vec![0.0; rows * width];
            call.run(&mut computed, None, context)?;
            for (y, computed) in y.slice_mut::<T>().iter_mut().zip(computed) {
                *y = T::from_f32(computed);
            }
        }
        Ok(())
    }
}

impl<T: OnnxElement> Launch for HalfBlockLinear<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let Tensors { x, codes, bits, scales, offsets, bias, y, rows, inner, width, .. } = Tensors::read(context)?;
        if bits != CodeBits::Four || offsets.is_some() {
            let message = "codes: on a GPU these have 4 bits and no offsets: run this model on the CPU";
            return Err(OpError::invalid(message));
        }
        let call = BlockProduct {
            element: Type::of::<T>(),
            rows,
            inner,
            width,
            x: x.address(),
            codes: codes.address(),
            scales: scales.address(),
            bias: bias.map(|bias| bias.address()),
            y: y.address(),
            constant: self.constant,
        };
        let scratch = context.needed_scratch("BlockLinear", call.scratch_bytes())?;
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call, as the scratch memory does. The output is disjoint from every input.
        Ok(unsafe { gpu.block_linear(&call, scratch.map_or(0, |scratch| scratch.address()), stream) }?)
    }
}

fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
    let (Some(x), Some(codes)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
    match (&x.dims[..], &codes.dims[..]) {
        ([rows @ .., _], [width, ..]) => {
            let dims = |width| rows.iter().cloned().chain([width]).collect();
            let shape = |width| Some(Shape { element: x.element, dims: dims(width) });
            let blocks = match width {
                Dim::Fixed(width) => shape(Dim::Fixed((width + OUTPUT_BLOCK as i64 - 1) / OUTPUT_BLOCK as i64)),
                _ => None,
            };
            Ok(vec![shape(width.clone()), blocks])
        }
        _ => Ok(vec![]),
    }
}

/// The tensors of a call, with consistent shapes. Outputs are disjoint from every input and from each other.
struct Tensors<'a> {
    x: InputTensor<'a>,
    codes: InputTensor<'a>,
    bits: CodeBits,
    scales: InputTensor<'a>,
    offsets: Option<InputTensor<'a>>,
    bias: Option<InputTensor<'a>>,
    y: OutputTensor,
    maxima: Option<OutputTensor>,
    rows: usize,
    /// K.
    inner: usize,
    /// N.
    width: usize,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let (x, codes, scales) = (context.input(0)?, context.input(1)?, context.input(2)?);
        let (offsets, bias) = (context.optional_input(OFFSETS)?, context.optional_input(BIAS)?);
        let [width, _, bytes] = codes.shape()?;
        let Some((&inner, outer)) = x.dims.split_last() else {
            return Err(OpError::invalid(format!("{}: a single number, expected rows", x.name)));
        };
        let Some(bits) = CodeBits::of_block(bytes) else {
            let message = format!(
                "{}: shape {:?}, expected 16 bytes a block of {BLOCK} (4 bits) or {BLOCK} bytes (8 bits)",
                codes.name, codes.dims
            );
            return Err(OpError::invalid(message));
        };
        if inner % BLOCK != 0 {
            let message = format!("{}: shape {:?}, expected rows of a multiple of {BLOCK} numbers", x.name, x.dims);
            return Err(OpError::invalid(message));
        }
        codes.expect_shape(&[width, inner / BLOCK, bytes])?;
        for of_blocks in [Some(&scales), offsets.as_ref()].into_iter().flatten() {
            // com.microsoft.MatMulNBits has them in one dimension, too.
            if of_blocks.dims != [width * (inner / BLOCK)] {
                of_blocks.expect_shape(&[width, inner / BLOCK])?;
            }
        }
        if let Some(bias) = &bias {
            bias.expect_shape(&[width])?;
        }
        let dims = |last| outer.iter().copied().chain([last]).collect::<Vec<_>>();
        let y = context.output(0, &dims(width))?;
        y.check_disjoint([&x, &codes, &scales])?;
        y.check_disjoint(offsets.iter().chain(&bias))?;
        let maxima = context.optional_output(1, &dims(width.div_ceil(OUTPUT_BLOCK)))?;
        if let Some(maxima) = &maxima {
            maxima.check_disjoint([&x, &codes, &scales])?;
            maxima.check_disjoint(offsets.iter().chain(&bias))?;
            maxima.check_disjoint_output(&y)?;
        }
        let rows = outer.iter().product();
        Ok(Self { x, codes, bits, scales, offsets, bias, y, maxima, rows, inner, width })
    }
}
