//! `ai.pagoda.HstuLinear`: a fully connected layer in f32.

use pagoda_kernels::Activation;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::ort::{
    F32, Input, InputTensor, KernelContext, KernelInfo, Launch, OpError, Operator, Output, OutputTensor, Shape,
    ShapeInferContext,
};

/// A linear layer with an activation, in f32.
pub struct HstuLinear {
    activation: Activation,
    tf32: bool,
    /// Whether weight and bias are initializers of the model.
    constant: bool,
}

impl Operator for HstuLinear {
    const INPUTS: &'static [Input] =
        &[Input::required("x", F32), Input::required("weight", F32), Input::optional("bias", F32)];
    const OUTPUTS: &'static [Output] = &[Output::required("y", F32)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        match (&x.dims[..], &weight.dims[..]) {
            ([rows, _], [width, _]) => Ok(vec![Some(Shape { element: F32, dims: vec![rows.clone(), width.clone()] })]),
            _ => Ok(vec![]),
        }
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let known = Activation::ALL.map(|(name, _)| name).join(", ");
        let activation = info.choice(c"activation", &format!("one of {known}"), Activation::named)?;
        let tf32 = info.flag(c"tf32")?;
        Ok(Self { activation, tf32, constant: info.all_constant(&[1, 2])? })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let y = inputs.output(context)?;
        let Inputs { rows, inner, width, .. } = inputs;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from every input.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from every input.
        Ok(unsafe { gpu.linear(&call, stream) }?)
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    rows: usize,
    inner: usize,
    width: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let (x, weight, bias) = (context.input(0)?, context.input(1)?, context.optional_input(2)?);
        let ([rows, inner], [width, _]) = (x.shape()?, weight.shape()?);
        weight.expect_shape(&[width, inner])?;
        if let Some(bias) = &bias {
            bias.expect_shape(&[width])?;
        }
        Ok(Self { x, weight, bias, rows, inner, width })
    }

    /// The output, which must be disjoint from every input.
    fn output(&self, context: &KernelContext) -> Result<OutputTensor, OpError> {
        let y = context.output(0, &[self.rows, self.width])?;
        y.check_disjoint([&self.x, &self.weight])?;
        y.check_disjoint(&self.bias)?;
        Ok(y)
    }
}
