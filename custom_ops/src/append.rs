//! What `PagedKvAppend` and `HstuAttention` share: new history rows that go into the pages of a pool.

use std::mem::MaybeUninit;

use pagoda_kernels::cuda::{self, CUstream, Gpu};
use pagoda_kernels::{CheckedAppend, PagedKvAppend, cpu};

use crate::context::{Context, InputTensor, OutputTensor};
use crate::element::OnnxElement;
use crate::inputs::{CacheInputs, RowInputs};
use crate::op::OpError;

/// The inputs of an append.
pub struct AppendInputs<'a> {
    /// Keys of the call's rows.
    pub key: &'a InputTensor<'a>,
    /// Values of the call's rows.
    pub value: &'a InputTensor<'a>,
    /// Whose rows they are.
    pub rows: &'a RowInputs<'a>,
    /// Where they go.
    pub cache: &'a CacheInputs<'a>,
}

impl<'a> AppendInputs<'a> {
    /// The call, for the kernels of the CPU. No slice is made of the pool, which may be the output's buffer.
    ///
    /// # Safety
    /// The tensors are in host memory, key and value of `T`, and nothing writes to them while the call lives, but to the pool.
    pub unsafe fn on_host<T: OnnxElement>(&self) -> PagedKvAppend<'a, T> {
        // SAFETY: the caller's.
        unsafe {
            PagedKvAppend {
                rows: self.rows.on_host(),
                key: self.key.slice(),
                value: self.value.slice(),
                pages: self.cache.on_host(),
            }
        }
    }

    /// The output of that number, which may be the pool as a whole and must not lie over anything else.
    pub fn output(&self, context: &Context, index: usize) -> Result<OutputTensor, OpError> {
        let pool = &self.cache.pool;
        let output = context.output(index, &pool.dims)?;
        output.apart_from([self.key, self.value])?;
        output.apart_from(self.rows.tensors())?;
        output.apart_from(self.cache.tensors())?;
        if !self.is_in_place(&output) {
            output.apart_from([pool])?;
        }
        Ok(output)
    }

    /// Has the output hold the pool with the new rows, on the CPU.
    ///
    /// # Safety
    /// The output is that of [`output`](Self::output), in host memory and of `T`, and nothing else reads or writes it
    /// meanwhile; what is checked is that of [`on_host`](Self::on_host).
    pub unsafe fn write<T: OnnxElement>(
        &self,
        checked: &CheckedAppend<'_, T>,
        output: &OutputTensor,
        context: &Context,
    ) -> Result<(), OpError> {
        if !self.is_in_place(output) {
            // SAFETY: the caller's; the two are as long as each other and apart.
            unsafe { cpu::copy(self.cache.pool.slice::<T>(), output.slice_mut::<MaybeUninit<T>>(), context) };
        }
        // SAFETY: all of the output is written, by the copy or because it is the pool; it is apart from everything else.
        let to = unsafe { output.slice_mut::<T>() };
        if to.is_empty() {
            return Ok(());
        }
        Ok(checked.run(to, context)?)
    }

    /// Puts on a stream what comes before an append to the output: a copy of the pool, unless the output is the pool.
    ///
    /// # Safety
    /// The tensors are on the device, of `T`, as long as their shapes say and alive until the stream is done; the output is
    /// that of [`output`](Self::output), and nothing else touches it meanwhile.
    pub unsafe fn copy_on_device<T: OnnxElement>(
        &self,
        gpu: &Gpu,
        output: &OutputTensor,
        stream: CUstream,
    ) -> Result<(), OpError> {
        let pool = &self.cache.pool;
        let bytes = pool.dims.iter().product::<usize>() * size_of::<T>();
        if bytes > 0 && !self.is_in_place(output) {
            // SAFETY: the caller's.
            unsafe {
                cuda::hold_for_arrivals(pool.address(), stream)?;
                gpu.copy(output.address(), pool.address(), bytes, stream)?;
            }
        }
        Ok(())
    }

    fn is_in_place(&self, output: &OutputTensor) -> bool {
        std::ptr::eq(self.cache.pool.data, output.data)
    }
}
