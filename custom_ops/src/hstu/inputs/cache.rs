//! The paged KV cache of a batch.

use pagoda_kernels::cuda;
use pagoda_kernels::{KvFormat, Pages};

use super::rows::RowInputs;
use crate::ort::{InputTensor, KernelContext, OpError};

/// The page table of the users, and the pool that holds the pages.
pub struct CacheInputs<'a> {
    cached_len: InputTensor<'a>,
    page_indptr: InputTensor<'a>,
    page_ids: InputTensor<'a>,
    /// The pool.
    pub pool: InputTensor<'a>,
    pool_pages: usize,
    page_size: usize,
}

impl<'a> CacheInputs<'a> {
    /// Reads inputs 5 to 7. `None` if those and the pool are all omitted; an error if only some are.
    pub fn read(
        context: &'a KernelContext,
        pool: Option<InputTensor<'a>>,
        rows: &RowInputs<'_>,
        format: KvFormat,
    ) -> Result<Option<Self>, OpError> {
        let [cached_len, page_indptr, page_ids] =
            [context.optional_input(5)?, context.optional_input(6)?, context.optional_input(7)?];
        let (cached_len, page_indptr, page_ids, pool) = match (cached_len, page_indptr, page_ids, pool) {
            (None, None, None, None) => return Ok(None),
            (Some(cached_len), Some(page_indptr), Some(page_ids), Some(pool)) => {
                (cached_len, page_indptr, page_ids, pool)
            }
            _ => {
                return Err(OpError::invalid(
                    "cached_len, page_indptr, page_ids and kv_pool go together: give all four or none",
                ));
            }
        };
        for tensor in [&cached_len, &page_indptr, &page_ids] {
            tensor.shape::<1>()?;
        }
        let [pool_pages, page_size] = pool_shape(&pool, rows.heads, format.pool_width(rows.head_size))?;
        Ok(Some(Self { cached_len, page_indptr, page_ids, pool, pool_pages, page_size }))
    }

    /// The index tensors, without the pool.
    pub fn tensors(&self) -> [&InputTensor<'a>; 3] {
        [&self.cached_len, &self.page_indptr, &self.page_ids]
    }

    /// The shape that the scales of a quantised pool have.
    pub fn scales_shape(&self, rows: &RowInputs<'_>, format: KvFormat) -> [usize; 5] {
        [self.pool_pages, 2, self.page_size, rows.heads, format.scales_width()]
    }

    /// The argument of the CPU kernels.
    ///
    /// # Safety
    /// The index tensors are in host memory, and nothing writes to them while the slices live.
    pub unsafe fn on_host(&self) -> Pages<'a> {
        let Self { pool_pages, page_size, .. } = *self;
        // SAFETY: by contract; operators declare the inputs as I32.
        let (cached_len, page_indptr, page_ids) =
            unsafe { (self.cached_len.slice(), self.page_indptr.slice(), self.page_ids.slice()) };
        Pages { cached_len, page_indptr, page_ids, pool_pages, page_size }
    }

    /// The argument of the CUDA kernels.
    pub fn on_device(&self, users: usize) -> Result<cuda::Cache, OpError> {
        self.cached_len.expect_len(users, "one a user")?;
        self.page_indptr.expect_len(users + 1, "one more than there are users")?;
        Ok(cuda::Cache {
            pool: self.pool.address(),
            cached_len: self.cached_len.address(),
            page_indptr: self.page_indptr.address(),
            page_ids: self.page_ids.address(),
            page_entries: self.page_ids.dims[0],
            pool_pages: self.pool_pages,
            page_size: self.page_size,
        })
    }
}

/// The number of pages and the page size of a pool for rows of `heads` heads of `width` elements.
fn pool_shape(pool: &InputTensor<'_>, heads: usize, width: usize) -> Result<[usize; 2], OpError> {
    match pool.shape()? {
        [pages, 2, page_size, h, d] if (h, d) == (heads, width) => Ok([pages, page_size]),
        _ => Err(OpError::invalid(format!(
            "{}: shape {:?} expected to be [pages, 2, page_size, {heads}, {width}]",
            pool.name, pool.dims
        ))),
    }
}
