//! `ai.pagoda.HstuAttention` over a quantised pool.

use std::mem::MaybeUninit;

use pagoda_kernels::cuda::{CUstream, Gpu};
use pagoda_kernels::{KvFormat, KvView, QuantisedPool, cpu, f16};

use super::inputs::{Inputs, SCALES};
use super::{HstuAttention, attend, declared_inputs, declared_outputs, format, infer_shapes};
use crate::ort::{
    I32, Input, InputTensor, KernelContext, KernelInfo, Launch, OnnxElement, OpError, Operator, Output, OutputTensor,
    Shape, ShapeInferContext, U8,
};

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

/// Registered for the CUDA provider to refuse the model when it is opened. ONNX Runtime would otherwise run the node on the CPU,
/// and copy the pool there and back in every call.
impl<T: OnnxElement> Launch for QuantisedHstuAttention<T> {
    fn prepare(&mut self, _: &'static Gpu) -> Result<(), OpError> {
        Err(on_the_cpu_alone())
    }

    fn launch(&self, _: &Gpu, _: CUstream, _: &KernelContext) -> Result<(), OpError> {
        Err(on_the_cpu_alone())
    }
}

fn on_the_cpu_alone() -> OpError {
    OpError::invalid(
        "kv_format: HstuAttention reads quantised pools on the CPU alone: open the model on the CPU, or with native pages",
    )
}
