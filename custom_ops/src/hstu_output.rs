//! `ai.pagoda.HstuOutput`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::Taken;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{I64, expect_shape};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// The projection back to the width of the model, and the residual, for one element type.
pub struct HstuOutput<T> {
    /// Whether weight and bias are part of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuOutput<T> {
    const NAME: &'static CStr = c"HstuOutput";
    const INPUTS: &'static [Input] = &[
        Input::required("y", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::optional("bias", T::ONNX),
        Input::optional("residual", T::ONNX),
        Input::optional("index", I64),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("output", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(y), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        match (&y.dims[..], &weight.dims[..]) {
            ([rows, _], [width, _]) => {
                Ok(vec![Some(Shape { element: y.element, dims: vec![rows.clone(), width.clone()] })])
            }
            _ => Ok(vec![]),
        }
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        if attributes.has_input(4)? && !attributes.has_input(3)? {
            return Err(OpError::invalid("HstuOutput: index names rows of residual, which is missing: give both"));
        }
        Ok(Self { constant: attributes.are_constant(&[1, 2])?, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let output = inputs.output(context)?;
        let Inputs { rows, given, inner, width, .. } = inputs;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from all of them.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from every input.
        Ok(unsafe { gpu.output(&call, stream) }?)
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    y: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    residual: Option<InputTensor<'a>>,
    index: Option<InputTensor<'a>>,
    rows: usize,
    /// Of the residual.
    given: usize,
    inner: usize,
    width: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let (y, weight) = (context.input(0)?, context.input(1)?);
        let (bias, residual) = (context.optional_input(2)?, context.optional_input(3)?);
        let index = context.optional_input(4)?;
        let ([rows, inner], [width, _]) = (y.shape()?, weight.shape()?);
        expect_shape(&weight, &[width, inner])?;
        if let Some(bias) = &bias {
            expect_shape(bias, &[width])?;
        }
        if let Some(index) = &index {
            expect_shape(index, &[rows])?;
        }
        let mut given = rows;
        if let Some(residual) = &residual {
            if index.is_some() {
                [given, _] = residual.shape()?;
            }
            expect_shape(residual, &[given, width])?;
        }
        Ok(Self { y, weight, bias, residual, index, rows, given, inner, width })
    }

    /// The output, which must not lie over any of them.
    fn output(&self, context: &Context) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &[self.rows, self.width])?;
        output.apart_from([&self.y, &self.weight])?;
        output.apart_from(&self.bias)?;
        output.apart_from(&self.residual)?;
        output.apart_from(&self.index)?;
        Ok(output)
    }
}
