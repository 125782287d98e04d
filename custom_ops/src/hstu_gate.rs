//! `ai.pagoda.HstuGate`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::dense::check_epsilon;
use pagoda_kernels::{GateNorm, Taken};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{I64, expect_shape, flag, named};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Dim, Shape, Shapes};

/// What was attended, normed, times u, for one element type.
pub struct HstuGate<T> {
    epsilon: f32,
    norm: GateNorm,
    concat: bool,
    /// Whether weight and bias are part of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuGate<T> {
    const NAME: &'static CStr = c"HstuGate";
    const INPUTS: &'static [Input] = &[
        Input::required("attended", T::ONNX),
        Input::required("u", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::required("bias", T::ONNX),
        Input::optional("index", I64),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let Some(mut u) = node.input(1)? else { return Ok(vec![]) };
        if node.inputs()? > 4 {
            // Where nothing is known of the index, nothing is known of how many rows come out.
            let index = node.input(4)?;
            let (Some([count]), Some(rows)) = (index.as_ref().map(|index| &index.dims[..]), u.dims.first_mut()) else {
                return Ok(vec![]);
            };
            *rows = count.clone();
        }
        match (node.int(c"concat").unwrap_or(0), &u.dims[..]) {
            (1, [rows, Dim::Is(width)]) => {
                Ok(vec![Some(Shape { element: u.element, dims: vec![rows.clone(), Dim::Is(3 * width)] })])
            }
            (0, [_, _]) => Ok(vec![Some(u)]),
            _ => Ok(vec![]),
        }
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let epsilon = attributes.float(c"epsilon")?.unwrap_or(1e-5);
        check_epsilon(epsilon)?;
        let norm = named(attributes, "HstuGate", c"norm", "layer or group", GateNorm::named)?;
        let concat = flag(attributes, "HstuGate", c"concat")?;
        let constant = attributes.are_constant(&[2, 3])?;
        Ok(Self { epsilon, norm, concat, constant, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.norm)?;
        let output = inputs.output(context, self.concat)?;
        let [given, heads, head_size] = inputs.attended.shape()?;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from all of them.
        unsafe {
            let call = pagoda_kernels::HstuGate::<T> {
                rows: inputs.rows,
                taken: inputs.index.as_ref().map(|index| Taken { of: given, index: index.slice() }),
                heads,
                head_size,
                attended: inputs.attended.slice(),
                u: inputs.u.slice(),
                weight: inputs.weight.slice(),
                bias: inputs.bias.slice(),
                epsilon: self.epsilon,
                norm: self.norm,
                concat: self.concat,
            };
            Ok(call.run(output.slice_mut(), context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuGate<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.norm)?;
        let [given, heads, head_size] = inputs.attended.shape()?;
        let call = cuda::Gate {
            element: cuda::Type::of::<T>(),
            rows: inputs.rows,
            taken: inputs.index.as_ref().map(|index| cuda::Taken { of: given, index: index.address() }),
            heads,
            head_size,
            attended: inputs.attended.address(),
            u: inputs.u.address(),
            weight: inputs.weight.address(),
            bias: inputs.bias.address(),
            y: inputs.output(context, self.concat)?.address(),
            epsilon: self.epsilon,
            norm: self.norm,
            concat: self.concat,
            constant: self.constant,
        };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from every input.
        Ok(unsafe { gpu.gate(&call, stream) }?)
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    attended: InputTensor<'a>,
    u: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: InputTensor<'a>,
    index: Option<InputTensor<'a>>,
    /// Of the output.
    rows: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context, norm: GateNorm) -> Result<Self, OpError> {
        let (attended, index) = (context.input(0)?, context.optional_input(4)?);
        let [given, heads, head_size] = attended.shape()?;
        let rows = match &index {
            Some(index) => index.shape::<1>()?[0],
            None => given,
        };
        let (u, weight, bias) = (context.input(1)?, context.input(2)?, context.input(3)?);
        let inputs = Self { attended, u, weight, bias, index, rows };
        expect_shape(&inputs.u, &[given, heads * head_size])?;
        let learned = if norm == GateNorm::Group { heads } else { heads * head_size };
        expect_shape(&inputs.weight, &[learned])?;
        expect_shape(&inputs.bias, &[learned])?;
        Ok(inputs)
    }

    /// The output, which must not lie over any of them.
    fn output(&self, context: &Context, concat: bool) -> Result<OutputTensor, OpError> {
        let [_, width] = self.u.shape()?;
        let output = context.output(0, &[self.rows, if concat { 3 * width } else { width }])?;
        output.apart_from([&self.attended, &self.u, &self.weight, &self.bias])?;
        output.apart_from(&self.index)?;
        Ok(output)
    }
}
