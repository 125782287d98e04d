//! The inputs and outputs of a call, with consistent shapes.

use std::mem::MaybeUninit;

use pagoda_kernels::cuda::{CUstream, Gpu};
use pagoda_kernels::{KV_NORMS, KvFormat, KvPool, cpu, f16};

use crate::ort::{InputTensor, KernelContext, OnnxElement, OpError, OutputTensor};
use crate::side_channel::wait_for_arrivals;

/// The inputs by number.
pub(super) mod input {
    pub const POOL: usize = 7;
    pub const SCALES: usize = 8;
    pub const POSITIONS: usize = 9;
    pub const COS: usize = 10;
    pub const SIN: usize = 11;
    pub const SINKS: usize = 12;
    pub const WRITE_SLOTS: usize = 13;
    pub const TOKEN_POS: usize = 14;
    pub const SLOPES: usize = 15;
}

/// The inputs of a call, with consistent shapes.
pub(super) struct Inputs<'a> {
    pub(super) query: InputTensor<'a>,
    pub(super) key: InputTensor<'a>,
    pub(super) value: InputTensor<'a>,
    pub(super) row_offsets: InputTensor<'a>,
    pub(super) cached_len: InputTensor<'a>,
    pub(super) page_indptr: InputTensor<'a>,
    pub(super) page_ids: InputTensor<'a>,
    pub(super) pool: InputTensor<'a>,
    pub(super) pages: usize,
    pub(super) page_size: usize,
    pub(super) scales: Option<InputTensor<'a>>,
    pub(super) positions: Option<InputTensor<'a>>,
    pub(super) rotation: Option<(InputTensor<'a>, InputTensor<'a>)>,
    pub(super) sinks: Option<InputTensor<'a>>,
    pub(super) slopes: Option<InputTensor<'a>>,
    pub(super) slots: Option<(InputTensor<'a>, InputTensor<'a>)>,
}

impl<'a> Inputs<'a> {
    pub(super) fn read(context: &'a KernelContext, format: KvFormat) -> Result<Self, OpError> {
        let [query, key, value] = [context.input(0)?, context.input(1)?, context.input(2)?];
        let ([rows, _, size], [_, kv_heads, _]) = (query.shape::<3>()?, key.shape::<3>()?);
        key.expect_shape(&[rows, kv_heads, size])?;
        value.expect_shape(&[rows, kv_heads, size])?;
        let [row_offsets, cached_len, page_indptr, page_ids] =
            [context.input(3)?, context.input(4)?, context.input(5)?, context.input(6)?];
        for tensor in [&row_offsets, &cached_len, &page_indptr, &page_ids] {
            tensor.shape::<1>()?;
        }
        let pool = context.input(input::POOL)?;
        let [pages, _, page_size, _, _] = pool.shape::<5>()?;
        pool.expect_shape(&[pages, 2, page_size, kv_heads, format.pool_width(size)])?;
        let scales = context.optional_input(input::SCALES)?.filter(|_| format != KvFormat::Native);
        if let Some(scales) = &scales {
            scales.expect_shape(&[pages, 2, page_size, kv_heads, format.scales_width()])?;
        }
        let lists = [input::POSITIONS, input::SINKS, input::SLOPES].map(|index| context.optional_input(index));
        let [positions, sinks, slopes] = lists;
        let (positions, sinks, slopes) = (positions?, sinks?, slopes?);
        for tensor in [&positions, &sinks, &slopes].into_iter().flatten() {
            tensor.shape::<1>()?;
        }
        let rotation = context.optional_input(input::COS)?.zip(context.optional_input(input::SIN)?);
        if let Some((cos, sin)) = &rotation {
            cos.shape::<2>()?;
            sin.expect_shape(&cos.dims)?;
        }
        let slots = context.optional_input(input::WRITE_SLOTS)?.zip(context.optional_input(input::TOKEN_POS)?);
        if let Some((write_slots, token_pos)) = &slots {
            write_slots.expect_shape(&[rows, kv_heads])?;
            let [_, _, len] = token_pos.shape::<3>()?;
            token_pos.expect_shape(&[cached_len.dims[0], kv_heads, len])?;
        }
        Ok(Self {
            query,
            key,
            value,
            row_offsets,
            cached_len,
            page_indptr,
            page_ids,
            pool,
            pages,
            page_size,
            scales,
            positions,
            rotation,
            sinks,
            slopes,
            slots,
        })
    }

    /// Every input but the pool and its scales.
    fn tensors(&self) -> impl Iterator<Item = &InputTensor<'a>> {
        let required = [
            &self.query,
            &self.key,
            &self.value,
            &self.row_offsets,
            &self.cached_len,
            &self.page_indptr,
            &self.page_ids,
        ];
        let optional = [&self.positions, &self.sinks, &self.slopes].into_iter().flatten();
        let pairs = [&self.rotation, &self.slots].into_iter().flatten().flat_map(|(a, b)| [a, b]);
        required.into_iter().chain(optional).chain(pairs)
    }
}

/// The outputs of a call. The pool and the scales are the input itself, or disjoint from it; all are disjoint from everything
/// else.
pub(super) struct Outputs {
    pub(super) output: OutputTensor,
    pub(super) pool: OutputTensor,
    pub(super) scales: Option<OutputTensor>,
    pub(super) key_weights: Option<(OutputTensor, usize)>,
    pub(super) kv_norms: Option<OutputTensor>,
}

impl Outputs {
    pub(super) fn new(
        inputs: &Inputs<'_>,
        context: &KernelContext,
        weights_len: Option<usize>,
    ) -> Result<Self, OpError> {
        let output = context.output(0, &inputs.query.dims)?;
        let pool = context.output(1, &inputs.pool.dims)?;
        let scales = inputs.scales.as_ref().map(|scales| context.output(2, &scales.dims)).transpose()?;
        let len = inputs.slots.as_ref().map(|(_, token_pos)| token_pos.dims[2]).or(weights_len);
        let dims = [inputs.cached_len.dims[0], inputs.key.dims[1], len.unwrap_or(0)];
        let key_weights = context.optional_output(3, &dims)?;
        if key_weights.is_some() && len.is_none() {
            return Err(OpError::invalid("key_weights: this output takes token_pos, or the attribute weights_len"));
        }
        let kv_norms = context.optional_output(4, &[inputs.key.dims[0], inputs.key.dims[1], KV_NORMS])?;
        let optional = [scales.as_ref(), key_weights.as_ref(), kv_norms.as_ref()];
        let written: Vec<&OutputTensor> = [&output, &pool].into_iter().chain(optional.into_iter().flatten()).collect();
        for (index, tensor) in written.iter().enumerate() {
            tensor.check_disjoint(inputs.tensors())?;
            for other in &written[index + 1..] {
                tensor.check_disjoint_output(other)?;
            }
            for stored in [Some(&inputs.pool), inputs.scales.as_ref()].into_iter().flatten() {
                // In place: the very same memory.
                let own = [(&pool, Some(&inputs.pool)), (scales.as_ref().unwrap_or(&pool), inputs.scales.as_ref())];
                let in_place = own.iter().any(|(out, from)| {
                    std::ptr::eq(*out, *tensor)
                        && from.is_some_and(|from| std::ptr::eq(from, stored) && std::ptr::eq(from.data, out.data))
                });
                if !in_place {
                    tensor.check_disjoint([stored])?;
                }
            }
        }
        let key_weights = key_weights.zip(len);
        Ok(Self { output, pool, scales, key_weights, kv_norms })
    }

    /// The last dimension of the key weights, where they are asked for.
    pub(super) fn weights_len(&self) -> Option<usize> {
        self.key_weights.as_ref().map(|(_, len)| *len)
    }

    /// Copies the pool and its scales to the outputs, unless they are the same memory.
    ///
    /// # Safety
    /// The tensors are in host memory; the pool has elements of `P`. Nothing else reads or writes the outputs.
    pub(super) unsafe fn copy_pool<P: Copy + Send + Sync>(&self, inputs: &Inputs<'_>, context: &KernelContext) {
        // SAFETY: by contract; input and output have the same length and are disjoint.
        unsafe {
            if !std::ptr::eq(inputs.pool.data, self.pool.data) {
                cpu::copy(inputs.pool.slice::<P>(), self.pool.slice_mut::<MaybeUninit<P>>(), context);
            }
            if let (Some(from), Some(to)) = (&inputs.scales, &self.scales)
                && !std::ptr::eq(from.data, to.data)
            {
                cpu::copy(from.slice::<f16>(), to.slice_mut::<MaybeUninit<f16>>(), context);
            }
        }
    }

    /// Enqueues the copies of the pool, with elements of `element` bytes, and of its scales to the outputs, unless they are the
    /// same memory; behind what is on its way into them.
    ///
    /// # Safety
    /// The tensors are on the device, have the sizes of their shapes, and stay allocated until the stream has run the copies.
    /// Nothing else uses the outputs until then.
    pub(super) unsafe fn copy_pool_on_device(
        &self,
        inputs: &Inputs<'_>,
        element: usize,
        gpu: &Gpu,
        stream: CUstream,
    ) -> Result<(), OpError> {
        let scales = inputs.scales.as_ref().zip(self.scales.as_ref());
        let pools = [(&inputs.pool, &self.pool, element)].into_iter();
        for (from, to, element) in pools.chain(scales.map(|(from, to)| (from, to, size_of::<f16>()))) {
            let bytes = from.dims.iter().product::<usize>() * element;
            // SAFETY: by contract; input and output have the same length and are disjoint.
            unsafe {
                wait_for_arrivals(from.address(), stream)?;
                if bytes > 0 && !std::ptr::eq(from.data, to.data) {
                    gpu.copy(to.address(), from.address(), bytes, stream)?;
                }
            }
        }
        Ok(())
    }

    /// Runs the call on the pool of the outputs.
    ///
    /// # Safety
    /// The outputs are in host memory and have the element types of the operator. Nothing else reads or writes them.
    pub(super) unsafe fn run<T: OnnxElement>(
        &self,
        call: &pagoda_kernels::PagedAttention<'_, T>,
        pool: &mut KvPool<'_, T>,
        context: &KernelContext,
    ) -> Result<(), OpError> {
        // SAFETY: by contract.
        let (output, weights) = unsafe {
            let weights = self.key_weights.as_ref().map(|(weights, len)| (weights.slice_mut::<f32>(), *len));
            (self.output.slice_mut::<T>(), weights)
        };
        call.run(pool, output, weights, context)?;
        if let Some(norms) = &self.kv_norms {
            // SAFETY: by contract.
            call.kv_norms(pool, unsafe { norms.slice_mut() })?;
        }
        Ok(())
    }
}
