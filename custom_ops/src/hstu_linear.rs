//! `ai.pagoda.HstuLinear`.

use std::ffi::CStr;

use pagoda_kernels::Activation;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{expect_shape, flag, named};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// A layer of an MLP in f32.
pub struct HstuLinear {
    activation: Activation,
    tf32: bool,
    /// Whether weight and bias are part of the model.
    constant: bool,
}

impl Operator for HstuLinear {
    const NAME: &'static CStr = c"HstuLinear";
    const INPUTS: &'static [Input] =
        &[Input::required("x", f32::ONNX), Input::required("weight", f32::ONNX), Input::optional("bias", f32::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", f32::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        match (&x.dims[..], &weight.dims[..]) {
            ([rows, _], [width, _]) => {
                Ok(vec![Some(Shape { element: f32::ONNX, dims: vec![rows.clone(), width.clone()] })])
            }
            _ => Ok(vec![]),
        }
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let known = Activation::ALL.map(|(name, _)| name).join(", ");
        let activation = named(attributes, "HstuLinear", c"activation", &format!("one of {known}"), Activation::named)?;
        let tf32 = flag(attributes, "HstuLinear", c"tf32")?;
        Ok(Self { activation, tf32, constant: attributes.are_constant(&[1, 2])? })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let y = inputs.output(context)?;
        let Inputs { rows, inner, width, .. } = inputs;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from all of them.
        unsafe {
            let call = pagoda_kernels::HstuLinear {
                rows,
                inner,
                width,
                x: inputs.x.slice(),
                weight: inputs.weight.slice(),
                bias: inputs.bias.as_ref().map(|bias| bias.slice()),
                activation: self.activation,
            };
            Ok(call.run(y.slice_mut(), context)?)
        }
    }
}

impl Launch for HstuLinear {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let call = cuda::Linear {
            rows: inputs.rows,
            inner: inputs.inner,
            width: inputs.width,
            x: inputs.x.address(),
            weight: inputs.weight.address(),
            bias: inputs.bias.as_ref().map(InputTensor::address),
            y: inputs.output(context)?.address(),
            activation: self.activation,
            tf32: self.tf32,
            constant: self.constant,
        };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from every input.
        Ok(unsafe { gpu.linear(&call, stream) }?)
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    rows: usize,
    inner: usize,
    width: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let (x, weight, bias) = (context.input(0)?, context.input(1)?, context.optional_input(2)?);
        let ([rows, inner], [width, _]) = (x.shape()?, weight.shape()?);
        expect_shape(&weight, &[width, inner])?;
        if let Some(bias) = &bias {
            expect_shape(bias, &[width])?;
        }
        Ok(Self { x, weight, bias, rows, inner, width })
    }

    /// The output, which must not lie over any of them.
    fn output(&self, context: &Context) -> Result<OutputTensor, OpError> {
        let y = context.output(0, &[self.rows, self.width])?;
        y.apart_from([&self.x, &self.weight])?;
        y.apart_from(&self.bias)?;
        Ok(y)
    }
}
