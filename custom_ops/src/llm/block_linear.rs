//! `ai.pagoda.BlockLinear`: the product with a matrix of 4 or 8 bits.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{CUstream, Gpu, Projection, Type, Weight};
use pagoda_kernels::{BLOCK, CodeBits, OUTPUT_BLOCK};

use super::fused::{self, Around, Attributes, Places};
use crate::ort::{
    Dim, F32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, Shape,
    ShapeInferContext, U8,
};

/// The places of the inputs that a graph may omit.
const OFFSETS: usize = 3;
const PLACES: Places = Places { bias: 4, residual: 5, norm: 6 };

/// The inputs of either kind, which differ in their type alone.
macro_rules! declared_inputs {
    ($element:expr) => {
        &[
            Input::required("x", $element),
            Input::required("codes", U8),
            Input::required("scales", $element),
            Input::optional("offsets", $element),
            Input::optional("bias", $element),
            Input::optional("residual", $element),
            Input::optional("norm", $element),
        ]
    };
}

/// The product in f32 with a matrix whose weights are stored in blocks.
pub struct BlockLinear;

impl Operator for BlockLinear {
    const INPUTS: &'static [Input] = declared_inputs!(F32);
    const OUTPUTS: &'static [Output] =
        &[Output::required("y", F32), Output::optional("maxima", F32), Output::optional("y3", F32)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        for (place, name) in [(PLACES.residual, "residual"), (PLACES.norm, "norm")] {
            if info.has_input(place)? {
                return Err(OpError::invalid(format!(
                    "{name}: this input is one of products in f16 and bf16: leave it out"
                )));
            }
        }
        let widths = [info.int(c"width2")?, info.int(c"width3")?];
        if info.string(c"activation")?.is_some_and(|name| name != "none")
            || widths.iter().flatten().any(|width| *width != 0)
        {
            let message =
                "activation, width2, width3: these attributes are those of products in f16 and bf16: leave them out";
            return Err(OpError::invalid(message));
        }
        Ok(Self)
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let matrix = Matrix::read(context)?;
        let Matrix { x, codes, scales, offsets, width, .. } = &matrix;
        let bias = context.optional_input(PLACES.bias)?;
        if let Some(bias) = &bias {
            bias.expect_shape(&[*width])?;
        }
        let (_, outer) = x.dims.split_last().expect("rows have a last dimension");
        let dims = |last| outer.iter().copied().chain([last]).collect::<Vec<_>>();
        let y = context.output(0, &dims(*width))?;
        let maxima = context.optional_output(1, &dims(width.div_ceil(OUTPUT_BLOCK)))?;
        for output in [Some(&y), maxima.as_ref()].into_iter().flatten() {
            output.check_disjoint([x, codes, scales])?;
            output.check_disjoint(offsets.iter().chain(&bias))?;
        }
        if let Some(maxima) = &maxima {
            maxima.check_disjoint_output(&y)?;
        }
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::BlockLinear {
                bias: bias.as_ref().map(|bias| bias.slice()),
                ..matrix.call(x.slice(), scales.slice(), offsets.as_ref().map(|offsets| offsets.slice()))
            };
            Ok(call.run(y.slice_mut(), maxima.as_ref().map(|maxima| maxima.slice_mut()), context)?)
        }
    }
}

/// The same in f16 or bf16, with what stands around it, for graphs that run on a GPU. On the CPU it computes in f32, over an opened
/// copy.
pub struct HalfBlockLinear<T> {
    attributes: Attributes,
    /// Whether nothing writes the matrix while the graph runs.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HalfBlockLinear<T> {
    const INPUTS: &'static [Input] = declared_inputs!(T::ONNX);
    const OUTPUTS: &'static [Output] =
        &[Output::required("y", T::ONNX), Output::optional("y2", T::ONNX), Output::optional("y3", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let constant = info.all_constant(&[1, 2, PLACES.bias])?;
        Ok(Self { attributes: Attributes::read(info, &PLACES)?, constant, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, cut } = self.attributes;
        let matrix = Matrix::read(context)?;
        let around = matrix.around(context, &self.attributes)?;
        let Matrix { x, rows, inner, width, .. } = &matrix;
        let Around { bias, residual, norm, outputs } = &around;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let wide = |tensor: &InputTensor<'_>| -> Vec<f32> {
                tensor.slice::<T>().iter().map(|number| number.to_f32()).collect()
            };
            let (mut x, scales, offsets) = (wide(x), wide(&matrix.scales), matrix.offsets.as_ref().map(wide));
            let [bias, residual, norm] = [bias, residual, norm].map(|tensor| tensor.as_ref().map(wide));
            if let Some(norm) = &norm {
                x.chunks_mut((*inner).max(1)).for_each(|row| norm_row::<T>(row, norm, epsilon));
            }
            let weight = matrix.call(&x, &scales, offsets.as_deref()).opened();
            let call = pagoda_kernels::Linear::<f32> {
                rows: *rows,
                inner: *inner,
                columns: *width,
                x: &x,
                weight: &weight,
                bias: bias.as_deref(),
                residual: residual.as_deref(),
                norm: None,
                activation,
                cut,
            };
            let mut computed = outputs.each_ref().map(|y| vec![0.0; y.as_ref().map_or(0, |(_, width)| rows * width)]);
            call.run(computed.each_mut().map(|y| &mut y[..]), context)?;
            for ((y, _), computed) in outputs.iter().flatten().zip(computed) {
                for (y, computed) in y.slice_mut::<T>().iter_mut().zip(computed) {
                    *y = T::from_f32(computed);
                }
            }
        }
        Ok(())
    }
}

impl<T: OnnxElement> Launch for HalfBlockLinear<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, .. } = self.attributes;
        let matrix = Matrix::read(context)?;
        let Around { bias, residual, norm, outputs } = matrix.around(context, &self.attributes)?;
        let Matrix { x, codes, bits, scales, offsets, rows, inner, width } = matrix;
        if offsets.is_some() {
            return Err(OpError::invalid("offsets: on a GPU there are none: run this model on the CPU"));
        }
        let call = Projection {
            element: Type::of::<T>(),
            rows,
            inner,
            width,
            x: x.address(),
            weight: Weight::Blocks { codes: codes.address(), scales: scales.address(), bits },
            bias: bias.map(|bias| bias.address()),
            residual: residual.map(|residual| residual.address()),
            norm: norm.map(|norm| (norm.address(), epsilon)),
            gate: activation,
            outputs: outputs.each_ref().map(|y| y.as_ref().map_or((0, 0), |(y, width)| (y.address(), *width))),
            constant: self.constant,
        };
        let scratch = context.needed_scratch("BlockLinear", call.scratch_bytes(gpu))?;
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call, as the scratch memory does. Outputs are disjoint from inputs and from each other.
        Ok(unsafe { gpu.projection(&call, scratch.map_or(0, |scratch| scratch.address()), stream) }?)
    }
}

/// ONNX Runtime asks one operator of a name, whatever the type of x is.
fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
    let (Some(x), Some(codes)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
    if x.element != F32 {
        return Ok(codes.dims.first().map_or(vec![], |width| fused::infer_shapes(node, &x, width)));
    }
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

/// The RMS norm of a row. What is multiplied then is rounded to T.
fn norm_row<T: OnnxElement>(row: &mut [f32], weight: &[f32], epsilon: f32) {
    let mean = row.iter().map(|number| number * number).sum::<f32>() / row.len() as f32;
    let factor = 1.0 / (mean + epsilon).sqrt();
    for (number, weight) in row.iter_mut().zip(weight) {
        *number = T::from_f32(*number * factor * weight).to_f32();
    }
}

/// A matrix in blocks, and the rows that it is multiplied with: tensors with consistent shapes.
struct Matrix<'a> {
    x: InputTensor<'a>,
    codes: InputTensor<'a>,
    bits: CodeBits,
    scales: InputTensor<'a>,
    offsets: Option<InputTensor<'a>>,
    rows: usize,
    /// K.
    inner: usize,
    /// N.
    width: usize,
}

impl<'a> Matrix<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let (x, codes, scales) = (context.input(0)?, context.input(1)?, context.input(2)?);
        let offsets = context.optional_input(OFFSETS)?;
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
        let rows = outer.iter().product();
        Ok(Self { x, codes, bits, scales, offsets, rows, inner, width })
    }

    /// The product alone, with the numbers of x, scales and offsets.
    ///
    /// # Safety
    /// The codes are in host memory, and nothing writes them.
    unsafe fn call<'n>(
        &'n self,
        x: &'n [f32],
        scales: &'n [f32],
        offsets: Option<&'n [f32]>,
    ) -> pagoda_kernels::BlockLinear<'n> {
        let Self { rows, inner, width, bits, .. } = *self;
        // SAFETY: the caller's; codes have the element type of `INPUTS`.
        let codes = unsafe { self.codes.slice() };
        pagoda_kernels::BlockLinear { rows, inner, width, x, codes, bits, scales, offsets, bias: None }
    }

    /// Its tensors beside x.
    fn around(&self, context: &'a KernelContext, attributes: &Attributes) -> Result<Around<'a>, OpError> {
        let inputs: Vec<_> = [&self.x, &self.codes, &self.scales].into_iter().chain(self.offsets.as_ref()).collect();
        Around::read(context, attributes, &PLACES, &inputs, self.width)
    }
}
