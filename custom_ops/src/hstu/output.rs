//! `ai.pagoda.HstuOutput`: the output projection and the residual.

use std::marker::PhantomData;

use pagoda_kernels::Taken;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::ort::{
    I64, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};

/// The projection back to the width of the model plus the residual, for one element type.
pub struct HstuOutput<T> {
    /// Whether weight and bias are initializers of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuOutput<T> {
    const INPUTS: &'static [Input] = &[
        Input::required("y", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::optional("bias", T::ONNX),
        Input::optional("residual", T::ONNX),
        Input::optional("index", I64),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("output", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(y), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        match (&y.dims[..], &weight.dims[..]) {
            ([rows, _], [width, _]) => {
                Ok(vec![Some(Shape { element: y.element, dims: vec![rows.clone(), width.clone()] })])
            }
            _ => Ok(vec![]),
        }
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        if info.has_input(4)? && !info.has_input(3)? {
            return Err(OpError::invalid("HstuOutput: index names rows of residual, which is missing: give both"));
        }
        Ok(Self { constant: info.all_constant(&[1, 2])?, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let output = inputs.output(context)?;
        let Inputs { rows, given, inner, width, .. } = inputs;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from every input.
        unsafe {
            let call = pagoda_kernels::HstuOutput::<T> {
                rows,
                inner,
                width,
                y: inputs.y.slice(),
                weight: inputs.weight.slice(),
                bias: inputs.bias.as_ref().map(|bias| bias.slice()),
                residual: inputs.residual.as_ref().map(|residual| residual.slice()),
                taken: inputs.index.as_ref().map(|index| Taken { of: given, index: index.slice() }),
            };
            Ok(call.run(output.slice_mut(), context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuOutput<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let call = cuda::Output {
            element: cuda::Type::of::<T>(),
            rows: inputs.rows,
            inner: inputs.inner,
            width: inputs.width,
            y: inputs.y.address(),
            weight: inputs.weight.address(),
            bias: inputs.bias.as_ref().map(InputTensor::address),
            residual: inputs.residual.as_ref().map(InputTensor::address),
            taken: inputs.index.as_ref().map(|index| cuda::Taken { of: inputs.given, index: index.address() }),
            output: inputs.output(context)?.address(),
            constant: self.constant,
        };
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from every input.
        Ok(unsafe { gpu.output(&call, stream) }?)
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    y: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    residual: Option<InputTensor<'a>>,
    index: Option<InputTensor<'a>>,
    rows: usize,
    /// The number of rows of the residual.
    given: usize,
    inner: usize,
    width: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let (y, weight) = (context.input(0)?, context.input(1)?);
        let (bias, residual) = (context.optional_input(2)?, context.optional_input(3)?);
        let index = context.optional_input(4)?;
        let ([rows, inner], [width, _]) = (y.shape()?, weight.shape()?);
        weight.expect_shape(&[width, inner])?;
        if let Some(bias) = &bias {
            bias.expect_shape(&[width])?;
        }
        if let Some(index) = &index {
            index.expect_shape(&[rows])?;
        }
        let mut given = rows;
        if let Some(residual) = &residual {
            if index.is_some() {
                [given, _] = residual.shape()?;
            }
            residual.expect_shape(&[given, width])?;
        }
        Ok(Self { y, weight, bias, residual, index, rows, given, inner, width })
    }

    /// The output, which must be disjoint from every input.
    fn output(&self, context: &KernelContext) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &[self.rows, self.width])?;
        output.check_disjoint([&self.y, &self.weight])?;
        output.check_disjoint(&self.bias)?;
        output.check_disjoint(&self.residual)?;
        output.check_disjoint(&self.index)?;
        Ok(output)
    }
}
