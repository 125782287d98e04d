//! Packs tokens out of their pages, and unpacks them: a history on its way between the pool and the host.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::error::CudaError;
use super::gpu::Gpu;
use super::raw::Move;
use super::sizes::{MOST, copy_width};

const THREADS: u32 = 256;
/// Enough to saturate the link to the host, and few enough to leave the device to other kernels.
const MOST_BLOCKS: usize = 264;

/// Tokens of one user in one layer: in pages of a pool, and packed, keys first, then values.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// `[pool_pages, 2, page_size, row_bytes]`.
    pub pool: CUdeviceptr,
    /// How many pages the pool has.
    pub pool_pages: usize,
    /// How many tokens a page holds.
    pub page_size: usize,
    /// Bytes of the keys, or of the values, of a token: a multiple of 2.
    pub row_bytes: usize,
    /// `[page_entries]` of i32: the user's pages in order of position.
    pub pages: CUdeviceptr,
    /// How many there are.
    pub page_entries: usize,
    /// `[2, held, row_bytes]`.
    pub packed: CUdeviceptr,
    /// How many tokens are packed.
    pub held: usize,
    /// How many of them come before those that are moved.
    pub skip: usize,
    /// The place in the pages of the first token that is moved.
    pub first: usize,
    /// How many are moved.
    pub count: usize,
}

impl Tokens {
    fn check(&self) -> Result<(), CudaError> {
        let Self { page_size, row_bytes, page_entries, held, skip, count, .. } = *self;
        if skip.checked_add(count).is_none_or(|end| end > held) {
            return Err(CudaError::Unsupported(format!("{count} tokens after {skip}, expected up to {held}")));
        }
        let even = row_bytes > 0 && row_bytes.is_multiple_of(2);
        if page_size == 0 || !even || [page_size, row_bytes, page_entries, held].iter().any(|n| *n > MOST) {
            let message = format!("{page_entries} pages of {page_size} rows of {row_bytes} bytes, {held} tokens");
            return Err(CudaError::Unsupported(format!(
                "{message}: expected up to {MOST}, and an even number of bytes"
            )));
        }
        Ok(())
    }
}

impl Gpu {
    /// Enqueues the packing of a user's tokens out of their pages on a stream.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention).
    pub unsafe fn pack(&self, tokens: &Tokens, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { launch(self, "pack", tokens, stream) }
    }

    /// Enqueues the unpacking of a user's tokens into their pages on a stream.
    ///
    /// # Safety
    /// As for [`append`](Self::append).
    pub unsafe fn unpack(&self, tokens: &Tokens, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { launch(self, "unpack", tokens, stream) }
    }
}

/// # Safety
/// As for [`Gpu::pack`] and [`Gpu::unpack`].
unsafe fn launch(gpu: &Gpu, kernel: &str, tokens: &Tokens, stream: CUstream) -> Result<(), CudaError> {
    tokens.check()?;
    if tokens.count == 0 {
        return Ok(());
    }
    let width = copy_width(tokens.row_bytes, tokens.pool | tokens.packed);
    let function = gpu.modules.kv_pack.function(&format!("{kernel}_{width}"), 0)?;
    let mut raw = Move {
        pool: tokens.pool,
        packed: tokens.packed,
        pages: tokens.pages,
        pool_pages: tokens.pool_pages as i64,
        held: tokens.held as i64,
        skip: tokens.skip as i64,
        first: tokens.first as i64,
        count: tokens.count as i64,
        page_entries: tokens.page_entries as i32,
        page_size: tokens.page_size as i32,
        row_bytes: tokens.row_bytes as i32,
    };
    let blocks = (2 * tokens.count).div_ceil(THREADS as usize / 32).min(MOST_BLOCKS) as u32;
    // SAFETY: the kernel takes a `Move`.
    unsafe { function.launch(blocks, THREADS, 0, stream, &mut [from_mut(&mut raw).cast::<c_void>()]) }
}
