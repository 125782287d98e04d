//! `ai.pagoda.HstuProject`: the input projection.

use std::marker::PhantomData;

use pagoda_kernels::Silu;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::ort::{
    Dim, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};

/// The projection of every row to u, v, q and k, for one element type.
pub struct HstuProject<T> {
    heads: usize,
    silu: Silu,
    /// Whether weight and bias are initializers of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuProject<T> {
    const INPUTS: &'static [Input] =
        &[Input::required("x", T::ONNX), Input::required("weight", T::ONNX), Input::optional("bias", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[
        Output::required("u", T::ONNX),
        Output::required("v", T::ONNX),
        Output::required("q", T::ONNX),
        Output::required("k", T::ONNX),
    ];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight), Some(heads)) = (node.input(0)?, node.input(1)?, node.int(c"heads")) else {
            return Ok(vec![]);
        };
        let (Some(rows), Some(Dim::Fixed(four))) = (x.dims.first(), weight.dims.first()) else {
            return Ok(vec![]);
        };
        // `compute` rejects a weight of the wrong shape, with the name of the tensor.
        if heads < 1 || four % (4 * heads) != 0 {
            return Ok(vec![]);
        }
        let u = Shape { element: x.element, dims: vec![rows.clone(), Dim::Fixed(four / 4)] };
        let head = vec![rows.clone(), Dim::Fixed(heads), Dim::Fixed(four / 4 / heads)];
        let head = Shape { element: x.element, dims: head };
        Ok(vec![Some(u), Some(head.clone()), Some(head.clone()), Some(head)])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let heads = info.positive_int(c"heads")?;
        let silu = info.choice(c"silu", "all or u", Silu::named)?;
        let constant = info.all_constant(&[1, 2])?;
        Ok(Self { heads, silu, constant, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.heads)?;
        let outputs = inputs.outputs(context)?;
        let Inputs { rows, width, heads, head_size, .. } = inputs;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are
        // disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::HstuProject::<T> {
                rows,
                width,
                heads,
                head_size,
                x: inputs.x.slice(),
                weight: inputs.weight.slice(),
                bias: inputs.bias.as_ref().map(|bias| bias.slice()),
                silu: self.silu,
            };
            Ok(call.run(outputs.each_ref().map(|output| output.slice_mut()), context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuProject<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.heads)?;
        let outputs = inputs.outputs(context)?;
        let call = cuda::Project {
            element: cuda::Type::of::<T>(),
            rows: inputs.rows,
            width: inputs.width,
            part: inputs.heads * inputs.head_size,
            x: inputs.x.address(),
            weight: inputs.weight.address(),
            bias: inputs.bias.as_ref().map(InputTensor::address),
            outputs: outputs.map(|output| output.address()),
            silu: self.silu,
            constant: self.constant,
        };
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The outputs are disjoint from every input and from each other.
        Ok(unsafe { gpu.project(&call, stream) }?)
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    rows: usize,
    width: usize,
    heads: usize,
    head_size: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext, heads: usize) -> Result<Self, OpError> {
        let (x, weight, bias) = (context.input(0)?, context.input(1)?, context.optional_input(2)?);
        let [rows, width] = x.shape()?;
        let [four, _] = weight.shape()?;
        if four == 0 || four % (4 * heads) != 0 {
            let message = format!("weight: {four} rows, expected a multiple of 4 times {heads} heads");
            return Err(OpError::invalid(message));
        }
        weight.expect_shape(&[four, width])?;
        if let Some(bias) = &bias {
            bias.expect_shape(&[four])?;
        }
        Ok(Self { x, weight, bias, rows, width, heads, head_size: four / 4 / heads })
    }

    /// The outputs, which must be disjoint from every input and from each other.
    fn outputs(&self, context: &KernelContext) -> Result<[OutputTensor; 4], OpError> {
        let Self { rows, heads, head_size, .. } = *self;
        let by_head = [rows, heads, head_size];
        let outputs = [
            context.output(0, &[rows, heads * head_size])?,
            context.output(1, &by_head)?,
            context.output(2, &by_head)?,
            context.output(3, &by_head)?,
        ];
        for (number, output) in outputs.iter().enumerate() {
            output.check_disjoint([&self.x, &self.weight])?;
            output.check_disjoint(&self.bias)?;
            outputs[..number].iter().try_for_each(|other| output.check_disjoint_output(other))?;
        }
        Ok(outputs)
    }
}
