//! `ai.pagoda.Linear`: a product with the nodes of a decoder that stand around it.

use std::marker::PhantomData;

use pagoda_kernels::RmsNorm;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use super::fused::{self, Around, Attributes, Places};
use crate::ort::{
    Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, Shape,
    ShapeInferContext,
};

const PLACES: Places = Places { bias: 2, residual: 3, norm: 4 };

/// The product of rows with a matrix, for one element type.
pub struct Linear<T> {
    attributes: Attributes,
    /// Whether nothing writes weight and bias while the graph runs.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for Linear<T> {
    const INPUTS: &'static [Input] = &[
        Input::required("x", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::optional("bias", T::ONNX),
        Input::optional("residual", T::ONNX),
        Input::optional("norm", T::ONNX),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::required("y", T::ONNX), Output::optional("y2", T::ONNX), Output::optional("y3", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        let ([_, _], [columns, _]) = (&x.dims[..], &weight.dims[..]) else { return Ok(vec![]) };
        Ok(fused::infer_shapes(node, &x, columns))
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let constant = info.all_constant(&[1, PLACES.bias])?;
        Ok(Self { attributes: Attributes::read(info, &PLACES)?, constant, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, cut } = self.attributes;
        let Tensors { x, weight, around, rows, inner, columns } = &Tensors::read(context, &self.attributes)?;
        let Around { bias, residual, norm, outputs } = around;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::Linear::<T> {
                rows: *rows,
                inner: *inner,
                columns: *columns,
                x: x.slice(),
                weight: weight.slice(),
                bias: bias.as_ref().map(|bias| bias.slice()),
                residual: residual.as_ref().map(|residual| residual.slice()),
                norm: norm.as_ref().map(|norm| RmsNorm { weight: norm.slice(), epsilon }),
                activation,
                cut,
            };
            let empty = || -> &mut [T] { &mut [] };
            let [y, y2, y3] = outputs.each_ref().map(|y| y.as_ref().map_or_else(empty, |(y, _)| y.slice_mut()));
            Ok(call.run([y, y2, y3], context)?)
        }
    }
}

impl<T: OnnxElement> Launch for Linear<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, .. } = self.attributes;
        let Tensors { x, weight, around, rows, inner, columns } = Tensors::read(context, &self.attributes)?;
        let Around { bias, residual, norm, outputs } = around;
        let call = cuda::Projection {
            element: cuda::Type::of::<T>(),
            rows,
            inner,
            width: columns,
            x: x.address(),
            weight: cuda::Weight::Numbers(weight.address()),
            bias: bias.map(|bias| bias.address()),
            residual: residual.map(|residual| residual.address()),
            norm: norm.map(|norm| (norm.address(), epsilon)),
            gate: activation,
            outputs: outputs.each_ref().map(|y| y.as_ref().map_or((0, 0), |(y, width)| (y.address(), *width))),
            constant: self.constant,
        };
        let scratch = context.needed_scratch("Linear", call.scratch_bytes(gpu))?;
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call, as the scratch memory does. Outputs are disjoint from inputs and from each other.
        Ok(unsafe { gpu.projection(&call, scratch.map_or(0, |scratch| scratch.address()), stream) }?)
    }
}

/// The tensors of a call, with consistent shapes.
struct Tensors<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    around: Around<'a>,
    rows: usize,
    /// K.
    inner: usize,
    /// N, the rows of the weight.
    columns: usize,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a KernelContext, attributes: &Attributes) -> Result<Self, OpError> {
        let (x, weight) = (context.input(0)?, context.input(1)?);
        let ([rows, inner], [columns, _]) = (x.shape()?, weight.shape()?);
        weight.expect_shape(&[columns, inner])?;
        let around = Around::read(context, attributes, &PLACES, &[&x, &weight], columns)?;
        Ok(Self { x, weight, around, rows, inner, columns })
    }
}
