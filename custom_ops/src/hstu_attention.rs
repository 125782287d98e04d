//! `ai.pagoda.HstuAttention`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::batch::Rows;
use pagoda_kernels::cuda::{self, CUstream, Gpu, Scratch};

use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{CacheInputs, I32, RowInputs, expect_len};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Attention of each user's new rows over the paged history and the rows themselves, for one element type.
pub struct HstuAttention<T> {
    alpha: f32,
    scaling_seqlen: i64,
    target_group_size: i64,
    max_attn_len: i64,
    element: PhantomData<T>,
}

impl<T: OnnxElement> Operator for HstuAttention<T> {
    const NAME: &'static CStr = c"HstuAttention";
    const INPUTS: &'static [Input] = &[
        Input::required("query", T::ONNX),
        Input::required("key", T::ONNX),
        Input::required("value", T::ONNX),
        Input::required("row_offsets", I32),
        Input::required("num_candidates", I32),
        Input::optional("cached_len", I32),
        Input::optional("page_indptr", I32),
        Input::optional("page_ids", I32),
        Input::optional("kv_pool", T::ONNX),
        Input::optional("num_contextual", I32),
    ];
    const OUTPUTS: &'static [Output] = &[Output::required("output", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?])
    }

    fn new(attributes: &Attributes) -> Result<Self, OpError> {
        let scaling_seqlen = attributes.int(c"scaling_seqlen")?.ok_or_else(|| {
            OpError::invalid("HstuAttention: the attribute scaling_seqlen (an int of at least 1) is missing")
        })?;
        let operator = Self {
            alpha: attributes.float(c"alpha")?.unwrap_or(0.0),
            scaling_seqlen,
            target_group_size: attributes.int(c"target_group_size")?.unwrap_or(1),
            max_attn_len: attributes.int(c"max_attn_len")?.unwrap_or(0),
            element: PhantomData,
        };
        // An empty batch checks the attributes alone, so that a bad one fails when the model is opened.
        operator
            .with_inputs(Rows { row_offsets: &[0], num_candidates: &[], total_rows: 0, heads: 1, head_size: 1 })
            .check()?;
        Ok(operator)
    }

    fn compute(&self, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        // SAFETY: the CPU's tensors are in host memory. The element types are those of `INPUTS`, and nothing writes to an
        // input of a running node: the pool's writer, PagedKvAppend, is another node that ran before or runs after.
        let attention = unsafe {
            pagoda_kernels::HstuAttention {
                query: inputs.query.slice::<T>(),
                key: inputs.key.slice(),
                value: inputs.value.slice(),
                cache: inputs.cache.as_ref().map(|cache| (cache.on_host(), cache.pool.slice())),
                num_contextual: inputs.num_contextual.as_ref().map(|tensor| tensor.slice()),
                ..self.with_inputs(inputs.rows.on_host())
            }
        };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = attention.check()?;
        let output = inputs.output(context)?;
        if attention.query.is_empty() {
            return Ok(());
        }
        // SAFETY: ONNX Runtime gives the output room for these dimensions, and it is apart from every input; f32, f16
        // and bf16 have no invalid bit patterns, and the kernel writes every element before it is read.
        let output = unsafe { std::slice::from_raw_parts_mut(output.data.cast::<T>(), attention.query.len()) };
        Ok(checked.run(output, context)?)
    }
}

impl<T: OnnxElement> Launch for HstuAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let rows = inputs.rows.on_device()?;
        if let Some(contextual) = &inputs.num_contextual {
            expect_len(contextual, rows.users, "one a user")?;
        }
        let call = cuda::Attention {
            element: cuda::Type::of::<T>(),
            rows,
            query: inputs.query.address(),
            key: inputs.key.address(),
            value: inputs.value.address(),
            cache: inputs.cache.as_ref().map(|cache| cache.on_device(rows.users)).transpose()?,
            num_contextual: inputs.num_contextual.as_ref().map(InputTensor::address),
            output: inputs.output(context)?.address(),
            alpha: self.alpha,
            scaling_seqlen: self.scaling_seqlen,
            target_group_size: self.target_group_size,
            max_attn_len: self.max_attn_len,
        };
        let scratch = context.scratch(gpu.scratch_bytes(&call)?)?;
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done; what holds for other nodes holds as above. The output is apart from every
        // input. Scratch memory is this call's until the stream has done it.
        unsafe {
            if let Some(cache) = &call.cache {
                cuda::hold_for_arrivals(cache.pool, stream)?;
            }
            match &scratch {
                Some(memory) => {
                    let given = Scratch { address: memory.address(), bytes: memory.bytes() };
                    gpu.attention_in(&call, given, stream)?;
                }
                None => gpu.attention(&call, stream)?,
            }
        }
        Ok(())
    }
}

/// The inputs of a call, whose shapes fit together.
struct Inputs<'a> {
    query: InputTensor<'a>,
    key: InputTensor<'a>,
    value: InputTensor<'a>,
    rows: RowInputs<'a>,
    cache: Option<CacheInputs<'a>>,
    num_contextual: Option<InputTensor<'a>>,
}

impl<'a> Inputs<'a> {
    fn read(context: &'a Context) -> Result<Self, OpError> {
        let [query, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let rows = RowInputs::read(context, &[&query, &key, &value])?;
        let cache = CacheInputs::read(context, context.optional_input(8)?, &rows)?;
        let num_contextual = context.optional_input(9)?;
        if let Some(contextual) = &num_contextual {
            contextual.shape::<1>()?;
        }
        Ok(Self { query, key, value, rows, cache, num_contextual })
    }

    /// The output, which must not lie over any of them.
    fn output(&self, context: &Context) -> Result<OutputTensor, OpError> {
        let output = context.output(0, &self.query.dims)?;
        output.apart_from([&self.query, &self.key, &self.value])?;
        output.apart_from(self.rows.tensors())?;
        if let Some(cache) = &self.cache {
            output.apart_from(cache.tensors())?;
            output.apart_from([&cache.pool])?;
        }
        output.apart_from(&self.num_contextual)?;
        Ok(output)
    }
}

impl<T: OnnxElement> HstuAttention<T> {
    fn with_inputs<'a>(&self, rows: Rows<'a>) -> pagoda_kernels::HstuAttention<'a, T> {
        pagoda_kernels::HstuAttention {
            rows,
            query: &[],
            key: &[],
            value: &[],
            cache: None,
            num_contextual: None,
            alpha: self.alpha,
            scaling_seqlen: self.scaling_seqlen,
            target_group_size: self.target_group_size,
            max_attn_len: self.max_attn_len,
        }
    }
}
