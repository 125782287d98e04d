//! `ai.pagoda.HstuAttention`.

use std::ffi::CStr;
use std::marker::PhantomData;

use pagoda_kernels::CheckedAttention;
use pagoda_kernels::batch::Rows;
use pagoda_kernels::cuda::{self, CUstream, Gpu, Scratch};

use crate::append::AppendInputs;
use crate::context::{Attributes, Context, InputTensor, OutputTensor};
use crate::cuda::Launch;
use crate::element::OnnxElement;
use crate::inputs::{CacheInputs, I32, RowInputs, expect_len, flag};
use crate::op::{Input, OpError, Operator, Output};
use crate::shape::{Shape, Shapes};

/// Attention of each user's new rows over the paged history and the rows themselves, for one element type.
pub struct HstuAttention<T> {
    alpha: f32,
    scaling_seqlen: i64,
    target_group_size: i64,
    max_attn_len: i64,
    candidates_only: bool,
    /// The graph asks for the pool with the new history rows in it.
    appends: bool,
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
    const OUTPUTS: &'static [Output] = &[Output::required("output", T::ONNX), Output::optional("kv_pool_out", T::ONNX)];

    fn shapes(node: &Shapes) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?, node.input(8)?])
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
            candidates_only: flag(attributes, "HstuAttention", c"candidates_only")?,
            appends: appends(attributes)?,
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
        if self.appends {
            return self.append_and_attend(&inputs, context);
        }
        // SAFETY: the CPU's tensors are in host memory. The element types are those of `INPUTS`, and nothing writes to an
        // input of a running node: the pool's writer is another node that ran before or runs after.
        let attention = unsafe { self.on_host(&inputs, inputs.pool()) };
        // Before the output is asked for: a bad call must not touch a buffer that the caller bound.
        let checked = attention.check()?;
        attend(&checked, &inputs.output(context)?, context)
    }
}

impl<T: OnnxElement> Launch for HstuAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &Context) -> Result<(), OpError> {
        let inputs = Inputs::read(context)?;
        let mut call = self.on_device(&inputs)?;
        let (pool, output) = (call.cache.map(|cache| cache.pool), inputs.output(context)?);
        call.output = output.address();
        let append = self.appends.then(|| inputs.append()).transpose()?;
        let appended = append.as_ref().map(|append| inputs.pool_output(append, &output, context)).transpose()?;
        if let (Some(cache), Some(appended)) = (&mut call.cache, &appended) {
            cache.pool = appended.address();
        }
        // This checks the call: nothing is written before.
        let scratch = context.scratch(gpu.scratch_bytes(&call)?)?;
        // SAFETY: tensors of the CUDA provider are on its device, as long as their shapes say, and ONNX Runtime does not let
        // go of them before the stream is done; what holds for other nodes holds as above. The outputs are apart from each
        // other and from every input, but for the pool, which may be both. Scratch memory is this call's until the stream has
        // done it.
        unsafe {
            if let Some(pool) = pool {
                cuda::hold_for_arrivals(pool, stream)?;
            }
            if let (Some(append), Some(appended)) = (&append, &appended) {
                append.copy_on_device::<T>(gpu, appended, stream)?;
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

/// Whether the node has its second output, which takes the pool and what says where in it rows go.
fn appends(attributes: &Attributes) -> Result<bool, OpError> {
    if !attributes.has_output(1)? {
        return Ok(false);
    }
    for (index, name) in (5..).zip(CACHE) {
        if !attributes.has_input(index)? {
            return Err(no_cache(name));
        }
    }
    Ok(true)
}

/// The inputs from 5 on that make up a cache.
const CACHE: [&str; 4] = ["cached_len", "page_indptr", "page_ids", "kv_pool"];

fn no_cache(missing: &str) -> OpError {
    OpError::invalid(format!(
        "kv_pool_out: this output takes the inputs {}, and {missing} is missing: give all four or leave the output out",
        CACHE.join(", ")
    ))
}

/// Attends, on the CPU.
fn attend<T: OnnxElement>(
    checked: &CheckedAttention<'_, T>,
    output: &OutputTensor,
    context: &Context,
) -> Result<(), OpError> {
    // SAFETY: the output is in host memory, of `T` and apart from every input; f32, f16 and bf16 have no invalid bit
    // patterns, and the kernel writes every element before it is read.
    let output = unsafe { output.slice_mut::<T>() };
    if output.is_empty() {
        return Ok(());
    }
    Ok(checked.run(output, context)?)
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

    /// The pool, of which there is nothing without a cache.
    ///
    /// # Safety
    /// As for [`InputTensor::slice`].
    unsafe fn pool<T>(&self) -> &'a [T] {
        // SAFETY: the caller's.
        self.cache.as_ref().map_or(&[], |cache| unsafe { cache.pool.slice() })
    }

    /// What is appended, where the node appends.
    fn append(&self) -> Result<AppendInputs<'_>, OpError> {
        let cache = self.cache.as_ref().ok_or_else(|| no_cache("each of them"))?;
        Ok(AppendInputs { key: &self.key, value: &self.value, rows: &self.rows, cache })
    }

    /// The pool with what is appended, which may be the input pool as a whole and must not lie over anything else.
    fn pool_output(
        &self,
        append: &AppendInputs<'_>,
        output: &OutputTensor,
        context: &Context,
    ) -> Result<OutputTensor, OpError> {
        let pool = append.output(context, 1)?;
        pool.apart_from([&self.query])?;
        pool.apart_from(&self.num_contextual)?;
        pool.apart_from_output(output)?;
        Ok(pool)
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
    /// What PagedKvAppend does, then the attention over that: as two nodes would, one after the other.
    fn append_and_attend(&self, inputs: &Inputs<'_>, context: &Context) -> Result<(), OpError> {
        let append = inputs.append()?;
        // SAFETY: as in `compute`, but for the pool, which this call itself may write.
        let rows = unsafe { append.on_host::<T>() };
        let checked = rows.check()?;
        // SAFETY: as in `compute`; nothing is left of the pool's slice when it is written.
        unsafe { self.on_host(inputs, inputs.pool()) }.check()?;
        let output = inputs.output(context)?;
        let pool = inputs.pool_output(&append, &output, context)?;
        // SAFETY: as above; the output pool is apart from everything but the pool, and nothing writes it any more.
        let attention = unsafe {
            append.write(&checked, &pool, context)?;
            self.on_host(inputs, pool.slice_mut())
        };
        attend(&attention.check()?, &output, context)
    }

    /// The call over `pool`, for the kernels of the CPU.
    ///
    /// # Safety
    /// The tensors are in host memory, of the types of `INPUTS`, and nothing writes to them while the call lives, but to the
    /// pool of the inputs.
    unsafe fn on_host<'a>(&self, inputs: &Inputs<'a>, pool: &'a [T]) -> pagoda_kernels::HstuAttention<'a, T> {
        // SAFETY: the caller's.
        unsafe {
            pagoda_kernels::HstuAttention {
                query: inputs.query.slice(),
                key: inputs.key.slice(),
                value: inputs.value.slice(),
                cache: inputs.cache.as_ref().map(|cache| (cache.on_host(), pool)),
                num_contextual: inputs.num_contextual.as_ref().map(|tensor| tensor.slice()),
                ..self.with_inputs(inputs.rows.on_host())
            }
        }
    }

    /// The call without its output, for the kernels of the GPU.
    fn on_device(&self, inputs: &Inputs<'_>) -> Result<cuda::Attention, OpError> {
        let rows = inputs.rows.on_device()?;
        if let Some(contextual) = &inputs.num_contextual {
            expect_len(contextual, rows.users, "one a user")?;
        }
        let cache = inputs.cache.as_ref().map(|cache| cache.on_device(rows.users)).transpose()?;
        let num_contextual = inputs.num_contextual.as_ref().map(InputTensor::address);
        let of_rows = [rows.row_offsets, rows.num_candidates];
        let of_cache = cache.map(|cache| [cache.cached_len, cache.page_indptr, cache.page_ids]);
        let mut indices = of_rows.into_iter().chain(of_cache.into_iter().flatten()).chain(num_contextual);
        Ok(cuda::Attention {
            element: cuda::Type::of::<T>(),
            rows,
            query: inputs.query.address(),
            key: inputs.key.address(),
            value: inputs.value.address(),
            output: 0,
            cache,
            append: self.appends,
            num_contextual,
            alpha: self.alpha,
            scaling_seqlen: self.scaling_seqlen,
            target_group_size: self.target_group_size,
            max_attn_len: self.max_attn_len,
            candidates_only: self.candidates_only,
            settled_indices: indices.all(cuda::is_settled),
        })
    }

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
            candidates_only: self.candidates_only,
        }
    }
}
