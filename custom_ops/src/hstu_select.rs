//! `ai.pagoda.HstuSelect`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::ends::SELECTED;

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::I64;
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Some of the rows of up to three tensors, for one element type.
pub struct HstuSelect<T> {
    /// How many tensors.
    parts: usize,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuSelect<T> {
    const NAME: &'static CStr = c"HstuSelect";
    const INPUTS: &'static [Input] = &[
        Input::required("index", I64),
        Input::required(SELECTED[0], T::ONNX),
        Input::optional(SELECTED[1], T::ONNX),
        Input::optional(SELECTED[2], T::ONNX),
    ];
    const OUTPUTS: &'static [Output] = &[
        Output::required("a_rows", T::ONNX),
        Output::optional("b_rows", T::ONNX),
        Output::optional("c_rows", T::ONNX),
    ];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let Some(index) = node.input(0)? else { return Ok(vec![]) };
        let selected = |part| {
            let tensor = node.input(1 + part)?;
            Ok(tensor.map(|Shape { element, dims }| Shape { element, dims: [&index.dims[..1], &dims[1..]].concat() }))
        };
        (0..SELECTED.len()).map(selected).collect()
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let mut parts = 0;
        for (part, name) in SELECTED.into_iter().enumerate() {
            let (given, wanted) = (attributes.has_input(1 + part)?, attributes.has_output(part)?);
            if given != wanted || (given && part > parts) {
                return Err(OpError::invalid(format!(
                    "HstuSelect: the input {name} and the output {name}_rows go together, behind those before them: give \
                     both or none"
                )));
            }
            parts += usize::from(given);
        }
        Ok(Self { parts, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let tensors = Tensors::read(context, self.parts)?;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the outputs are apart from all of them and from one another.
        unsafe {
            let parts: Vec<(usize, &[T])> = tensors.parts.iter().map(|part| (part.width, part.from.slice())).collect();
            let call = pagoda_kernels::HstuSelect { rows: tensors.rows, index: tensors.index.slice(), tensors: &parts };
            let mut outputs: Vec<&mut [T]> = tensors.parts.iter().map(|part| part.to.slice_mut()).collect();
            Ok(call.run(&mut outputs, context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuSelect<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let tensors = Tensors::read(context, self.parts)?;
        let selected =
            |part: &Part<'_>| cuda::Selected { width: part.width, from: part.from.address(), to: part.to.address() };
        let parts: Vec<_> = tensors.parts.iter().map(selected).collect();
        let call = cuda::Select {
            element: cuda::Type::of::<T>(),
            rows: tensors.rows,
            index: tensors.index.address(),
            count: tensors.index.dims[0],
            parts: &parts,
        };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The outputs are apart from every input and from one another.
        Ok(unsafe { gpu.select(&call, stream) }?)
    }
}

/// The tensors of a call, whose shapes fit together.
struct Tensors<'a> {
    rows: usize,
    index: InputTensor<'a>,
    parts: Vec<Part<'a>>,
}

/// One of those that rows are selected of, and where they go.
struct Part<'a> {
    /// Elements of a row.
    width: usize,
    from: InputTensor<'a>,
    to: OutputTensor,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a Context, parts: usize) -> Result<Self, OpError> {
        let index = context.input(0)?;
        let [count] = index.shape()?;
        let from = (0..parts).map(|part| context.input(1 + part)).collect::<Result<Vec<_>, _>>()?;
        let rows = from[0].dims.first().copied().unwrap_or(0);
        let other = |tensor: &&InputTensor<'_>| tensor.dims.first() != Some(&rows);
        if let Some(other) = from.iter().find(other) {
            let message = format!("{}: shape {:?}, expected [{rows}, ...] as that of a", other.name, other.dims);
            return Err(OpError::invalid(message));
        }
        let mut to: Vec<OutputTensor> = Vec::new();
        for (part, tensor) in from.iter().enumerate() {
            let output = context.output(part, &[&[count], &tensor.dims[1..]].concat())?;
            output.apart_from(from.iter().chain([&index]))?;
            to.iter().try_for_each(|before| output.apart_from_output(before))?;
            to.push(output);
        }
        let width = |tensor: &InputTensor<'_>| tensor.dims[1..].iter().product();
        let parts = from.into_iter().zip(to).map(|(from, to)| Part { width: width(&from), from, to }).collect();
        Ok(Self { rows, index, parts })
    }
}
