//! `ai.pagoda.HstuUnit`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::dense::check_epsilon;

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Rows of length 1 in f32, for one element type of what they are made of.
pub struct HstuUnit<T> {
    epsilon: f32,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuUnit<T> {
    const NAME: &'static CStr = c"HstuUnit";
    const INPUTS: &'static [Input] = &[Input::required("x", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", f32::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?.map(|x| Shape { element: f32::ONNX, ..x })])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let epsilon = attributes.float(c"epsilon")?.unwrap_or(1e-6);
        check_epsilon(epsilon)?;
        Ok(Self { epsilon, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let (x, y) = tensors(context)?;
        let ([rows, width], epsilon) = (x.shape()?, self.epsilon);
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from it.
        unsafe { Ok(pagoda_kernels::HstuUnit::<T> { rows, width, x: x.slice(), epsilon }.run(y.slice_mut(), context)?) }
    }
}

impl<T: OnnxElement> Launch for HstuUnit<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let (x, y) = tensors(context)?;
        let ([rows, width], element, epsilon) = (x.shape()?, cuda::Type::of::<T>(), self.epsilon);
        let call = cuda::Unit { element, rows, width, x: x.address(), y: y.address(), epsilon };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from the input.
        Ok(unsafe { gpu.unit(&call, stream) }?)
    }
}

/// The input, and the output, which must not lie over it.
fn tensors(context: &Context) -> Result<(InputTensor<'_>, OutputTensor), OpError> {
    let x = context.input(0)?;
    x.shape::<2>()?;
    let y = context.output(0, &x.dims)?;
    y.apart_from([&x])?;
    Ok((x, y))
}
