//! `ai.pagoda.HstuNorm`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::dense::check_epsilon;

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::expect_shape;
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Layer norm of every row, for one element type.
pub struct HstuNorm<T> {
    epsilon: f32,
    /// Whether weight and bias are part of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuNorm<T> {
    const NAME: &'static CStr = c"HstuNorm";
    const INPUTS: &'static [Input] =
        &[Input::required("x", T::ONNX), Input::required("weight", T::ONNX), Input::required("bias", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let epsilon = attributes.float(c"epsilon")?.unwrap_or(1e-5);
        check_epsilon(epsilon)?;
        let constant = attributes.are_constant(&[1, 2])?;
        Ok(Self { epsilon, constant, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let output = inputs.output(context)?;
        let [rows, width] = inputs.x.shape()?;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from all of them.
        unsafe {
            let call = pagoda_kernels::HstuNorm::<T> {
                rows,
                width,
                x: inputs.x.slice(),
                weight: inputs.weight.slice(),
                bias: inputs.bias.slice(),
                epsilon: self.epsilon,
            };
            Ok(call.run(output.slice_mut(), context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuNorm<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let [rows, width] = inputs.x.shape()?;
        let call = cuda::Norm {
            element: cuda::Type::of::<T>(),
            rows,
            width,
            x: inputs.x.address(),
            weight: inputs.weight.address(),
            bias: inputs.bias.address(),
            y: inputs.output(context)?.address(),
            epsilon: self.epsilon,
            constant: self.constant,
        };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from every input.
        Ok(unsafe { gpu.norm(&call, stream) }?)
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: InputTensor<'a>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let inputs = Self { x: context.input(0)?, weight: context.input(1)?, bias: context.input(2)? };
        let [_, width] = inputs.x.shape()?;
        expect_shape(&inputs.weight, &[width])?;
        expect_shape(&inputs.bias, &[width])?;
        Ok(inputs)
    }

    /// The output, which must not lie over any of them.
    fn output(&self, context: &Context) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &self.x.dims)?;
        output.apart_from([&self.x, &self.weight, &self.bias])?;
        Ok(output)
    }
}
