//! The append of new rows to the paged KV cache, which `PagedKvAppend` and `HstuAttention` share.

use std::mem::MaybeUninit;

use pagoda_kernels::cuda::{CUstream, Gpu};
use pagoda_kernels::{CheckedAppend, PagedKvAppend, cpu};

use super::cache::CacheInputs;
use super::rows::RowInputs;
use crate::ort::{InputTensor, KernelContext, OnnxElement, OpError, OutputTensor};
use crate::side_channel::wait_for_arrivals;

/// The inputs of an append.
pub struct AppendInputs<'a> {
    /// The keys of the call's rows.
    pub key: &'a InputTensor<'a>,
    /// The values of the call's rows.
    pub value: &'a InputTensor<'a>,
    /// The users that the rows belong to.
    pub rows: &'a RowInputs<'a>,
    /// The pages that the rows are written to.
    pub cache: &'a CacheInputs<'a>,
}

impl<'a> AppendInputs<'a> {
    /// The call, for the CPU kernels. It holds no slice of the pool, because the output may be the same buffer.
    ///
    /// # Safety
    /// The tensors are in host memory, and key and value have elements of `T`. Nothing writes to them while the call lives,
    /// except to the pool.
    pub unsafe fn on_host<T: OnnxElement>(&self) -> PagedKvAppend<'a, T> {
        // SAFETY: by contract.
        unsafe {
            PagedKvAppend {
                rows: self.rows.on_host(),
                key: self.key.slice(),
                value: self.value.slice(),
                pages: self.cache.on_host(),
            }
        }
    }

    /// Output `index`, which takes the updated pool. It is the pool itself, or disjoint from it; it is disjoint from everything
    /// else.
    pub fn output(&self, context: &KernelContext, index: usize) -> Result<OutputTensor, OpError> {
        let pool = &self.cache.pool;
        let output = context.output(index, &pool.dims)?;
        output.check_disjoint([self.key, self.value])?;
        output.check_disjoint(self.rows.tensors())?;
        output.check_disjoint(self.cache.tensors())?;
        if !self.is_in_place(&output) {
            output.check_disjoint([pool])?;
        }
        Ok(output)
    }

    /// Writes the pool with the new rows to the output, on the CPU.
    ///
    /// # Safety
    /// `output` comes from [`output`](Self::output), is in host memory and has elements of `T`. Nothing else reads or writes it
    /// during the call. `checked` comes from [`on_host`](Self::on_host).
    pub unsafe fn write<T: OnnxElement>(
        &self,
        checked: &CheckedAppend<'_, T>,
        output: &OutputTensor,
        context: &KernelContext,
    ) -> Result<(), OpError> {
        // SAFETY: by contract.
        unsafe { self.copy_on_host::<T>(output, context) };
        // SAFETY: the output is initialised, by the copy or because it is the pool. It is disjoint from everything else.
        let to = unsafe { output.slice_mut::<T>() };
        if to.is_empty() {
            return Ok(());
        }
        Ok(checked.run(to, context)?)
    }

    /// Copies the pool to the output, unless the output is the pool.
    ///
    /// # Safety
    /// As for [`write`](Self::write), of a pool with elements of `P`.
    pub unsafe fn copy_on_host<P: Copy + Send + Sync>(&self, output: &OutputTensor, context: &KernelContext) {
        if !self.is_in_place(output) {
            // SAFETY: by contract; the two have the same length and are disjoint.
            unsafe { cpu::copy(self.cache.pool.slice::<P>(), output.slice_mut::<MaybeUninit<P>>(), context) };
        }
    }

    /// Enqueues the copy of the pool to the output, unless the output is the pool. The append kernel runs after it.
    ///
    /// # Safety
    /// The tensors are on the device, have elements of `P` and the sizes of their shapes, and stay allocated until the stream
    /// has run the copy. `output` comes from [`output`](Self::output), and nothing else uses it until then.
    pub unsafe fn copy_on_device<P>(&self, gpu: &Gpu, output: &OutputTensor, stream: CUstream) -> Result<(), OpError> {
        let pool = &self.cache.pool;
        let bytes = pool.dims.iter().product::<usize>() * size_of::<P>();
        if bytes > 0 && !self.is_in_place(output) {
            // SAFETY: by contract.
            unsafe {
                wait_for_arrivals(pool.address(), stream)?;
                gpu.copy(output.address(), pool.address(), bytes, stream)?;
            }
        }
        Ok(())
    }

    fn is_in_place(&self, output: &OutputTensor) -> bool {
        std::ptr::eq(self.cache.pool.data, output.data)
    }
}
