//! Scratch memory for one call of an operator on the CUDA provider.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ort_sys::{OrtAllocator, OrtValue};

use super::context::KernelContext;
use super::error::{OpError, check};

/// Memory from ONNX Runtime's arena, bound to the stream of the run. Dropping the buffer returns it to the arena, even while
/// the stream still uses it: the arena then lends it only to later work on the same stream, as it does with the scratch memory
/// of ONNX Runtime's own operators.
pub struct ScratchBuffer<'a> {
    context: &'a KernelContext,
    allocator: *mut OrtAllocator,
    data: *mut c_void,
    bytes: usize,
}

impl KernelContext {
    /// Allocates scratch memory on the device of the first input. `None` if `bytes` is 0, or if the arena is full.
    pub fn scratch(&self, bytes: usize) -> Result<Option<ScratchBuffer<'_>>, OpError> {
        if bytes == 0 {
            return Ok(None);
        }
        let (mut input, mut memory): (*const OrtValue, _) = (null(), null());
        let mut buffer = ScratchBuffer { context: self, allocator: null_mut(), data: null_mut(), bytes };
        // SAFETY: the context is live for the whole call. So is its first input, which every operator has, and which owns the
        // description of its memory. The buffer owns the allocator and the memory, and releases them once.
        let allocated = unsafe {
            check(self.api, (self.api.KernelContext_GetInput)(self.raw, 0, &mut input))?;
            check(self.api, (self.api.GetTensorMemoryInfo)(input, &mut memory))?;
            check(self.api, (self.api.KernelContext_GetAllocator)(self.raw, memory, &mut buffer.allocator))?;
            check(self.api, (self.api.KernelContext_GetScratchBuffer)(self.raw, memory, bytes, &mut buffer.data))
        };
        Ok((allocated.is_ok() && !buffer.data.is_null()).then_some(buffer))
    }

    /// The same for an operator of language models that can not do without. `None` if `bytes` is 0.
    pub fn needed_scratch(&self, operator: &str, bytes: usize) -> Result<Option<ScratchBuffer<'_>>, OpError> {
        let scratch = self.scratch(bytes)?;
        if scratch.is_none() && bytes > 0 {
            let message = format!(
                "{operator} needs {bytes} bytes of the GPU's memory beside its tensors, which are not free: give the pages less of it, or a step fewer tokens"
            );
            return Err(OpError::failed(message));
        }
        Ok(scratch)
    }
}

impl ScratchBuffer<'_> {
    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ScratchBuffer<'_> {
    fn drop(&mut self) {
        let api = self.context.api;
        // SAFETY: `scratch` acquired both, and only this releases them. Null means that it was not acquired.
        unsafe {
            if !self.data.is_null() {
                // On failure the memory stays allocated until the session's arena is destroyed; `drop` can not return an error.
                let _ = check(api, (api.AllocatorFree)(self.allocator, self.data));
            }
            if !self.allocator.is_null() {
                (api.ReleaseAllocator)(self.allocator);
            }
        }
    }
}
