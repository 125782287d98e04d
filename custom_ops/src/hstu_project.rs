//! `ai.pagoda.HstuProject`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::Silu;
use pagoda_kernels::cuda::{self, CUstream, Gpu};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{expect_shape, named, positive};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Dim, Shape, Shapes};

/// u, v, q and k of every row, for one element type.
pub struct HstuProject<T> {
    heads: usize,
    silu: Silu,
    /// Whether weight and bias are part of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuProject<T> {
    const NAME: &'static CStr = c"HstuProject";
    const INPUTS: &'static [Input] =
        &[Input::required("x", T::ONNX), Input::required("weight", T::ONNX), Input::optional("bias", T::ONNX)];
    const OUTPUTS: &'static [Output] = &[
        Output::required("u", T::ONNX),
        Output::required("v", T::ONNX),
        Output::required("q", T::ONNX),
        Output::required("k", T::ONNX),
    ];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight), Some(heads)) = (node.input(0)?, node.input(1)?, node.int(c"heads")) else {
            return Ok(vec![]);
        };
        let (Some(rows), Some(Dim::Is(four))) = (x.dims.first(), weight.dims.first()) else {
            return Ok(vec![]);
        };
        // What does not fit is refused when it is run, with the name of the tensor.
        if heads < 1 || four % (4 * heads) != 0 {
            return Ok(vec![]);
        }
        let u = Shape { element: x.element, dims: vec![rows.clone(), Dim::Is(four / 4)] };
        let head = vec![rows.clone(), Dim::Is(heads), Dim::Is(four / 4 / heads)];
        let head = Shape { element: x.element, dims: head };
        Ok(vec![Some(u), Some(head.clone()), Some(head.clone()), Some(head)])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let heads = positive(attributes, "HstuProject", c"heads")?;
        let silu = named(attributes, "HstuProject", c"silu", "all or u", Silu::named)?;
        let constant = attributes.are_constant(&[1, 2])?;
        Ok(Self { heads, silu, constant, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.heads)?;
        let outputs = inputs.outputs(context)?;
        let Inputs { rows, width, heads, head_size, .. } = inputs;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the outputs are apart from all of them and from one another.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The outputs are apart from every input and from one another.
        Ok(unsafe { gpu.project(&call, stream) }?)
    }
}

/// The inputs of a call, whose shapes fit together.
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
    fn read(context: &'a Context, heads: usize) -> Result<Self, OpError> {
        let (x, weight, bias) = (context.input(0)?, context.input(1)?, context.optional_input(2)?);
        let [rows, width] = x.shape()?;
        let [four, _] = weight.shape()?;
        if four == 0 || four % (4 * heads) != 0 {
            let message = format!("weight: {four} rows, expected a multiple of 4 times {heads} heads");
            return Err(OpError::invalid(message));
        }
        expect_shape(&weight, &[four, width])?;
        if let Some(bias) = &bias {
            expect_shape(bias, &[four])?;
        }
        Ok(Self { x, weight, bias, rows, width, heads, head_size: four / 4 / heads })
    }

    /// The outputs, which must not lie over any of them, nor over one another.
    fn outputs(&self, context: &Context) -> Result<[OutputTensor; 4], OpError> {
        let Self { rows, heads, head_size, .. } = *self;
        let by_head = [rows, heads, head_size];
        let outputs = [
            context.output(0, &[rows, heads * head_size])?,
            context.output(1, &by_head)?,
            context.output(2, &by_head)?,
            context.output(3, &by_head)?,
        ];
        for (number, output) in outputs.iter().enumerate() {
            output.apart_from([&self.x, &self.weight])?;
            output.apart_from(&self.bias)?;
            outputs[..number].iter().try_for_each(|other| output.apart_from_output(other))?;
        }
        Ok(outputs)
    }
}
