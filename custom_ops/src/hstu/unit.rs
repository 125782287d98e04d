//! `ai.pagoda.HstuUnit`: L2 normalisation.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::hstu::dense::check_epsilon;

use crate::ort::{
    F32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};

/// Every row scaled to length 1, in f32, for one element type of the input.
pub struct HstuUnit<T> {
    epsilon: f32,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuUnit<T> {
    const INPUTS: &'static [Input] = &[Input::required("x", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", F32)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?.map(|x| Shape { element: F32, ..x })])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let epsilon = info.float(c"epsilon")?.unwrap_or(1e-6);
        check_epsilon(epsilon)?;
        Ok(Self { epsilon, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let (x, y) = tensors(context)?;
        let ([rows, width], epsilon) = (x.shape()?, self.epsilon);
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from the input.
        unsafe { Ok(pagoda_kernels::HstuUnit::<T> { rows, width, x: x.slice(), epsilon }.run(y.slice_mut(), context)?) }
    }
}

impl<T: OnnxElement> Launch for HstuUnit<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let (x, y) = tensors(context)?;
        let ([rows, width], element, epsilon) = (x.shape()?, cuda::Type::of::<T>(), self.epsilon);
        let call = cuda::Unit { element, rows, width, x: x.address(), y: y.address(), epsilon };
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from the input.
        Ok(unsafe { gpu.unit(&call, stream) }?)
    }
}

/// The input, and the output, which must be disjoint from it.
fn tensors(context: &KernelContext) -> Result<(InputTensor<'_>, OutputTensor), OpError> {
    let x = context.input(0)?;
    x.shape::<2>()?;
    let y = context.output(0, &x.dims)?;
    y.check_disjoint([&x])?;
    Ok((x, y))
}
