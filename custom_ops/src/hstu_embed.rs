//! `ai.pagoda.HstuEmbed`.

use std::ffi::CStr;
use std::marker::PhantomData;

use ort_sys::ONNXTensorElementDataType as OnnxType;
use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::embed::{LEARNED, TABLES, check_scale};
use pagoda_kernels::{bf16, f16};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{I64, expect_len};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

const F32: OnnxType = f32::ONNX;
/// Where the tables of keys begin: those of what is learned of positions and times stand in front.
const FIRST: usize = 2 * LEARNED;

/// Rows out of embedding tables, added up, for one element type of the output.
pub struct HstuEmbed<T> {
    scale: f32,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuEmbed<T> {
    const NAME: &'static CStr = c"HstuEmbed";
    const INPUTS: &'static [Input] = &[
        Input::optional("positions_table", F32),
        Input::optional("positions", I64),
        Input::optional("times_table", F32),
        Input::optional("times", I64),
        Input::required("table_0", F32),
        Input::required("keys_0", I64),
        Input::optional("table_1", F32),
        Input::optional("keys_1", I64),
        Input::optional("table_2", F32),
        Input::optional("keys_2", I64),
        Input::optional("table_3", F32),
        Input::optional("keys_3", I64),
        Input::optional("table_4", F32),
        Input::optional("keys_4", I64),
        Input::optional("table_5", F32),
        Input::optional("keys_5", I64),
        Input::optional("table_6", F32),
        Input::optional("keys_6", I64),
        Input::optional("table_7", F32),
        Input::optional("keys_7", I64),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("y", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(table), Some(keys)) = (node.input(FIRST)?, node.input(FIRST + 1)?) else { return Ok(vec![]) };
        let to = node.int(c"to").unwrap_or(F32 as i64);
        let element = [F32, f16::ONNX, bf16::ONNX].into_iter().find(|element| *element as i64 == to);
        let ([_, width], [rows], Some(element)) = (&table.dims[..], &keys.dims[..], element) else { return Ok(vec![]) };
        Ok(vec![Some(Shape { element, dims: vec![rows.clone(), width.clone()] })])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let scale = attributes.float(c"scale")?.unwrap_or(1.0);
        check_scale(scale)?;
        let to = attributes.int(c"to")?.unwrap_or(F32 as i64);
        if to != T::ONNX as i64 {
            return Err(OpError::invalid(format!(
                "HstuEmbed: the attribute to is {to}, expected the type of the output: 1, 10 or 16 for f32, f16 or bf16"
            )));
        }
        for (pair, inputs) in Self::INPUTS.chunks_exact(2).enumerate() {
            let [table, index] = [attributes.has_input(2 * pair)?, attributes.has_input(2 * pair + 1)?];
            if table != index {
                return Err(OpError::invalid(format!("HstuEmbed: {}", together(inputs))));
            }
        }
        Ok(Self { scale, element: PhantomData })
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let tensors = Tensors::read(context)?;
        // SAFETY: the CPU's tensors are in host memory, the element types are those of `INPUTS` and `OUTPUTS`, nothing
        // writes to an input of a running node, and the output is apart from all of them.
        unsafe {
            let tables: Vec<_> = tensors.tables.iter().map(|pair| pair.on_host()).collect();
            let learned: Vec<_> = tensors.learned.iter().map(|pair| pair.on_host()).collect();
            let call = pagoda_kernels::HstuEmbed {
                rows: tensors.rows,
                width: tensors.width,
                tables: &tables,
                scale: self.scale,
                learned: &learned,
            };
            Ok(call.run::<T>(tensors.y.slice_mut(), context)?)
        }
    }
}

impl<T: OnnxElement> Launch for HstuEmbed<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let tensors = Tensors::read(context)?;
        let tables: Vec<_> = tensors.tables.iter().map(Pair::on_device).collect();
        let learned: Vec<_> = tensors.learned.iter().map(Pair::on_device).collect();
        let call = cuda::Embed {
            element: cuda::Type::of::<T>(),
            rows: tensors.rows,
            width: tensors.width,
            tables: &tables,
            scale: self.scale,
            learned: &learned,
            y: tensors.y.address(),
        };
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done. The output is apart from every input.
        Ok(unsafe { gpu.embed(&call, stream) }?)
    }
}

/// The tensors of a call, whose shapes fit together.
struct Tensors<'a> {
    rows: usize,
    width: usize,
    tables: Vec<Pair<'a>>,
    learned: Vec<Pair<'a>>,
    y: OutputTensor,
}

/// A table, and which row of it each row takes.
struct Pair<'a> {
    table: InputTensor<'a>,
    index: InputTensor<'a>,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let [_, width] = context.input(FIRST)?.shape()?;
        let [rows] = context.input(FIRST + 1)?.shape()?;
        let pairs = |first: usize, most: usize, least: usize| {
            let read = |number| Pair::read(context, first + 2 * number, rows, width, least).transpose();
            (0..most).filter_map(read).collect::<Result<Vec<_>, _>>()
        };
        // Beside the last row, which is for no key, there is the one for keys beyond the table.
        let (tables, learned) = (pairs(FIRST, TABLES, 2)?, pairs(0, LEARNED, 1)?);
        let y = context.output(0, &[rows, width])?;
        y.apart_from(tables.iter().chain(&learned).flat_map(|pair| [&pair.table, &pair.index]))?;
        Ok(Self { rows, width, tables, learned, y })
    }
}

impl<'a> Pair<'a> {
    /// Inputs `first` and the one behind it, if they are there.
    fn read(
        context: &'a Context,
        first: usize,
        rows: usize,
        width: usize,
        least: usize,
    ) -> Result<Option<Self>, OpError> {
        let (table, index) = match (context.optional_input(first)?, context.optional_input(first + 1)?) {
            (None, None) => return Ok(None),
            (Some(table), Some(index)) => (table, index),
            _ => {
                return Err(OpError::invalid(together(&context.inputs[first..first + 2])));
            }
        };
        let [found, elements] = table.shape()?;
        if elements != width || width == 0 || found < least {
            let message = format!(
                "{}: shape {:?}, expected {least} or more rows of {width}, as table_0 has, and that not 0",
                table.name, table.dims
            );
            return Err(OpError::invalid(message));
        }
        expect_len(&index, rows, "one a row")?;
        Ok(Some(Self { table, index }))
    }

    /// For the kernels of the CPU.
    ///
    /// # Safety
    /// The tensors are in host memory, and nothing writes to them while the slices live.
    unsafe fn on_host(&self) -> pagoda_kernels::Lookup<'a> {
        // SAFETY: the caller's; the elements are those of `INPUTS`.
        unsafe { pagoda_kernels::Lookup { table: self.table.slice(), index: self.index.slice() } }
    }

    /// For the kernels of the GPU.
    fn on_device(&self) -> cuda::Lookup {
        let (table, rows, index) = (self.table.address(), self.table.dims[0], self.index.address());
        cuda::Lookup { table, rows, index }
    }
}

/// What is wrong where only one of a table and its index is given.
fn together(pair: &[Input]) -> String {
    format!("{} and {} go together: give both or none", pair[0].name, pair[1].name)
}
