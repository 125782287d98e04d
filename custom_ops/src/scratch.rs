//! Memory of the operator's provider that one call works in.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use ort_sys::{OrtAllocator, OrtValue};

use crate::context::{Context, check};
use crate::op::OpError;

/// Memory out of ONNX Runtime's arena, for the stream of the run. It goes back when this is dropped, though the stream may not
/// have come so far: until then the arena gives it to nothing but later work on the same stream, as it does with the scratch
/// memory of ONNX Runtime's own operators.
pub struct ScratchBuffer<'a> {
    context: &'a Context,
    allocator: *mut OrtAllocator,
    data: *mut c_void,
    bytes: usize,
}

impl Context {
    /// That many bytes where the first input lies, for an operator of the CUDA provider. None where none are asked for, or
    /// where there is no room for them.
    pub fn scratch(&self, bytes: usize) -> Result<Option<ScratchBuffer<'_>>, OpError> {
        if bytes == 0 {
            return Ok(None);
        }
        let (mut input, mut memory): (*const OrtValue, _) = (null(), null());
        let mut buffer = ScratchBuffer { context: self, allocator: null_mut(), data: null_mut(), bytes };
        // SAFETY: the context is live for the whole call, and so is its first input, which every operator has, and to which
        // the description of its memory belongs. The allocator and what it gives are the buffer's, which releases them, once.
        let given = unsafe {
            check(self.api, (self.api.KernelContext_GetInput)(self.raw, 0, &mut input))?;
            check(self.api, (self.api.GetTensorMemoryInfo)(input, &mut memory))?;
            check(self.api, (self.api.KernelContext_GetAllocator)(self.raw, memory, &mut buffer.allocator))?;
            check(self.api, (self.api.KernelContext_GetScratchBuffer)(self.raw, memory, bytes, &mut buffer.data))
        };
        Ok((given.is_ok() && !buffer.data.is_null()).then_some(buffer))
    }
}

impl ScratchBuffer<'_> {
    /// Where it begins on the GPU.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ScratchBuffer<'_> {
    fn drop(&mut self) {
        let api = self.context.api;
        // SAFETY: both were got in `scratch` and are given back here alone; null is what was not got.
        unsafe {
            if !self.data.is_null() {
                // A failure leaves the memory with the arena's session: there is no one to tell.
                let _ = check(api, (api.AllocatorFree)(self.allocator, self.data));
            }
            if !self.allocator.is_null() {
                (api.ReleaseAllocator)(self.allocator);
            }
        }
    }
}
