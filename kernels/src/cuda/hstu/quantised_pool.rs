//! `HstuAttention` over a quantised pool: the pages of a call are opened into memory that the kernels of native pools take.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::call::{Attention, Cache, Scratch, blocks};
use super::raw;
use crate::KvFormat;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::MOST;

/// Of cuda/hstu/quantised_pool.cu.
const THREADS: u32 = 256;
/// Numbers that a thread opens at once there.
const WIDE: usize = 8;
/// What the parts of the opened memory are aligned to.
const ALIGNMENT: usize = 256;

/// What makes the pool of a call a quantised one: the call's pool has the codes.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedPages {
    /// Any but [`KvFormat::Native`].
    pub format: KvFormat,
    /// `[pool_pages, 2, page_size, H, scales_width]` of f16, from a multiple of 4 on.
    pub scales: CUdeviceptr,
}

/// Where a call is opened, counted from the first byte: keys, values, pages, the page ids; and how much it takes.
struct Parts {
    value: usize,
    pages: usize,
    page_ids: usize,
    bytes: usize,
}

impl Attention {
    /// How much memory [`Gpu::open_pages`] takes for this call: its keys and values, and the pages of its users in the type of the
    /// keys. It depends on the shapes alone.
    ///
    /// # Errors
    /// For sizes that kernels do not take.
    pub fn opened_bytes(&self) -> Result<usize, CudaError> {
        Ok(self.parts()?.bytes)
    }

    /// The call over what [`Gpu::open_pages`] writes to `memory`.
    ///
    /// # Errors
    /// As for [`opened_bytes`](Self::opened_bytes).
    pub fn opened(&self, memory: CUdeviceptr) -> Result<Self, CudaError> {
        let Parts { value, pages, page_ids, .. } = self.parts()?;
        let at = |offset: usize| memory + offset as CUdeviceptr;
        let cache = self.cache.map(|cache| Cache {
            pool: at(pages),
            page_ids: at(page_ids),
            pool_pages: cache.page_entries,
            ..cache
        });
        // The page ids are written by the kernel in front.
        Ok(Self { key: at(0), value: at(value), cache, append: false, settled_indices: false, ..*self })
    }

    fn parts(&self) -> Result<Parts, CudaError> {
        self.check()?;
        let refuse = |message: String| Err(CudaError::Unsupported(message));
        let Some(cache) = self.cache else { return refuse("a quantised pool: missing, expected a cache".into()) };
        let (heads, head_size) = (self.rows.heads, self.rows.head_size);
        let size = |factors: &[usize]| {
            let bytes = factors.iter().try_fold(self.element.bytes(), |size, factor| size.checked_mul(*factor));
            bytes.and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT))
        };
        let page = cache.page_size.saturating_mul(heads).saturating_mul(head_size);
        if page > MOST {
            return refuse(format!("pages of {page} keys' numbers, expected up to {MOST}"));
        }
        let sizes = (size(&[self.rows.total_rows, heads, head_size]), size(&[cache.page_entries, 2, page]));
        let (Some(rows), Some(pages)) = sizes else {
            return refuse(format!("{} page ids, expected fewer: split the batch", cache.page_entries));
        };
        let page_ids = 2 * rows + pages;
        Ok(Parts { value: rows, pages: 2 * rows, page_ids, bytes: page_ids + cache.page_entries * size_of::<i32>() })
    }
}

impl Gpu {
    /// Enqueues on a stream: the new history rows of a call that appends go into its quantised pool, and what the call reads is
    /// written to `memory` as numbers, the new rows as they are stored. Returns the call over that memory, for
    /// [`attention`](Self::attention).
    ///
    /// # Safety
    /// As for [`attention`](Self::attention); nothing else touches `memory` until the stream has run the call that is returned.
    pub unsafe fn open_pages(
        &self,
        call: &Attention,
        pool: QuantisedPages,
        memory: Scratch,
        stream: CUstream,
    ) -> Result<Attention, CudaError> {
        let refuse = |message: String| Err(CudaError::Unsupported(message));
        let (opened, bytes) = (call.opened(memory.address)?, call.opened_bytes()?);
        let (Some(cache), Some(pages)) = (call.cache, opened.cache) else {
            return refuse("a quantised pool: missing, expected a cache".into());
        };
        let format = match pool.format {
            KvFormat::Native => return refuse("a quantised pool: its format is native, expected another".into()),
            KvFormat::Int8 => "int8",
            KvFormat::Int4 => "int4",
            KvFormat::Fp8 => "fp8",
        };
        if pool.format == KvFormat::Int4 && !call.rows.head_size.is_multiple_of(2) {
            return refuse(format!("heads of {} numbers, expected an even number for int4", call.rows.head_size));
        }
        if !call.append {
            return refuse("a quantised pool: the call does not append, expected one that does".into());
        }
        if memory.bytes < bytes || !memory.address.is_multiple_of(16) || !pool.scales.is_multiple_of(4) {
            return refuse(format!("{} bytes at {:#x}, expected {bytes}, aligned", memory.bytes, memory.address));
        }
        if call.rows.total_rows == 0 && cache.page_entries == 0 {
            return Ok(opened);
        }
        self.bind()?;
        let row_blocks = (call.rows.total_rows * call.rows.heads).div_ceil(THREADS as usize / 32);
        let grid = blocks(row_blocks + 2 * cache.page_entries)?;
        let mut is_wide = i32::from(call.rows.head_size.is_multiple_of(WIDE) && cache.pool.is_multiple_of(8));
        let mut raw_pool = raw::QuantisedPool {
            scales: pool.scales,
            key: opened.key,
            value: opened.value,
            pages: pages.pool,
            page_ids: pages.page_ids,
            row_blocks: row_blocks as i32,
        };
        let mut raw = call.raw();
        let mut arguments =
            [from_mut(&mut raw).cast::<c_void>(), from_mut(&mut raw_pool).cast(), from_mut(&mut is_wide).cast()];
        let name = format!("open_{}_{format}", call.element.name());
        let function = self.modules.quantised_pool.function(&name, 0)?;
        // SAFETY: the caller's; the kernel takes a `Call`, a `QuantisedPool` and an `int`, and waits for the kernel before it on
        // chips that let it begin earlier.
        unsafe { self.launch_dependent(function, grid, THREADS, 0, stream, &mut arguments) }?;
        Ok(opened)
    }
}

#[cfg(test)]
mod tests {
    use super::super::call::Rows;
    use super::*;
    use crate::cuda::Type;

    fn call(total_rows: usize, page_entries: usize) -> Attention {
        let rows = Rows { row_offsets: 16, num_candidates: 32, users: 2, total_rows, heads: 3, head_size: 20 };
        let (cached_len, page_indptr, page_ids) = (128, 144, 160);
        let cache = Cache { pool: 112, cached_len, page_indptr, page_ids, page_entries, pool_pages: 9, page_size: 8 };
        Attention {
            element: Type::F16,
            rows,
            query: 48,
            key: 64,
            value: 80,
            output: 96,
            cache: Some(cache),
            append: true,
            num_contextual: None,
            alpha: 0.0,
            scaling_seqlen: 1,
            target_group_size: 1,
            max_attn_len: 0,
            candidates_only: false,
            settled_indices: true,
        }
    }

    #[test]
    fn what_is_opened_lies_side_by_side() {
        let (before, memory) = (call(5, 4), 1 << 20);
        let opened = before.opened(memory).unwrap();
        let cache = opened.cache.unwrap();
        // 5 rows of 3 heads of 20 numbers of 2 bytes are 600; a page has 2 * 8 of them.
        assert_eq!([opened.key, opened.value, cache.pool].map(|at| at - memory), [0, 768, 2 * 768]);
        assert_eq!(cache.page_ids - cache.pool, (4 * 2 * 8 * 120_u64).next_multiple_of(256));
        assert_eq!(before.opened_bytes().unwrap() as u64, cache.page_ids - memory + 16);
        assert_eq!((cache.pool_pages, cache.page_entries), (4, 4));
        assert!(!opened.append && !opened.settled_indices);
        assert_eq!((opened.query, opened.output), (before.query, before.output));
    }

    #[test]
    fn sizes_that_can_not_be_opened_are_refused() {
        let refused = |call: Attention, message: &str| {
            let error = call.opened_bytes().unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        refused(Attention { cache: None, append: false, ..call(5, 4) }, "expected a cache");
        let mut large = call(5, 4);
        large.cache.as_mut().unwrap().page_size = 1 << 29;
        refused(large, "numbers, expected up to");
    }
}
