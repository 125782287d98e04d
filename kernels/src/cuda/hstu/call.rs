//! Calls by device addresses, their checks, and the form in which kernels get them.

use cudarc::driver::sys::CUdeviceptr;

use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::raw::Call;
use crate::cuda::common::sizes::MOST;

/// How the rows `[T, H, D]` of a call are shared out among its users, as [`crate::Rows`].
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// `[B + 1]` of i32: where each user's rows begin.
    pub row_offsets: CUdeviceptr,
    /// `[B]` of i32: how many of each user's rows, the last ones, are candidates.
    pub num_candidates: CUdeviceptr,
    /// B.
    pub users: usize,
    /// T.
    pub total_rows: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
}

/// The users' pages, as [`crate::Pages`], and the pool that they lie in.
#[derive(Clone, Copy, Debug)]
pub struct Cache {
    /// `[pool_pages, 2, page_size, H, D]`.
    pub pool: CUdeviceptr,
    /// `[B]` of i32: how many tokens of each user are in the cache.
    pub cached_len: CUdeviceptr,
    /// `[B + 1]` of i32: where each user's page list begins in `page_ids`.
    pub page_indptr: CUdeviceptr,
    /// Pages in order of position, i32.
    pub page_ids: CUdeviceptr,
    /// How many entries `page_ids` has.
    pub page_entries: usize,
    /// How many pages the pool has.
    pub pool_pages: usize,
    /// How many tokens a page holds; a multiple of 8.
    pub page_size: usize,
}

/// One call of the operator `HstuAttention`, as [`crate::HstuAttention`].
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Of query, key, value, pool and output.
    pub element: Type,
    /// The rows of `query`, `key`, `value` and the output.
    pub rows: Rows,
    /// `[T, H, D]`.
    pub query: CUdeviceptr,
    /// `[T, H, D]`.
    pub key: CUdeviceptr,
    /// `[T, H, D]`.
    pub value: CUdeviceptr,
    /// `[T, H, D]`; written.
    pub output: CUdeviceptr,
    /// Without it no user has cached tokens.
    pub cache: Option<Cache>,
    /// The new history rows go into the pool too, as [`Append`] has them; needs a cache.
    pub append: bool,
    /// `[B]` of i32: leading rows that see the whole history.
    pub num_contextual: Option<CUdeviceptr>,
    /// What scores are multiplied by; 0 stands for 1/√D.
    pub alpha: f32,
    /// What the sum is divided by; at least 1.
    pub scaling_seqlen: i64,
    /// Candidates in a group; at least 1.
    pub target_group_size: i64,
    /// How far back a row sees; 0 = all the way.
    pub max_attn_len: i64,
    /// Only candidates are computed: history rows come out as zeros. They are seen, and appended, all the same.
    pub candidates_only: bool,
    /// Whether nothing on the stream writes the index tensors: they are then read while the kernel in front still runs.
    pub settled_indices: bool,
}

/// Scratch memory on the device for one call. Its content before does not matter.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    /// Where it begins; a multiple of 16.
    pub address: CUdeviceptr,
    /// How long it is.
    pub bytes: usize,
}

/// One call of the operator `PagedKvAppend`, in place on the pool.
#[derive(Clone, Copy, Debug)]
pub struct Append {
    /// Of key, value and pool.
    pub element: Type,
    /// The rows of `key` and `value`.
    pub rows: Rows,
    /// `[T, H, D]`.
    pub key: CUdeviceptr,
    /// `[T, H, D]`.
    pub value: CUdeviceptr,
    /// Where the rows go.
    pub cache: Cache,
}

impl Rows {
    /// Checks what is known on the host.
    fn check(&self) -> Result<(), CudaError> {
        let Rows { users, total_rows, heads, head_size, .. } = *self;
        if heads == 0 || head_size == 0 || [users, total_rows, heads, head_size].iter().any(|n| *n > MOST) {
            let shape = format!("[{total_rows}, {heads}, {head_size}] with {users} users");
            return Err(CudaError::Unsupported(format!("shape {shape}: expected 1 to {MOST} heads and elements")));
        }
        Ok(())
    }

    fn raw(&self) -> Call {
        Call {
            row_offsets: self.row_offsets,
            num_candidates: self.num_candidates,
            users: self.users as i32,
            total_rows: self.total_rows as i32,
            heads: self.heads as i32,
            head_size: self.head_size as i32,
            ..Call::default()
        }
    }
}

impl Cache {
    fn check(&self) -> Result<(), CudaError> {
        let Cache { page_size, page_entries, pool_pages, .. } = *self;
        if page_size == 0 || !page_size.is_multiple_of(8) {
            return Err(CudaError::Unsupported(format!("page_size {page_size}, expected a multiple of 8")));
        }
        if [page_size, page_entries, pool_pages].iter().any(|n| *n > MOST) {
            let message = format!("{page_entries} page ids, {pool_pages} pages of {page_size}: expected up to {MOST}");
            return Err(CudaError::Unsupported(message));
        }
        Ok(())
    }

    fn add_to(&self, raw: Call) -> Call {
        Call {
            pool: self.pool,
            cached_len: self.cached_len,
            page_indptr: self.page_indptr,
            page_ids: self.page_ids,
            pool_pages: self.pool_pages as i64,
            page_size: self.page_size as i32,
            page_entries: self.page_entries as i32,
            ..raw
        }
    }

    /// Rows of H·D elements that the pool has.
    pub(super) fn pool_rows(&self) -> usize {
        self.pool_pages * 2 * self.page_size
    }
}

impl Attention {
    pub(super) fn check(&self) -> Result<(), CudaError> {
        self.rows.check()?;
        self.cache.map_or(Ok(()), |cache| cache.check())?;
        if self.append && self.cache.is_none() {
            let message = "append without a cache: expected one for the new history rows to go into";
            return Err(CudaError::Unsupported(message.to_owned()));
        }
        if self.rows.head_size > 512 {
            return Err(CudaError::Unsupported(format!("head size {}, expected up to 512", self.rows.head_size)));
        }
        let attributes = [
            ("scaling_seqlen", self.scaling_seqlen, 1),
            ("target_group_size", self.target_group_size, 1),
            ("max_attn_len", self.max_attn_len, 0),
        ];
        for (name, value, least) in attributes {
            if value < least {
                return Err(CudaError::Unsupported(format!("{name} {value}, expected {least} or more")));
            }
        }
        if !self.alpha.is_finite() {
            return Err(CudaError::Unsupported(format!("alpha {}, expected a finite number", self.alpha)));
        }
        Ok(())
    }

    /// The call's append, if it has one.
    pub(super) fn appended(&self) -> Option<Append> {
        let Attention { element, rows, key, value, .. } = *self;
        self.cache.filter(|_| self.append).map(|cache| Append { element, rows, key, value, cache })
    }

    /// 16-bit elements, a head size that the kernels are compiled for, and tensors that begin at 16 bytes.
    pub(super) fn suits_matrix_units(&self) -> bool {
        let pool = self.cache.map_or(0, |cache| cache.pool);
        let addresses = [self.query, self.key, self.value, self.output, pool];
        self.element != Type::F32
            && [32, 64, 128, 256].contains(&self.rows.head_size)
            && addresses.iter().all(|address| address % 16 == 0)
    }

    /// The TMA counts rows in 32 bits, and bytes from one row to the next in 40.
    pub(super) fn suits_copy_engine(&self) -> bool {
        let rows = self.cache.map_or(0, |cache| cache.pool_rows());
        self.suits_matrix_units() && rows < MOST && self.rows.heads * self.rows.head_size < 1 << 38
    }

    pub(super) fn raw(&self) -> Call {
        let head_size = self.rows.head_size as f64;
        let raw = Call {
            query: self.query,
            key: self.key,
            value: self.value,
            output: self.output,
            num_contextual: self.num_contextual.unwrap_or(0),
            group: self.target_group_size,
            window: self.max_attn_len,
            candidates_only: i32::from(self.candidates_only),
            alpha: if self.alpha == 0.0 { (1.0 / head_size.sqrt()) as f32 } else { self.alpha },
            scale: (1.0 / self.scaling_seqlen as f64) as f32,
            ..self.rows.raw()
        };
        self.cache.map_or(raw, |cache| cache.add_to(raw))
    }
}

impl Append {
    /// Checks what is known on the host. [`Gpu::append`](crate::cuda::Gpu::append) does so too: this is for callers
    /// that write to the pool before.
    pub fn check(&self) -> Result<(), CudaError> {
        self.rows.check()?;
        self.cache.check()
    }

    pub(super) fn raw(&self) -> Call {
        self.cache.add_to(Call { key: self.key, value: self.value, ..self.rows.raw() })
    }
}

/// The most blocks of `height` rows that users with `rows` rows together can have.
pub(super) fn row_blocks(call: &Attention, rows: usize, height: usize) -> usize {
    (rows + call.rows.users.min(rows) * (height - 1)) / height
}

pub(super) fn blocks(count: usize) -> Result<u32, CudaError> {
    i32::try_from(count)
        .map(|count| count as u32)
        .map_err(|_| CudaError::Unsupported(format!("{count} blocks of rows, expected up to {}", i32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_append_needs_a_cache_and_is_of_the_calls_own_rows() {
        let rows = Rows { row_offsets: 16, num_candidates: 32, users: 2, total_rows: 3, heads: 1, head_size: 8 };
        let mut call = Attention {
            element: Type::F16,
            rows,
            query: 48,
            key: 64,
            value: 80,
            output: 96,
            cache: None,
            append: true,
            num_contextual: None,
            alpha: 0.0,
            scaling_seqlen: 1,
            target_group_size: 1,
            max_attn_len: 0,
            candidates_only: false,
            settled_indices: false,
        };
        let refused = call.check().unwrap_err().to_string();
        assert!(refused.contains("append without a cache"), "{refused}");
        let (pool, cached_len, page_indptr, page_ids) = (112, 128, 144, 160);
        let sizes = Cache { pool, cached_len, page_indptr, page_ids, page_entries: 4, pool_pages: 5, page_size: 8 };
        call.cache = Some(sizes);
        call.check().unwrap();
        let append = call.appended().unwrap();
        append.check().unwrap();
        assert_eq!((append.key, append.value, append.cache.pool, append.rows.total_rows), (64, 80, 112, 3));
        assert_eq!(append.element, Type::F16);
        call.append = false;
        assert!(call.appended().is_none());
    }
}
