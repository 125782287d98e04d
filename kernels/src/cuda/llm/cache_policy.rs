//! Cache policies on the GPU: the slots of a step's tokens, and the scores of slots.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw::PolicyCall;
pub use super::raw::{PolicyLayer, PolicyStep};
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;

/// Of cuda/llm/cache_policy.cu.
const THREADS: u32 = 256;

/// The slots of a step's sequences, in all layers. Addresses are those of the device.
#[derive(Clone, Copy, Debug)]
pub struct SlotPolicies {
    /// `[layer_count]` of [`PolicyLayer`].
    pub layers: CUdeviceptr,
    /// Layers.
    pub layer_count: usize,
    /// `[layer_count, sequences]` of [`PolicyStep`].
    pub steps: CUdeviceptr,
    /// Sequences of the step.
    pub sequences: usize,
    /// Heads of each layer.
    pub heads: usize,
    /// Sequences whose slots are known.
    pub states: usize,
    /// Rows that the tensors of a step have memory for.
    pub total_rows: usize,
}

impl Gpu {
    /// Enqueues the plan of a step: `write_slots`, `chosen` and `token_pos`. What is known of the slots stays as it is.
    ///
    /// # Safety
    /// The addresses are of this device, also those of the layers, and as long as the call says until the stream has run it. Nothing
    /// else writes them meanwhile, or reads what is written. The tensors that the steps' rules need are there.
    pub unsafe fn plan_slots(&self, call: &SlotPolicies, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_policy("plan_slots", call, stream) }
    }

    /// Enqueues the end of a step that has run: its tokens are in the slots that the plan chose, and scores grow by `weights`.
    ///
    /// # Safety
    /// As for [`plan_slots`](Self::plan_slots), which was called with the same steps.
    pub unsafe fn commit_slots(&self, call: &SlotPolicies, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_policy("commit_slots", call, stream) }
    }

    /// # Safety
    /// As for [`plan_slots`](Self::plan_slots); the kernel takes a `PolicyCall`.
    unsafe fn launch_policy(&self, name: &str, call: &SlotPolicies, stream: CUstream) -> Result<(), CudaError> {
        let SlotPolicies { layers, layer_count, steps, sequences, heads, states, total_rows } = *call;
        let blocks = layer_count.saturating_mul(sequences).saturating_mul(heads);
        check_sizes(&[("layers, sequences and heads", blocks), ("states", states), ("rows", total_rows)])?;
        if blocks == 0 {
            return Ok(());
        }
        self.bind()?;
        let mut raw = PolicyCall {
            layers,
            steps,
            layer_count: layer_count as i32,
            sequences: sequences as i32,
            heads: heads as i32,
            states: states as i32,
            total_rows: total_rows as i32,
            unused: 0,
        };
        let function = self.modules.cache_policy.function(name, 0)?;
        let arguments = &mut [from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes a `PolicyCall`; the rest is the caller's.
        unsafe { function.launch(blocks as u32, THREADS, 0, stream, arguments) }
    }
}
