//! `ai.pagoda.HstuNorm`: layer norm.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::hstu::dense::check_epsilon;

use crate::ort::{
    Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor, Shape,
    ShapeInferContext,
};

/// The layer norm of every row, for one element type.
pub struct HstuNorm<T> {
    epsilon: f32,
    /// Whether weight and bias are initializers of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuNorm<T> {
    const INPUTS: &'static [Input] =
        &[Input::required("x", T::ONNX), Input::required("weight", T::ONNX), Input::required("bias", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let epsilon = info.float(c"epsilon")?.unwrap_or(1e-5);
        check_epsilon(epsilon)?;
        let constant = info.all_constant(&[1, 2])?;
        Ok(Self { epsilon, constant, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let output = inputs.output(context)?;
        let [rows, width] = inputs.x.shape()?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from every input.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from every input.
        Ok(unsafe { gpu.norm(&call, stream) }?)
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: InputTensor<'a>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let inputs = Self { x: context.input(0)?, weight: context.input(1)?, bias: context.input(2)? };
        let [_, width] = inputs.x.shape()?;
        inputs.weight.expect_shape(&[width])?;
        inputs.bias.expect_shape(&[width])?;
        Ok(inputs)
    }

    /// The output, which must be disjoint from every input.
    fn output(&self, context: &KernelContext) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &self.x.dims)?;
        output.check_disjoint([&self.x, &self.weight, &self.bias])?;
        Ok(output)
    }
}
