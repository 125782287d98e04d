//! `ai.pagoda.Glu`: the activation of the gates times the ups.

use std::marker::PhantomData;

use pagoda_kernels::GluActivation;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::ort::{
    Dim, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};

/// The gated linear unit of every row, for one element type.
pub struct Glu<T> {
    activation: GluActivation,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for Glu<T> {
    const INPUTS: &'static [Input] = &[Input::required("x", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let Some(Shape { element, dims }) = node.input(0)? else { return Ok(vec![]) };
        // Half of a symbol has no name, and an odd width is the run's to reject.
        let [rows, Dim::Fixed(width)] = &dims[..] else { return Ok(vec![]) };
        Ok(vec![Some(Shape { element, dims: vec![rows.clone(), Dim::Fixed(width / 2)] })])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let activation = info.choice(c"activation", "silu, gelu or gelu_tanh", GluActivation::named)?;
        Ok(Self { activation, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Tensors { x, y, rows, width } = Tensors::read(context)?;
        let activation = self.activation;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is disjoint from the input.
        unsafe { Ok(pagoda_kernels::Glu::<T> { rows, width, x: x.slice(), activation }.run(y.slice_mut(), context)?) }
    }
}

impl<T: OnnxElement> Launch for Glu<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let Tensors { x, y, rows, width } = Tensors::read(context)?;
        let (element, activation) = (cuda::Type::of::<T>(), self.activation);
        let call = cuda::Glu { element, rows, width, x: x.address(), residual: None, y: y.address(), activation };
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from the input.
        Ok(unsafe { gpu.glu(&call, stream) }?)
    }
}

/// The input, and the output, which must be disjoint from it.
struct Tensors<'a> {
    x: InputTensor<'a>,
    y: OutputTensor,
    rows: usize,
    /// The width of the output.
    width: usize,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let x = context.input(0)?;
        let [rows, both] = x.shape()?;
        if both % 2 != 0 {
            let message = format!(
                "{}: shape {:?}, expected an even number of columns: first those of the gates, then as many ups",
                x.name, x.dims
            );
            return Err(OpError::invalid(message));
        }
        let y = context.output(0, &[rows, both / 2])?;
        y.check_disjoint([&x])?;
        Ok(Self { x, y, rows, width: both / 2 })
    }
}
