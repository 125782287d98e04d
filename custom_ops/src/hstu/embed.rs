//! `ai.pagoda.HstuEmbed`: the sum of rows of embedding tables in the graph.

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::hstu::embed::{LEARNED, TABLES, check_scale};
use pagoda_kernels::{bf16, f16};

use crate::ort::{
    F32, I64, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output,
    OutputTensor, Shape, ShapeInferContext,
};

/// The input of the first table of keys. The learned tables of positions and times precede it.
const FIRST: usize = 2 * LEARNED;

/// The sum of one row of each table, for one element type of the output.
pub struct HstuEmbed<T> {
    scale: f32,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuEmbed<T> {
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

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        let (Some(table), Some(keys)) = (node.input(FIRST)?, node.input(FIRST + 1)?) else { return Ok(vec![]) };
        let to = node.int(c"to").unwrap_or(F32 as i64);
        let element = [F32, f16::ONNX, bf16::ONNX].into_iter().find(|element| *element as i64 == to);
        let ([_, width], [rows], Some(element)) = (&table.dims[..], &keys.dims[..], element) else { return Ok(vec![]) };
        Ok(vec![Some(Shape { element, dims: vec![rows.clone(), width.clone()] })])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let scale = info.float(c"scale")?.unwrap_or(1.0);
        check_scale(scale)?;
        let to = info.int(c"to")?.unwrap_or(F32 as i64);
        if to != T::ONNX as i64 {
            return Err(OpError::invalid(format!(
                "HstuEmbed: the attribute to is {to}, expected the type of the output: 1, 10 or 16 for f32, f16 or bf16"
            )));
        }
        for (pair, inputs) in Self::INPUTS.chunks_exact(2).enumerate() {
            let [table, index] = [info.has_input(2 * pair)?, info.has_input(2 * pair + 1)?];
            if table != index {
                return Err(OpError::invalid(format!("HstuEmbed: {}", together(inputs[0].name, inputs[1].name))));
            }
        }
        Ok(Self { scale, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let tensors = Tensors::read(context)?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS` and `OUTPUTS`. Nothing
        // writes to an input of a running node. The output is
        // disjoint from every input.
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
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
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
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. The output is disjoint from every input.
        Ok(unsafe { gpu.embed(&call, stream) }?)
    }
}

/// The tensors of a call, with consistent shapes. The output is disjoint from every input.
struct Tensors<'a> {
    rows: usize,
    width: usize,
    tables: Vec<Pair<'a>>,
    learned: Vec<Pair<'a>>,
    y: OutputTensor,
}

/// A table, and for each row of the output the row of the table.
struct Pair<'a> {
    table: InputTensor<'a>,
    index: InputTensor<'a>,
}

impl<'a> Tensors<'a> {
    fn read(context: &'a KernelContext) -> Result<Self, OpError> {
        let [_, width] = context.input(FIRST)?.shape()?;
        let [rows] = context.input(FIRST + 1)?.shape()?;
        let pairs = |first: usize, most: usize, least: usize| {
            let read = |number| Pair::read(context, first + 2 * number, rows, width, least).transpose();
            (0..most).filter_map(read).collect::<Result<Vec<_>, _>>()
        };
        // A table of keys has at least two rows: the last is for keys below 0, the one before it for keys beyond the table.
        let (tables, learned) = (pairs(FIRST, TABLES, 2)?, pairs(0, LEARNED, 1)?);
        let y = context.output(0, &[rows, width])?;
        y.check_disjoint(tables.iter().chain(&learned).flat_map(|pair| [&pair.table, &pair.index]))?;
        Ok(Self { rows, width, tables, learned, y })
    }
}

impl<'a> Pair<'a> {
    /// Inputs `first` and `first + 1`, or `None` where the graph omits both.
    fn read(
        context: &'a KernelContext,
        first: usize,
        rows: usize,
        width: usize,
        least: usize,
    ) -> Result<Option<Self>, OpError> {
        let (table, index) = match (context.optional_input(first)?, context.optional_input(first + 1)?) {
            (None, None) => return Ok(None),
            (Some(table), Some(index)) => (table, index),
            _ => {
                return Err(OpError::invalid(together(context.input_name(first), context.input_name(first + 1))));
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
        index.expect_len(rows, "one a row")?;
        Ok(Some(Self { table, index }))
    }

    /// The argument of the CPU kernels.
    ///
    /// # Safety
    /// The tensors are in host memory, and nothing writes to them while the slices live.
    unsafe fn on_host(&self) -> pagoda_kernels::Lookup<'a> {
        // SAFETY: by contract; the element types are those of `INPUTS`.
        unsafe { pagoda_kernels::Lookup { table: self.table.slice(), index: self.index.slice() } }
    }

    /// The argument of the CUDA kernels.
    fn on_device(&self) -> cuda::Lookup {
        let (table, rows, index) = (self.table.address(), self.table.dims[0], self.index.address());
        cuda::Lookup { table, rows, index }
    }
}

/// The error message for a table without its index, or an index without its table.
fn together(table: &str, index: &str) -> String {
    format!("{table} and {index} go together: give both or none")
}
