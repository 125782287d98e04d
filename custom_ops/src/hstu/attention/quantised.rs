//! `ai.pagoda.HstuAttention` over a quantised pool.

use std::mem::MaybeUninit;

use pagoda_kernels::cuda::{self, CUstream, Gpu, QuantisedPages, Scratch};
use pagoda_kernels::{KvFormat, KvView, QuantisedPool, cpu, f16};

use super::inputs::{Inputs, SCALES};
use super::{HstuAttention, attend, declared_inputs, declared_outputs, format, infer_shapes};
use crate::ort::{
    I32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext, U8,
};
use crate::side_channel::wait_for_arrivals;

/// The attention over a pool of codes, with the scales beside it. It appends the new history rows first, and reads the whole
/// history as it is stored, so it makes no difference in how many calls it comes.
pub struct QuantisedHstuAttention<T> {
    attention: HstuAttention<T>,
    format: KvFormat,
}

impl<T: OnnxElement> Operator for QuantisedHstuAttention<T> {
    const INPUTS: &'static [Input] = declared_inputs!(U8);
    const OUTPUTS: &'static [Output] = declared_outputs!(U8);

    fn infer_shapes(node: &ShapeInferContext) -> Result<Vec<Option<Shape>>, OpError> {
        infer_shapes(node)
    }

    fn new(info: &KernelInfo) -> Result<Self, OpError> {
        let format = format(info)?;
        if format == KvFormat::Native {
            return Err(OpError::invalid("kv_format: a kv_pool of uint8 takes one of int8, int4 and fp8, not native"));
        }
        let attention = HstuAttention::with_any_pool(info)?;
        if !attention.appends || !info.has_input(SCALES)? || !info.has_output(2)? {
            let message = "kv_scales: a quantised pool takes this input, and the outputs kv_pool_out and kv_scales_out";
            return Err(OpError::invalid(message));
        }
        Ok(Self { attention, format })
    }

    fn compute(&self, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.format)?;
        let append = inputs.append()?;
        let scales = inputs.scales.as_ref().ok_or_else(|| OpError::invalid("kv_scales: this input is missing"))?;
        // SAFETY: tensors of the CPU provider are in host memory and have the element types of `INPUTS`. Nothing writes to an
        // input of a running node, except that this call may write the pool and its scales.
        let rows = unsafe { append.on_host::<T>() };
        let checked = rows.check()?;
        // SAFETY: as above. The slices of the pool are gone before the pool is written.
        let before = unsafe { self.view(inputs.pool(), scales.slice()) };
        // The checks precede the outputs: an invalid call must not write a buffer that the caller bound.
        // SAFETY: as above.
        unsafe { self.attention.on_host(&inputs, before) }.check()?;
        let output = inputs.output(context)?;
        let pool = inputs.pool_output(&append, &output, context)?;
        let new_scales = inputs.scales_output(scales, [&output, &pool], context)?;
        // SAFETY: as above. The output pool and its scales are disjoint from everything except their inputs, and are not written
        // after `run_quantised`. u8 and f16 have no invalid bit patterns.
        let attention = unsafe {
            append.copy_on_host::<u8>(&pool, context);
            copy_scales(scales, &new_scales, context);
            let (codes, scales) = (pool.slice_mut(), new_scales.slice_mut());
            checked.run_quantised(QuantisedPool { format: self.format, codes, scales }, context)?;
            self.attention.on_host(&inputs, self.view(pool.slice_mut(), new_scales.slice_mut()))
        };
        attend(&attention.check()?, &output, context)
    }
}

impl<T: OnnxElement> QuantisedHstuAttention<T> {
    fn view<'a>(&self, codes: &'a [u8], scales: &'a [f16]) -> KvView<'a, T> {
        KvView::Quantised { format: self.format, codes, scales }
    }
}

/// Copies the scales to the output, unless it is the same memory.
///
/// # Safety
/// Both are in host memory. Nothing else reads or writes the output.
unsafe fn copy_scales(from: &InputTensor<'_>, to: &OutputTensor, context: &KernelContext) {
    if !std::ptr::eq(from.data, to.data) {
        // SAFETY: by contract; they have the same length and are disjoint.
        unsafe { cpu::copy(from.slice::<f16>(), to.slice_mut::<MaybeUninit<f16>>(), context) };
    }
}

/// On the GPU the pages of the call are opened, and the kernels of native pools run over them.
impl<T: OnnxElement> Launch for QuantisedHstuAttention<T> {
    fn launch(&self, gpu: &Gpu, stream: CUstream, context: &KernelContext) -> Result<(), OpError> {
        let inputs = Inputs::read(context, self.format)?;
        let append = inputs.append()?;
        let scales = inputs.scales.as_ref().ok_or_else(|| OpError::invalid("kv_scales: this input is missing"))?;
        let output = inputs.output(context)?;
        let pool = inputs.pool_output(&append, &output, context)?;
        let new_scales = inputs.scales_output(scales, [&output, &pool], context)?;
        let mut call = cuda::Attention { output: output.address(), ..self.attention.on_device(&inputs)? };
        // Both check the call, before anything is written.
        let needed = call.opened_bytes()?.next_multiple_of(ALIGNMENT);
        let faster = gpu.scratch_bytes(&call.opened(ALIGNMENT as u64)?)?;
        let memory = match context.scratch(needed + faster)? {
            None => context.scratch(needed)?,
            memory => memory,
        };
        let memory = memory.ok_or_else(|| {
            OpError::failed(format!("kv_pool: no {needed} bytes of scratch memory on the GPU, split the batch"))
        })?;
        let arriving = call.cache.map(|cache| cache.pool);
        if let Some(cache) = &mut call.cache {
            cache.pool = pool.address();
        }
        let pages = QuantisedPages { format: self.format, scales: new_scales.address() };
        let opened = Scratch { address: memory.address(), bytes: needed };
        let rest = Scratch { address: memory.address() + needed as u64, bytes: memory.bytes() - needed };
        // SAFETY: as for native pools: the tensors are on the provider's device, have the sizes of their shapes, and stay allocated
        // until the stream has run the call. Nothing else writes the inputs. The outputs are disjoint from each other and from
        // every input, except that a pool and its scales may be the inputs themselves. The scratch memory belongs to this call.
        unsafe {
            if let Some(pool) = arriving {
                wait_for_arrivals(pool, stream)?;
            }
            append.copy_on_device::<u8>(gpu, &pool, stream)?;
            if !std::ptr::eq(scales.data, new_scales.data) {
                let bytes = scales.dims.iter().product::<usize>() * size_of::<f16>();
                gpu.copy(new_scales.address(), scales.address(), bytes, stream)?;
            }
            let native = gpu.open_pages(&call, pages, opened, stream)?;
            match rest.bytes {
                0 => gpu.attention(&native, stream)?,
                _ => gpu.attention_in(&native, rest, stream)?,
            }
        }
        Ok(())
    }
}

/// What the parts of scratch memory are aligned to.
const ALIGNMENT: usize = 256;
