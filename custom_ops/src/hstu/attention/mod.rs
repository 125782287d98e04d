//! `ai.pagoda.HstuAttention`: attention over the paged KV cache and the new rows.

mod inputs;
mod quantised;

use std::marker::PhantomData;

use pagoda_kernels::cuda::{self, CUstream, Gpu, Scratch};
use pagoda_kernels::hstu::batch::Rows;
use pagoda_kernels::{CheckedAttention, KvFormat, KvView, f16};

use crate::ort::{
    I32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext,
};
use crate::side_channel::{is_settled, wait_for_arrivals};
use inputs::{CACHE, Inputs, POOL, SCALES, no_cache};
pub use quantised::QuantisedHstuAttention;

/// The attention of each user's new rows over the cached history and the new rows themselves, for one element type.
pub struct HstuAttention<T> {
    alpha: f32,
    scaling_seqlen: i64,
    target_group_size: i64,
    max_attn_len: i64,
    candidates_only: bool,
    /// Whether the node also appends the new history rows to the pool: it then has the output `kv_pool_out`.
    appends: bool,
    element: PhantomData<T>,
}

/// The inputs for either form of pool, which differ in the pool's type alone: ONNX Runtime takes kernels of one name only if they
/// agree in what is optional.
macro_rules! declared_inputs {
    ($pool:expr) => {
        &[
            Input::required("query", T::ONNX),
            Input::required("key", T::ONNX),
            Input::required("value", T::ONNX),
            Input::required("row_offsets", I32),
            Input::required("num_candidates", I32),
            Input::optional("cached_len", I32),
            Input::optional("page_indptr", I32),
            Input::optional("page_ids", I32),
            Input::optional("kv_pool", $pool),
            Input::optional("num_contextual", I32),
            Input::optional("kv_scales", <f16 as OnnxElement>::ONNX),
        ]
    };
}
use declared_inputs;

/// The outputs for either form of pool.
macro_rules! declared_outputs {
    ($pool:expr) => {
        &[
            Output::required("output", T::ONNX),
            Output::optional("kv_pool_out", $pool),
            Output::optional("kv_scales_out", <f16 as OnnxElement>::ONNX),
        ]
    };
}
use declared_outputs;

impl<T: OnnxElement> Operator for HstuAttention<T> {
    const INPUTS: &'static [Input] = declared_inputs!(T::ONNX);
    const OUTPUTS: &'static [Output] = declared_outputs!(T::ONNX);

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        if format(info)? != KvFormat::Native {
            return Err(OpError::invalid("kv_format: a quantised format takes a kv_pool of uint8, and kv_scales"));
        }
        if info.has_input(SCALES)? || info.has_output(2)? {
            return Err(OpError::invalid("kv_scales: a native pool has none: leave them out, or set kv_format"));
        }
        Self::with_any_pool(info)
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, KvFormat::Native)?;
        if self.appends {
            return self.append_and_attend(&inputs, context);
        }
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing writes to an
        // input of a running node: a node that writes the pool runs before or after this one.
        let attention = unsafe { self.on_host(&inputs, KvView::Native(inputs.pool())) };
        // The check precedes the output: an invalid call must not write a buffer that the caller bound.
        let checked = attention.check()?;
        attend(&checked, &inputs.output(context)?, context)
    }
}

impl<T: OnnxElement> HstuAttention<T> {
    /// The kernel of a node, whatever the format of its pool.
    fn with_any_pool(info: &KernelInfo) -> Result<Self, OpError> {
        let scaling_seqlen = info.int(c"scaling_seqlen")?.ok_or_else(|| {
            OpError::invalid("HstuAttention: the attribute scaling_seqlen (an int of at least 1) is missing")
        })?;
        let operator = Self {
            alpha: info.float(c"alpha")?.unwrap_or(0.0),
            scaling_seqlen,
            target_group_size: info.int(c"target_group_size")?.unwrap_or(1),
            max_attn_len: info.int(c"max_attn_len")?.unwrap_or(0),
            candidates_only: info.flag(c"candidates_only")?,
            appends: appends(info)?,
            element: PhantomData,
        };
        // An empty batch checks the attributes alone, so that an invalid one fails when the model is loaded.
        operator
            .with_rows(Rows { row_offsets: &[0], num_candidates: &[], total_rows: 0, heads: 1, head_size: 1 })
            .check()?;
        Ok(operator)
    }
}

/// The format of a node's pool.
fn format(info: &KernelInfo) -> Result<KvFormat, OpError> {
    match info.string(c"kv_format")? {
        None => Ok(KvFormat::Native),
        Some(name) => KvFormat::named(&name).ok_or_else(|| {
            let message = format!("kv_format: this attribute is {name:?}, expected native, int8, int4 or fp8");
            OpError::invalid(message)
        }),
    }
}

/// ONNX Runtime asks the first kernel of the name, whatever the format.
fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
    Ok(vec![node.input(0)?, node.input(POOL)?, node.input(SCALES)?])
}

impl<T: OnnxElement> Launch for HstuAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, KvFormat::Native)?;
        let mut call = self.on_device(&inputs)?;
        let (pool, output) = (call.cache.map(|cache| cache.pool), inputs.output(context)?);
        call.output = output.address();
        let append = self.appends.then(|| inputs.append()).transpose()?;
        let appended = append.as_ref().map(|append| inputs.pool_output(append, &output, context)).transpose()?;
        if let (Some(cache), Some(appended)) = (&mut call.cache, &appended) {
            cache.pool = appended.address();
        }
        // `scratch_bytes` checks the call, before anything is written.
        let scratch = context.scratch(gpu.scratch_bytes(&call)?)?;
        // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
        // stream has run the call. Nothing else writes the inputs, as in `compute`. The outputs are disjoint from each other
        // and from every input, except that the output pool may be the input pool. The scratch memory belongs to this call
        // until the stream has run it.
        unsafe {
            if let Some(pool) = pool {
                wait_for_arrivals(pool, stream)?;
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

/// Whether the node has its second output, which needs all inputs of the cache.
fn appends(info: &KernelInfo) -> Result<bool, OpError> {
    if !info.has_output(1)? {
        return Ok(false);
    }
    for (index, name) in (5..).zip(CACHE) {
        if !info.has_input(index)? {
            return Err(no_cache(name));
        }
    }
    Ok(true)
}

/// Runs the attention on the CPU.
fn attend<T: OnnxElement>(
    checked: &CheckedAttention<'_, T>,
    output: &OutputTensor,
    context: &KernelContext,
) -> Result<(), OpError> {
    // SAFETY: the output is in host memory, has elements of `T` and is disjoint from every input. f32, f16 and bf16 have no
    // invalid bit patterns, and the kernel writes every element before it reads it.
    let output = unsafe { output.slice_mut::<T>() };
    if output.is_empty() {
        return Ok(());
    }
    Ok(checked.run(output, context)?)
}

impl<T: OnnxElement> HstuAttention<T> {
    /// Appends the new rows, then attends over the result: the same as a PagedKvAppend node before this one.
    fn append_and_attend(&self, inputs: &Inputs<'_>, context: &KernelContext) -> Result<(), OpError> {
        let append = inputs.append()?;
        // SAFETY: as in `compute`, except that this call may write the pool.
        let rows = unsafe { append.on_host::<T>() };
        let checked = rows.check()?;
        // SAFETY: as in `compute`. The slice of the pool is gone before the pool is written.
        unsafe { self.on_host(inputs, KvView::Native(inputs.pool())) }.check()?;
        let output = inputs.output(context)?;
        let pool = inputs.pool_output(&append, &output, context)?;
        // SAFETY: as above. The output pool is disjoint from everything except the input pool, and is not written after `write`.
        let attention = unsafe {
            append.write(&checked, &pool, context)?;
            self.on_host(inputs, KvView::Native(pool.slice_mut()))
        };
        attend(&attention.check()?, &output, context)
    }

    /// The call over `pool`, for the CPU kernels.
    ///
    /// # Safety
    /// The tensors are in host memory and have the element types of `INPUTS`. Nothing writes to them while the call lives,
    /// except to the pool of the inputs.
    unsafe fn on_host<'a>(&self, inputs: &Inputs<'a>, pool: KvView<'a, T>) -> pagoda_kernels::HstuAttention<'a, T> {
        // SAFETY: by contract.
        unsafe {
            pagoda_kernels::HstuAttention {
                query: inputs.query.slice(),
                key: inputs.key.slice(),
                value: inputs.value.slice(),
                cache: inputs.cache.as_ref().map(|cache| (cache.on_host(), pool)),
                num_contextual: inputs.num_contextual.as_ref().map(|tensor| tensor.slice()),
                ..self.with_rows(inputs.rows.on_host())
            }
        }
    }

    /// The call without its output, for the CUDA kernels.
    fn on_device(&self, inputs: &Inputs<'_>) -> Result<cuda::Attention, OpError> {
        let rows = inputs.rows.on_device()?;
        if let Some(contextual) = &inputs.num_contextual {
            contextual.expect_len(rows.users, "one a user")?;
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
            settled_indices: indices.all(is_settled),
        })
    }

    /// The attributes and the rows, without any tensor of elements.
    fn with_rows<'a>(&self, rows: Rows<'a>) -> pagoda_kernels::HstuAttention<'a, T> {
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
