//! `HstuAttention` on the GPU: which kernel, with how many blocks.
//!
//! How many tokens each user has is known on the device alone. So the number of blocks is the most that any offsets can
//! ask for, and a block that finds no rows for itself ends at once.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::result::memset_d8_async;
use cudarc::driver::sys::CUstream;

use super::call::{Attention, Scratch, blocks, row_blocks};
use super::{append, attention_sm90};
use crate::cuda::common::error::{CudaError, asked};
use crate::cuda::common::gpu::Gpu;

/// Threads of a block of each kernel, and its rows; cuda/hstu/hstu_attention_*.cu.
const PLAIN_THREADS: usize = 128;
const MMA_THREADS: u32 = 128;
const MMA_ROWS: usize = 64;
/// A kernel that computes `HstuAttention`; later ones are faster and take less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// Every type, D up to 512.
    Plain,
    /// Tensor cores of sm_80 and later (mma.sync): f16 and bf16, D = 32, 64, 128 or 256.
    Mma,
    /// wgmma and TMA of sm_90a: as `Mma`.
    Hopper,
}

impl Gpu {
    /// The kernels that take a call on this device, slowest first.
    pub fn paths(&self, call: &Attention) -> Vec<Path> {
        let mut paths = vec![Path::Plain];
        paths.extend((self.modules.attention_sm80.is_some() && call.suits_matrix_units()).then_some(Path::Mma));
        paths.extend((self.modules.attention_sm90.is_some() && call.suits_copy_engine()).then_some(Path::Hopper));
        paths
    }

    /// Enqueues `HstuAttention` on a stream, by the fastest kernel that takes the call. Every element of the output is
    /// written that is in some user's rows. A call that appends does what [`append`](Self::append) does, too.
    ///
    /// # Safety
    /// Every address of the call is one of this device, of memory as long as the call's shapes say and alive until the
    /// stream has done this; nothing else writes it meanwhile, or touches the output, or what is appended. Where indices are
    /// said to be settled, nothing on the stream in front of this writes them.
    pub unsafe fn attention(&self, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
        let path = *self.paths(call).last().expect("there is always a plain one");
        // SAFETY: the caller's.
        unsafe { self.attention_by(path, call, stream) }
    }

    /// How much scratch memory on the device makes a call faster, if it is given to
    /// [`attention_in`](Self::attention_in); 0 where none does. It depends on the shapes alone: B, T, H, D, the page
    /// size and how many page ids there are.
    pub fn scratch_bytes(&self, call: &Attention) -> Result<usize, CudaError> {
        let most = self.most_scratch_bytes(call)?;
        self.bind()?;
        Ok(if most > 0 && attention_sm90::wants_scratch(self, call)? { most } else { 0 })
    }

    /// How much memory [`attention_in`](Self::attention_in) uses where it is given that much, faster or not.
    pub fn most_scratch_bytes(&self, call: &Attention) -> Result<usize, CudaError> {
        call.check()?;
        Ok(if self.paths(call).contains(&Path::Hopper) { attention_sm90::scratch_bytes(call) } else { 0 })
    }

    /// As [`attention`](Self::attention), with memory to work in, which is not used where it is less than
    /// [`most_scratch_bytes`](Self::most_scratch_bytes). The output is the same to the bit.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention); nothing else touches the scratch memory until the stream has done this.
    pub unsafe fn attention_in(&self, call: &Attention, scratch: Scratch, stream: CUstream) -> Result<(), CudaError> {
        let path = *self.paths(call).last().expect("there is always a plain one");
        // SAFETY: the caller's.
        unsafe { self.attend(path, call, Some(scratch), stream) }
    }

    /// As [`attention`](Self::attention), by the kernel given.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention).
    pub unsafe fn attention_by(&self, path: Path, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.attend(path, call, None, stream) }
    }

    /// # Safety
    /// As for [`attention_in`](Self::attention_in).
    unsafe fn attend(
        &self,
        path: Path,
        call: &Attention,
        scratch: Option<Scratch>,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        call.check()?;
        if !self.paths(call).contains(&path) {
            return Err(CudaError::Unsupported(format!("the {path:?} kernel does not take {call:?} on this device")));
        }
        if call.rows.total_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY (both): the caller's.
        if let Some(append) = call.appended().filter(|_| path != Path::Hopper) {
            // SAFETY: as above.
            unsafe { append::launch(self, &append, stream) }?;
        }
        // SAFETY: as above.
        unsafe { launch(self, path, call, scratch, stream) }
    }
}

/// # Safety
/// As for [`Gpu::attention`]; the kernel takes the call.
unsafe fn launch(
    gpu: &Gpu,
    path: Path,
    call: &Attention,
    scratch: Option<Scratch>,
    stream: CUstream,
) -> Result<(), CudaError> {
    // SAFETY: the caller's.
    unsafe {
        match path {
            Path::Plain => plain(gpu, call, stream),
            Path::Mma => mma(gpu, call, stream),
            Path::Hopper => attention_sm90::launch(gpu, call, scratch, stream),
        }
    }
}

/// # Safety
/// As for [`launch`].
unsafe fn plain(gpu: &Gpu, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
    let function = gpu.modules.attention_simt.function(&format!("plain_{}", call.element.name()), 0)?;
    let warps = call.rows.total_rows * call.rows.heads;
    let mut raw = call.raw();
    let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
    let blocks = blocks(warps.div_ceil(PLAIN_THREADS / 32))?;
    // SAFETY: the kernel takes a `Call`.
    unsafe { function.launch(blocks, PLAIN_THREADS as u32, 0, stream, &mut arguments) }
}

/// # Safety
/// As for [`launch`].
unsafe fn mma(gpu: &Gpu, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
    let head_size = call.rows.head_size;
    let tile = if head_size == 256 { 32 } else { 64 };
    let shared = (MMA_ROWS + 4 * tile) * head_size * 2;
    let module = gpu.modules.attention_sm80.as_ref().expect("the path was offered");
    let function = module.function(&format!("mma_{}_{head_size}", call.element.name()), shared)?;
    let mut raw = call.raw();
    let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
    let blocks = blocks(row_blocks(call, call.rows.total_rows, MMA_ROWS) * call.rows.heads)?;
    // SAFETY: the output is the caller's, and as long as that; the kernel takes a `Call`.
    unsafe {
        if call.candidates_only {
            // The kernel writes what it computes alone.
            let bytes = call.rows.total_rows * call.rows.heads * head_size * call.element.bytes();
            memset_d8_async(call.output, 0, bytes, stream).map_err(asked("clearing rows that are not computed"))?;
        }
        function.launch(blocks, MMA_THREADS, shared, stream, &mut arguments)
    }
}
