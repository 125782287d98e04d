//! `PagedAttention` on the GPU: which kernels compute a call.
//!
//! Which kernel computes a sequence depends on the call's shapes and on the sequence's own numbers, never on the rest of the
//! batch: a sequence has the same bits in any batch.

use cudarc::driver::sys::{CUdeviceptr, CUstream};

pub use super::paged_call::{HeadSlots, KeyWeights, PagedAttention, Rotation};
use super::{paged_attention_simt, paged_attention_sm80, paged_attention_sm90};
use crate::KvFormat;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::hstu::call::Scratch;

/// Kernels that compute `PagedAttention`; later ones are faster and take less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PagedPath {
    /// Every type and option, D up to 512.
    Plain,
    /// Tensor cores of sm_80 and later (mma.sync): f16 and bf16, D = 64, 96, 128 or 256, pages of int4 and fp8 with D = 64 or
    /// 128 alone. Decode splits the keys (split-KV). With key_weights it takes slots of heads alone.
    Mma,
    /// As `Mma`, with wgmma and TMA of sm_90a for prefill: native pages, D = 64 or 128, without softcap, slopes and slots of
    /// heads.
    Hopper,
}

impl PagedAttention {
    /// Bytes of scratch memory that the faster kernels take; 0 where only the plain one takes the call. It depends on the
    /// shapes (B, T, the heads, D, the page size and how many page ids there are) and on whether the tensors are aligned to 16 bytes.
    pub fn scratch_bytes(&self) -> usize {
        if !self.suits_matrix_units() {
            return 0;
        }
        let behind = match self.key_weights {
            Some(_) => self.kept_scores_bytes(),
            None => paged_attention_sm90::scratch_bytes(self),
        };
        self.partial_bytes().saturating_add(behind)
    }

    /// Whether the tensor cores' kernels take the shapes and the addresses.
    fn suits_matrix_units(&self) -> bool {
        let aligned = |address: CUdeviceptr, to: u64| address.is_multiple_of(to);
        let Self { query_heads, kv_heads, .. } = *self;
        self.element != Type::F32
            && kv_heads > 0
            && query_heads > 0
            && query_heads.is_multiple_of(kv_heads)
            && match self.format {
                KvFormat::Native | KvFormat::Int8 => matches!(self.head_size, 64 | 96 | 128 | 256),
                KvFormat::Int4 | KvFormat::Fp8 => matches!(self.head_size, 64 | 128),
            }
            && self
                .key_weights
                .is_none_or(|weights| self.total_rows > 0 && self.slots.is_some_and(|slots| slots.len == weights.len))
            && aligned(self.query | self.key | self.value | self.pool | self.output, 16)
            && aligned(self.scales.unwrap_or(0), 4)
    }
}

impl Gpu {
    /// The kernels that take a call on this device, slowest first.
    pub fn paged_paths(&self, call: &PagedAttention) -> Vec<PagedPath> {
        let needed = call.scratch_bytes();
        let enough = |scratch: Scratch| scratch.bytes >= needed && scratch.address.is_multiple_of(16);
        let mma = needed > 0 && call.scratch.is_some_and(enough) && self.modules.paged_decode_sm80.is_some();
        let hopper = mma && self.modules.paged_attention_sm90.is_some() && paged_attention_sm90::suits(call);
        let paths = [Some(PagedPath::Plain), mma.then_some(PagedPath::Mma), hopper.then_some(PagedPath::Hopper)];
        paths.into_iter().flatten().collect()
    }

    /// Enqueues `PagedAttention` on a stream, by the fastest kernels that take the call: the append, in place on the pool, and
    /// the attention over it.
    ///
    /// # Safety
    /// The addresses are of this device and as long as the call says, until the stream has run it. Nothing else writes them
    /// meanwhile, or reads what is written. Outputs are disjoint from inputs.
    pub unsafe fn paged_attention(&self, call: &PagedAttention, stream: CUstream) -> Result<(), CudaError> {
        let path = *self.paged_paths(call).last().expect("there is always a plain one");
        // SAFETY: the caller's.
        unsafe { self.paged_attention_by(path, call, stream) }
    }

    /// As [`paged_attention`](Self::paged_attention), by the kernels given.
    ///
    /// # Safety
    /// As for [`paged_attention`](Self::paged_attention).
    pub unsafe fn paged_attention_by(
        &self,
        path: PagedPath,
        call: &PagedAttention,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        call.check()?;
        if !self.paged_paths(call).contains(&path) {
            return Err(CudaError::Unsupported(format!("the {path:?} kernel does not take {call:?} on this device")));
        }
        self.bind()?;
        // SAFETY: the caller's.
        unsafe {
            match path {
                PagedPath::Plain => paged_attention_simt::launch(self, call, stream)?,
                PagedPath::Mma => paged_attention_sm80::launch(self, call, false, stream)?,
                PagedPath::Hopper => paged_attention_sm80::launch(self, call, true, stream)?,
            }
            paged_attention_simt::norms(self, call, stream)
        }
    }
}
