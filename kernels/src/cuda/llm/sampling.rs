//! Sampling on the GPU: rows of logits to tokens and their log probabilities.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::raw::SamplingCall;
pub use super::raw::{SamplingResult, SamplingRow, TokenEdit};
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;

/// Of cuda/llm/sampling.cuh.
const THREADS: u32 = 512;
const CLUSTER: usize = 8;
const SHARED_BYTES: usize = 43008;

/// Shared memory that a block can have on Hopper.
const MOST_SHARED: usize = 227 * 1024;

/// One call: a token for each of some rows. Addresses are those of the device, or of pinned memory of the host.
///
/// The sums of probabilities are exact sums of weights that are rounded to about 2^-45 of the largest one. So a row's token
/// depends on nothing but the row: not on the rows beside it, nor on the chip or on the path.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// `[logits_rows, vocab]` of f32.
    pub logits: CUdeviceptr,
    /// Rows of logits.
    pub logits_rows: usize,
    /// Logits of a row.
    pub vocab: usize,
    /// `[row_count]` of [`SamplingRow`].
    pub rows: CUdeviceptr,
    /// Rows to sample.
    pub row_count: usize,
    /// `[edit_count]` of [`TokenEdit`].
    pub edits: CUdeviceptr,
    /// Edits of all rows.
    pub edit_count: usize,
    /// `[mask_rows, ⌈vocab / 32⌉]` of u32: bit i % 32 of word i / 32 is 1 if token i is allowed.
    pub masks: CUdeviceptr,
    /// Rows of masks.
    pub mask_rows: usize,
    /// `[row_count]` of [`SamplingResult`].
    pub results: CUdeviceptr,
    /// [`Gpu::sampling_scratch_bytes`] bytes.
    pub scratch: CUdeviceptr,
}

impl Sampling {
    /// The most tokens that [`SamplingRow::top_n`] can ask for.
    pub const MOST_TOP: usize = 20;
}

/// Which kernel samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingPath {
    /// A cluster of blocks for each row, which keep the row in shared memory: Hopper.
    Cluster,
    /// A block for each row.
    Block,
}

impl Gpu {
    /// The kernels that take rows of this size, the fastest first.
    pub fn sampling_paths(&self, vocab: usize) -> &'static [SamplingPath] {
        let clusters = self.modules.sampling_sm90.is_some() && cluster_shared(vocab) <= MOST_SHARED;
        if clusters { &[SamplingPath::Cluster, SamplingPath::Block] } else { &[SamplingPath::Block] }
    }

    /// Memory that a call of so many rows needs.
    pub fn sampling_scratch_bytes(&self, row_count: usize, vocab: usize) -> usize {
        match self.sampling_paths(vocab)[0] {
            SamplingPath::Cluster => 0,
            SamplingPath::Block => block_scratch(row_count, vocab),
        }
    }

    /// Enqueues a call on a stream.
    ///
    /// # Safety
    /// The stream and all addresses are of this device, and the tensors are as long as the call says, alive and left alone until
    /// the stream has done this.
    pub unsafe fn sample(&self, call: &Sampling, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.sample_by(self.sampling_paths(call.vocab)[0], call, stream) }
    }

    /// As [`sample`](Self::sample), by a kernel that [`sampling_paths`](Self::sampling_paths) has. `SamplingPath::Block` needs
    /// scratch memory for a copy of the logits of all rows.
    ///
    /// # Safety
    /// As for [`sample`](Self::sample).
    ///
    /// # Panics
    /// If the device does not have the path.
    pub unsafe fn sample_by(&self, path: SamplingPath, call: &Sampling, stream: CUstream) -> Result<(), CudaError> {
        let Sampling { logits_rows, vocab, row_count, edit_count, mask_rows, .. } = *call;
        check_sizes(&[
            ("rows of logits", logits_rows),
            ("vocabulary", vocab),
            ("rows", row_count.saturating_mul(CLUSTER)),
            ("edits", edit_count),
            ("masks", mask_rows),
        ])?;
        if row_count == 0 || vocab == 0 || logits_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        let (module, name, blocks, shared) = match path {
            SamplingPath::Cluster => {
                let module = self.modules.sampling_sm90.as_ref().expect("the path was offered");
                (module, "sample_rows_cluster", CLUSTER, cluster_shared(vocab))
            }
            SamplingPath::Block => (&self.modules.sampling, "sample_rows", 1, SHARED_BYTES),
        };
        let mut raw = SamplingCall {
            logits: call.logits,
            rows: call.rows,
            edits: call.edits,
            masks: call.masks,
            results: call.results,
            scratch: call.scratch,
            vocab: vocab as i32,
            logits_rows: logits_rows as i32,
            edit_count: edit_count as i32,
            mask_rows: mask_rows as i32,
            fraction_bits: fraction_bits(vocab),
            slice: slice(vocab, blocks) as i32,
        };
        // The limit of shared memory is set once for all sizes of vocabularies.
        let most = if path == SamplingPath::Cluster { MOST_SHARED } else { shared };
        let function = module.function(name, most)?;
        let arguments = &mut [from_mut(&mut raw).cast::<c_void>()];
        // SAFETY: the kernel takes a `SamplingCall`; the rest is the caller's.
        unsafe { function.launch((row_count * blocks) as u32, THREADS, shared, stream, arguments) }
    }
}

/// Tokens of each of so many blocks.
fn slice(vocab: usize, blocks: usize) -> usize {
    vocab.div_ceil(blocks).next_multiple_of(4)
}

fn cluster_shared(vocab: usize) -> usize {
    SHARED_BYTES.saturating_add(slice(vocab, CLUSTER).saturating_mul(size_of::<f32>()))
}

fn block_scratch(row_count: usize, vocab: usize) -> usize {
    row_count.saturating_mul(vocab).saturating_mul(size_of::<f32>())
}

/// A weight is up to a little above 1, and the sum of all weights has to stay below 2^63.
fn fraction_bits(vocab: usize) -> i32 {
    62 - vocab.next_power_of_two().trailing_zeros() as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_the_vocabulary() {
        for vocab in [1, 3, 4, 31, 32, 33, 300, 32_000, 128_256, 151_936, 262_144] {
            assert!(slice(vocab, CLUSTER) * CLUSTER >= vocab && slice(vocab, 1) >= vocab, "{vocab}");
            assert!(cluster_shared(vocab) <= MOST_SHARED, "{vocab}");
            assert!((vocab as f64) * f64::from(fraction_bits(vocab)).exp2() < 63_f64.exp2(), "{vocab}");
        }
        assert_eq!((fraction_bits(1), fraction_bits(128_256), fraction_bits(131_072)), (62, 45, 45));
    }
}
