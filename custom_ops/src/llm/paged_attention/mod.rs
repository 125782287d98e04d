//! `ai.pagoda.PagedAttention`: softmax attention over the paged KV cache, with the append of the new tokens.

mod attributes;
mod tensors;

use std::marker::PhantomData;

use pagoda_kernels::cuda::{CUstream, Gpu, KeyWeights, Scratch};
use pagoda_kernels::{KvFormat, KvPool, f16};

use crate::ort::{
    F32, I32, Input, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, Shape,
    ShapeInferContext, U8,
};
use attributes::Attributes;
use tensors::{Inputs, Outputs, input};

/// The attention over a pool of numbers of the type of the keys.
pub struct PagedAttention<T> {
    attributes: Attributes,
    element: PhantomData<T>,
}

/// The attention over a pool of codes, with the scales beside it.
pub struct QuantisedPagedAttention<T> {
    attributes: Attributes,
    element: PhantomData<T>,
}

/// The inputs of both forms, which differ in the pool's type alone: ONNX Runtime takes kernels of one name only if they agree in
/// what is optional.
macro_rules! inputs {
    ($pool:expr) => {
        &[
            Input::required("query", T::ONNX),
            Input::required("key", T::ONNX),
            Input::required("value", T::ONNX),
            Input::required("row_offsets", I32),
            Input::required("cached_len", I32),
            Input::required("page_indptr", I32),
            Input::required("page_ids", I32),
            Input::required("kv_pool", $pool),
            Input::optional("kv_scales", <f16 as OnnxElement>::ONNX),
            Input::optional("positions", I32),
            Input::optional("cos", F32),
            Input::optional("sin", F32),
            Input::optional("sinks", T::ONNX),
            Input::optional("write_slots", I32),
            Input::optional("token_pos", I32),
            Input::optional("slopes", F32),
        ]
    };
}

impl<T: OnnxElement> Operator for PagedAttention<T> {
    const INPUTS: &'static [Input] = inputs!(T::ONNX);
    const OUTPUTS: &'static [Output] = &[
        Output::required("output", T::ONNX),
        Output::required("kv_pool_out", T::ONNX),
        Output::optional("kv_scales_out", <f16 as OnnxElement>::ONNX),
        Output::optional("key_weights", F32),
        Output::optional("kv_norms", F32),
    ];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?, node.input(input::POOL)?])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let attributes = Attributes::read(info)?;
        if attributes.format != KvFormat::Native {
            return Err(OpError::invalid("kv_format: a quantised format takes a kv_pool of uint8, and kv_scales"));
        }
        Ok(Self { attributes, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.attributes.format)?;
        let outputs = Outputs::new(&inputs, context, self.attributes.weights_len)?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing writes to an
        // input of a running node, except that this call may write the pool, of which `call` holds no slice. The outputs are
        // disjoint from everything else. f32, f16 and bf16 have no invalid bit patterns.
        unsafe {
            let call = self.attributes.call::<T>(&inputs);
            call.check(&KvPool::Native(outputs.pool.slice_mut::<T>()), outputs.weights_len())?;
            outputs.copy_pool::<T>(&inputs, context);
            outputs.run(&call, &mut KvPool::Native(outputs.pool.slice_mut()), context)
        }
    }
}

impl<T: OnnxElement> Operator for QuantisedPagedAttention<T> {
    const INPUTS: &'static [Input] = inputs!(U8);
    const OUTPUTS: &'static [Output] = &[
        Output::required("output", T::ONNX),
        Output::required("kv_pool_out", U8),
        Output::optional("kv_scales_out", <f16 as OnnxElement>::ONNX),
        Output::optional("key_weights", F32),
        Output::optional("kv_norms", F32),
    ];

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        Ok(vec![node.input(0)?, node.input(input::POOL)?, node.input(input::SCALES)?])
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let attributes = Attributes::read(info)?;
        if attributes.format == KvFormat::Native {
            return Err(OpError::invalid("kv_format: a kv_pool of uint8 takes one of int8, int4 and fp8, not native"));
        }
        if !info.has_input(input::SCALES)? || !info.has_output(2)? {
            return Err(OpError::invalid("kv_scales: a quantised pool takes this input, and the output kv_scales_out"));
        }
        Ok(Self { attributes, element: PhantomData })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.attributes.format)?;
        let outputs = Outputs::new(&inputs, context, self.attributes.weights_len)?;
        // SAFETY: as above; u8 has no invalid bit patterns either.
        unsafe {
            let call = self.attributes.call::<T>(&inputs);
            let pool = || KvPool::Quantised {
                codes: outputs.pool.slice_mut(),
                scales: outputs.scales.as_ref().map_or(&mut [], |scales| scales.slice_mut()),
            };
            call.check(&pool(), outputs.weights_len())?;
            outputs.copy_pool::<u8>(&inputs, context);
            outputs.run(&call, &mut pool(), context)
        }
    }
}

impl<T: OnnxElement> Launch for PagedAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        launch::<T>(&self.attributes, size_of::<T>(), gpu, stream, context)
    }
}

impl<T: OnnxElement> Launch for QuantisedPagedAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        launch::<T>(&self.attributes, size_of::<u8>(), gpu, stream, context)
    }
}

/// Bytes that the parts of scratch memory are aligned to.
const ALIGNMENT: usize = 256;

/// Enqueues one call on a stream. `pool_element`: bytes of an element of the pool.
fn launch<T: OnnxElement>(
    attributes: &Attributes,
    pool_element: usize,
    gpu: &Gpu,
    stream: CUstream,
    context: &KernelContext,
) -> Result<(), OpError> {
    let inputs = Inputs::read(context, attributes.format)?;
    let outputs = Outputs::new(&inputs, context, attributes.weights_len)?;
    let mut call = attributes.call_on_device::<T>(&inputs, &outputs)?;
    if let Some((weights, len)) = &outputs.key_weights {
        call.key_weights = Some(KeyWeights { weights: weights.address(), len: *len, row_sums: 0 });
    }
    // Sums that weights need, then the memory of faster kernels. Without the latter the call is slower.
    let sums = if outputs.key_weights.is_some() { call.row_sums_bytes().next_multiple_of(ALIGNMENT) } else { 0 };
    let scratch = match context.scratch(sums + call.scratch_bytes())? {
        None if sums > 0 => context.scratch(sums)?,
        scratch => scratch,
    };
    if let Some(weights) = &mut call.key_weights {
        weights.row_sums = scratch.as_ref().map_or(0, |scratch| scratch.address());
        if sums > 0 && weights.row_sums == 0 {
            let message = format!("key_weights: no {sums} bytes of scratch memory on the GPU, split the batch");
            return Err(OpError::failed(message));
        }
    }
    call.scratch = scratch
        .as_ref()
        .filter(|scratch| scratch.bytes() > sums)
        .map(|scratch| Scratch { address: scratch.address() + sums as u64, bytes: scratch.bytes() - sums });
    // Before anything is written.
    call.check()?;
    // SAFETY: tensors of the CUDA provider are on its device, have the sizes of their shapes, and stay allocated until the
    // stream has run the call. Nothing else writes the inputs. The outputs are disjoint from each other and from every input,
    // except that a pool and its scales may be the inputs themselves. The scratch memory belongs to this call until the stream
    // has run it.
    unsafe {
        outputs.copy_pool_on_device(&inputs, pool_element, gpu, stream)?;
        Ok(gpu.paged_attention(&call, stream)?)
    }
}
