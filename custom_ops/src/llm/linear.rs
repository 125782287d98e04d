//! `ai.pagoda.Linear`: a product with the nodes of a decoder that stand around it.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::{GluActivation, RmsNorm};

use crate::ort::{
    Dim, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};

/// The places of the inputs that a graph may omit.
const BIAS: usize = 2;
const RESIDUAL: usize = 3;
const NORM: usize = 4;

/// The product of rows with a matrix, for one element type.
pub struct Linear<T> {
    attributes: Attributes,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for Linear<T> {
    const INPUTS: &'static [Input] = &[
        Input::required("x", T::ONNX),
        Input::required("weight", T::ONNX),
        Input::optional("bias", T::ONNX),
        Input::optional("residual", T::ONNX),
        Input::optional("norm", T::ONNX),
    ];
    const OUTPUTS: &'static [Output] =
        &[Output::required("y", T::ONNX), Output::optional("y2", T::ONNX), Output::optional("y3", T::ONNX)];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(x), Some(weight)) = (node.input(0)?, node.input(1)?) else { return Ok(vec![]) };
        let ([rows, _], [columns, _]) = (&x.dims[..], &weight.dims[..]) else { return Ok(vec![]) };
        let shape = |width| Some(Shape { element: x.element, dims: vec![rows.clone(), width] });
        // Wrong attributes are the kernel's to reject, and a wrong number of columns the run's.
        let cut = [c"width2", c"width3"].map(|name| node.int(name).unwrap_or(0));
        let gated = node.string(c"activation").is_some_and(|name| name != NO_ACTIVATION);
        Ok(match columns {
            Dim::Fixed(columns) if gated => vec![shape(Dim::Fixed(columns / 2))],
            Dim::Fixed(columns) if cut.iter().all(|width| (0..=*columns).contains(width)) => {
                let [second, third] = cut;
                vec![
                    shape(Dim::Fixed((columns - second - third).max(0))),
                    shape(Dim::Fixed(second)),
                    shape(Dim::Fixed(third)),
                ]
            }
            // Part of a symbol has no name.
            Dim::Symbolic(_) if !gated && cut == [0, 0] => vec![shape(columns.clone())],
            _ => vec![],
        })
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        Ok(Self { attributes: Attributes::read(info)?, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, cut, .. } = self.attributes;
        let tensors = Tensors::read(context, &self.attributes)?;
        let Tensors { x, weight, bias, residual, norm, outputs, rows, inner, columns } = &tensors;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The outputs are disjoint from every input and from each other.
        unsafe {
            let call = pagoda_kernels::Linear::<T> {
                rows: *rows,
                inner: *inner,
                columns: *columns,
                x: x.slice(),
                weight: weight.slice(),
                bias: bias.as_ref().map(|bias| bias.slice()),
                residual: residual.as_ref().map(|residual| residual.slice()),
                norm: norm.as_ref().map(|norm| RmsNorm { weight: norm.slice(), epsilon }),
                activation,
                cut,
            };
            let empty = || -> &mut [T] { &mut [] };
            let [y, y2, y3] = outputs.each_ref().map(|y| y.as_ref().map_or_else(empty, |(y, _)| y.slice_mut()));
            Ok(call.run([y, y2, y3], context)?)
        }
    }
}

impl<T: OnnxElement> Launch for Linear<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let Attributes { activation, epsilon, constant, .. } = self.attributes;
        let Tensors { x, weight, bias, residual, norm, outputs, rows, inner, columns } =
            Tensors::read(context, &self.attributes)?;
        let call = cuda::Projection {
            element: cuda::Type::of::<T>(),
            rows,
            inner,
            width: columns,
            x: x.address(),
            weight: weight.address(),
            bias: bias.map(|bias| bias.address()),
            residual: residual.map(|residual| residual.address()),
            norm: norm.map(|norm| (norm.address(), epsilon)),
            gate: activation,
            outputs: outputs.each_ref().map(|y| y.as_ref().map_or((0, 0), |(y, width)| (y.address(), *width))),
            constant,
        };
        let scratch = context.needed_scratch("Linear", call.scratch_bytes(gpu))?;
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call, as the scratch memory does. Outputs are disjoint from inputs and from each other.
        Ok(unsafe { gpu.projection(&call, scratch.map_or(0, |scratch| scratch.address()), stream) }?)
    }
}

/// The activation of a node without gates.
const NO_ACTIVATION: &str = "none";

/// The attributes of a node.
struct Attributes {
    activation: Option<GluActivation>,
    epsilon: f32,
    /// The columns of `y2` and of `y3`.
    cut: [usize; 2],
    /// Whether nothing writes weight and bias while the graph runs.
    constant: bool,
}

impl Attributes {
    fn read(info: &KernelInfo) -> Result<Self, OpError> {
        let activation = match info.string(c"activation")?.as_deref() {
            None | Some(NO_ACTIVATION) => None,
            Some(name) => Some(GluActivation::named(name).ok_or_else(|| {
                let message = format!("activation: this attribute is {name:?}, expected none, silu, gelu or gelu_tanh");
                OpError::invalid(message)
            })?),
        };
        let epsilon = info.float(c"epsilon")?.unwrap_or(1e-5);
        if !epsilon.is_finite() || epsilon < 0.0 {
            let message = format!("epsilon: this attribute is {epsilon}, expected a finite number of at least 0");
            return Err(OpError::invalid(message));
        }
        let mut cut = [0; 2];
        for (place, (width, attribute, output)) in
            [(c"width2", "width2", "y2"), (c"width3", "width3", "y3")].into_iter().enumerate()
        {
            let found = info.int(width)?.unwrap_or(0);
            cut[place] = usize::try_from(found).ok().filter(|width| *width <= i32::MAX as usize).ok_or_else(|| {
                let most = i32::MAX;
                let message =
                    format!("{attribute}: this attribute is {found}, expected a number of columns from 0 to {most}");
                OpError::invalid(message)
            })?;
            if found > 0 && activation.is_some() {
                let message = format!("{attribute}: this attribute is {found}, expected 0 beside an activation");
                return Err(OpError::invalid(message));
            }
            if found > 0 && info.has_input(RESIDUAL)? {
                let message = format!("{attribute}: this attribute is {found}, expected 0 beside the input residual");
                return Err(OpError::invalid(message));
            }
            if (found > 0) != info.has_output(place + 1)? {
                let message =
                    format!("{output}: this output and the attribute {attribute} go together: give both or neither");
                return Err(OpError::invalid(message));
            }
        }
        Ok(Self { activation, epsilon, cut, constant: info.all_constant(&[1, BIAS])? })
    }
}

/// The tensors of a call, with consistent shapes. Outputs are disjoint from every input and from each other.
struct Tensors<'a> {
    x: InputTensor<'a>,
    weight: InputTensor<'a>,
    bias: Option<InputTensor<'a>>,
    residual: Option<InputTensor<'a>>,
    norm: Option<InputTensor<'a>>,
    /// With their widths.
    outputs: [Option<(OutputTensor, usize)>; 3],
    rows: usize,
    /// K.
    inner: usize,
    /// N, the rows of the weight.
    columns: usize,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a KernelContext, attributes: &Attributes) -> Result<Self, OpError> {
        let (x, weight) = (context.input(0)?, context.input(1)?);
        let optional = |index| context.optional_input(index);
        let (bias, residual, norm) = (optional(BIAS)?, optional(RESIDUAL)?, optional(NORM)?);
        let ([rows, inner], [columns, _]) = (x.shape()?, weight.shape()?);
        weight.expect_shape(&[columns, inner])?;
        let width = match attributes.activation {
            Some(_) if columns % 2 != 0 => {
                let message = format!(
                    "{}: shape {:?}, expected an even number of rows: first those of the gates, then as many ups",
                    weight.name, weight.dims
                );
                return Err(OpError::invalid(message));
            }
            Some(_) => columns / 2,
            None => columns,
        };
        if let Some(bias) = &bias {
            bias.expect_shape(&[columns])?;
        }
        if let Some(residual) = &residual {
            residual.expect_shape(&[rows, width])?;
        }
        if let Some(norm) = &norm {
            norm.expect_shape(&[inner])?;
        }
        let [second, third] = attributes.cut;
        let Some(first) = width.checked_sub(second).and_then(|width| width.checked_sub(third)) else {
            let message = format!(
                "{}: shape {:?}, expected at least as many rows as width2 and width3 together, {second} and {third}",
                weight.name, weight.dims
            );
            return Err(OpError::invalid(message));
        };
        let mut outputs = [Some((context.output(0, &[rows, first])?, first)), None, None];
        for (index, width) in [(1, second), (2, third)] {
            if width > 0 {
                outputs[index] = Some((context.output(index, &[rows, width])?, width));
            }
        }
        for (index, output) in outputs.iter().enumerate() {
            let Some((output, _)) = output else { continue };
            output.check_disjoint([&x, &weight])?;
            output.check_disjoint(bias.iter().chain(&residual).chain(&norm))?;
            for (other, _) in outputs[..index].iter().flatten() {
                output.check_disjoint_output(other)?;
            }
        }
        Ok(Self { x, weight, bias, residual, norm, outputs, rows, inner, columns })
    }
}
