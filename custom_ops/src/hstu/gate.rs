//! `ai.pagoda.HstuGate`: the normalised attention output times the gate u.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::hstu::dense::check_epsilon;
use pagoda_kernels::{GateNorm, Taken};

use crate::ort::{
    Dim, I64, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output,
    OutputTensor, Shape, ShapeInferContext,
};

/// The norm of the attention output, multiplied by u, for one element type.
pub struct HstuGate<T> {
    epsilon: f32,
    norm: GateNorm,
    concat: bool,
    /// Whether weight and bias are initializers of the model.
    constant: bool,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuGate<T> {
    const INPUTS: &'static [Input] = &[
        Input::required("attended", T::ONNX),
        Input::required("u", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::required("bias", T::ONNX),
        Input::optional("index", I64),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let Some(mut u) = node.input(1)? else { return Ok(vec![]) };
        if node.input_count()? > 4 {
            // The index determines the number of output rows.
            let index = node.input(4)?;
            let (Some([count]), Some(rows)) = (index.as_ref().map(|index| &index.dims[..]), u.dims.first_mut()) else {
                return Ok(vec![]);
            };
            *rows = count.clone();
        }
        match (node.int(c"concat").unwrap_or(0), &u.dims[..]) {
            (1, [rows, Dim::Fixed(width)]) => {
                Ok(vec![Some(Shape { element: u.element, dims: vec![rows.clone(), Dim::Fixed(3 * width)] })])
            }
            (0, [_, _]) => Ok(vec![Some(u)]),
            _ => Ok(vec![]),
        }
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let epsilon = info.float(c"epsilon")?.unwrap_or(1e-5);
        check_epsilon(epsilon)?;
        let norm = info.choice(c"norm", "layer or group", GateNorm::named)?;
        let concat = info.flag(c"concat")?;
        let constant = info.all_constant(&[2, 3])?;
        Ok(Self { epsilon, norm, concat, constant, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.norm)?;
        let output = inputs.output(context, self.concat)?;
        let [given, heads, head_size] = inputs.attended.shape()?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from every input.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from every input.
        Ok(unsafe { gpu.gate(&call, stream) }?)
    }
}

/// The inputs of a call, with consistent shapes.
struct Inputs<'a> {
    attended: InputTensor<'a>,
    u: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: InputTensor<'a>,
    index: Option<InputTensor<'a>>,
    /// The number of rows of the output.
    rows: usize,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a KernelContext, norm: GateNorm) -> Result<Self, OpError> {
        let (attended, index) = (context.input(0)?, context.optional_input(4)?);
        let [given, heads, head_size] = attended.shape()?;
        let rows = match &index {
            Some(index) => index.shape::<1>()?[0],
            None => given,
        };
        let (u, weight, bias) = (context.input(1)?, context.input(2)?, context.input(3)?);
        let inputs = Self { attended, u, weight, bias, index, rows };
        inputs.u.expect_shape(&[given, heads * head_size])?;
        let learned = if norm == GateNorm::Group { heads } else { heads * head_size };
        inputs.weight.expect_shape(&[learned])?;
        inputs.bias.expect_shape(&[learned])?;
        Ok(inputs)
    }

    /// The output, which must be disjoint from every input.
    fn output(&self, context: &KernelContext, concat: bool) -> Result<OutputTensor, OpError> {
        let [_, width] = self.u.shape()?;
        let output = context.output(0, &[self.rows, if concat { 3 * width } else { width }])?;
        output.check_disjoint([&self.attended, &self.u, &self.weight, &self.bias])?;
        output.check_disjoint(&self.index)?;
        Ok(output)
    }
}
