//! One call of `PagedAttention` on the GPU, as its kernels take it.

use cudarc::driver::sys::CUdeviceptr;

use super::raw;
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::sizes::check_sizes;
use crate::cuda::hstu::call::Scratch;
use crate::{KvFormat, Pairs};

/// The largest head that the kernels take.
const HEAD_SIZE: usize = 512;
/// Rows of a tile; `DECODE_ROWS` of cuda/llm/paged_parts.cuh.
pub(super) const ROWS: usize = 16;

/// One call of the operator `PagedAttention`, as [`crate::PagedAttention`]. Addresses are those of the device.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention {
    /// Of query, key, value, sinks and output, and of a native pool.
    pub element: Type,
    /// B.
    pub sequences: usize,
    /// T.
    pub total_rows: usize,
    /// Hq.
    pub query_heads: usize,
    /// Hkv.
    pub kv_heads: usize,
    /// D.
    pub head_size: usize,
    /// `[T, Hq, D]`.
    pub query: CUdeviceptr,
    /// `[T, Hkv, D]`.
    pub key: CUdeviceptr,
    /// `[T, Hkv, D]`.
    pub value: CUdeviceptr,
    /// `[T, Hq, D]`.
    pub output: CUdeviceptr,
    /// `[B + 1]`.
    pub row_offsets: CUdeviceptr,
    /// `[B]`.
    pub cached_len: CUdeviceptr,
    /// `[B + 1]`.
    pub page_indptr: CUdeviceptr,
    /// Page ids.
    pub page_ids: CUdeviceptr,
    /// How many page ids there are.
    pub page_entries: usize,
    /// The pool, which is written in place.
    pub pool: CUdeviceptr,
    /// The scales of a quantised pool.
    pub scales: Option<CUdeviceptr>,
    /// The format of the pool.
    pub format: KvFormat,
    /// Pages of the pool.
    pub pool_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// `[T]`.
    pub positions: Option<CUdeviceptr>,
    /// The rotation, which needs `positions`.
    pub rotation: Option<Rotation>,
    /// `[Hq]`.
    pub sinks: Option<CUdeviceptr>,
    /// `[Hq]` of f32.
    pub slopes: Option<CUdeviceptr>,
    /// Slots of each head, which need `positions`.
    pub slots: Option<HeadSlots>,
    /// The weights of slots, where they are asked for.
    pub key_weights: Option<KeyWeights>,
    /// `[T, Hkv, 3]` of f32, as [`crate::PagedAttention::kv_norms`] has it, where it is asked for.
    pub kv_norms: Option<CUdeviceptr>,
    /// What scores are multiplied by; 0 stands for 1/√D.
    pub scale: f32,
    /// How many positions a row sees; 0 = all.
    pub window: i64,
    /// 0 = none.
    pub softcap: f32,
    /// Whether nothing that may still run on the stream writes `row_offsets`, `cached_len`, `page_indptr`, `page_ids` and `slots`, or
    /// what the pool has of cached tokens: they are then read while the kernel in front still runs.
    pub settled: bool,
    /// How many rows a sequence has that has some, at least and at most: kernels for others are not launched.
    pub rows_each: (usize, usize),
    /// Memory to work in, [`scratch_bytes`](Self::scratch_bytes) long. Without it the plain kernel computes the call.
    pub scratch: Option<Scratch>,
}

/// As [`crate::Rotation`].
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// `[rows, half_width]` of f32.
    pub cos: CUdeviceptr,
    /// `[rows, half_width]` of f32.
    pub sin: CUdeviceptr,
    /// P.
    pub rows: usize,
    /// R/2.
    pub half_width: usize,
    /// Which numbers make a pair.
    pub pairs: Pairs,
}

/// As [`crate::HeadSlots`].
#[derive(Clone, Copy, Debug)]
pub struct HeadSlots {
    /// `[T, Hkv]`.
    pub write_slots: CUdeviceptr,
    /// `[B, Hkv, L]`.
    pub token_pos: CUdeviceptr,
    /// L.
    pub len: usize,
}

/// Where the weights of slots go.
#[derive(Clone, Copy, Debug)]
pub struct KeyWeights {
    /// `[B, Hkv, L]` of f32.
    pub weights: CUdeviceptr,
    /// L.
    pub len: usize,
    /// `[T, Hq, 2]` of f32, for the call alone.
    pub row_sums: CUdeviceptr,
}

impl PagedAttention {
    /// Bytes that `row_sums` takes.
    pub fn row_sums_bytes(&self) -> usize {
        self.total_rows * self.query_heads * 2 * size_of::<f32>()
    }

    /// The query heads of a kv head.
    pub(super) fn group(&self) -> usize {
        self.query_heads / self.kv_heads
    }

    /// Tiles of the query heads of a group.
    pub(super) fn row_tiles(&self) -> usize {
        self.group().div_ceil(ROWS)
    }

    /// The most parts that all sequences can have together; `parts_before` of cuda/llm/paged_parts.cuh.
    pub(super) fn partial_count(&self) -> usize {
        self.page_entries.saturating_mul(self.page_size) / span(self.format) + self.sequences
    }

    /// For each part, kv head and row: D sums, the largest score and the sum of weights. `PartialSums` of
    /// cuda/llm/paged_parts.cuh.
    pub(super) fn partial_bytes(&self) -> usize {
        let rows = self.partial_count().saturating_mul(self.kv_heads * self.row_tiles() * ROWS);
        rows.saturating_mul((self.head_size + 2) * size_of::<f32>())
    }

    /// The scores of decoded rows, where weights of slots are asked for; `KeptScores` of cuda/llm/paged_parts.cuh.
    pub(super) fn kept_scores_bytes(&self) -> usize {
        let rows = self.total_rows.min((ROWS / self.group()).max(1)) * self.group();
        let pitch = self.slots.map_or(0, |slots| slots.len).next_multiple_of(16);
        let scores = (self.sequences * self.kv_heads * rows).saturating_mul(pitch);
        scores.saturating_mul(size_of::<f32>())
    }

    /// Refuses shapes that kernels can not take. Index tensors are on the device, and clamped there.
    pub fn check(&self) -> Result<(), CudaError> {
        let Self { query_heads, kv_heads, head_size, page_size, .. } = *self;
        check_sizes(&[
            ("T", self.total_rows),
            ("B", self.sequences),
            ("page_ids", self.page_entries),
            ("Hq * D", query_heads.saturating_mul(head_size)),
            ("L", self.slots.map_or(0, |slots| slots.len).max(self.key_weights.map_or(0, |weights| weights.len))),
            ("P", self.rotation.map_or(0, |rotation| rotation.rows)),
        ])?;
        let refuse = |message: String| Err(CudaError::Unsupported(message));
        if head_size == 0 || head_size > HEAD_SIZE {
            return refuse(format!("query: heads of {head_size} numbers, expected 1 to {HEAD_SIZE}"));
        }
        if kv_heads == 0 || query_heads == 0 || !query_heads.is_multiple_of(kv_heads) {
            return refuse(format!("query: {query_heads} heads, expected a multiple of the {kv_heads} heads of key"));
        }
        if page_size == 0 || !page_size.is_multiple_of(8) {
            return refuse(format!("kv_pool: page_size {page_size}, expected a multiple of 8"));
        }
        if self.format == KvFormat::Int4 && !head_size.is_multiple_of(2) {
            return refuse(format!("key: heads of {head_size} numbers, expected an even number for int4"));
        }
        match (self.scales, self.format) {
            (None, KvFormat::Native) => {}
            (Some(_), KvFormat::Native) => return refuse("kv_scales: expected none beside a native pool".into()),
            (Some(_), _) => {}
            (None, format) => return refuse(format!("kv_scales: missing, expected beside a pool of {format:?}")),
        }
        if self.positions.is_none() && (self.rotation.is_some() || self.slots.is_some()) {
            let beside = if self.rotation.is_some() { "cos and sin" } else { "token_pos" };
            return refuse(format!("positions: missing, expected beside {beside}"));
        }
        if let Some(Rotation { rows, half_width, .. }) = self.rotation {
            if half_width == 0 || half_width > head_size / 2 {
                let most = head_size / 2;
                return refuse(format!("cos: rows of {half_width}, expected 1 to {most}, half a head"));
            }
            if rows == 0 && self.total_rows > 0 {
                return refuse("cos: no rows, expected one for each position".into());
            }
        }
        Ok(())
    }

    pub(super) fn raw(&self) -> raw::PagedCall {
        let address = |tensor: Option<CUdeviceptr>| tensor.unwrap_or(0);
        raw::PagedCall {
            query: self.query,
            key: self.key,
            value: self.value,
            output: self.output,
            pool: self.pool,
            scales: address(self.scales),
            key_weights: address(self.key_weights.map(|weights| weights.weights)),
            row_sums: address(self.key_weights.map(|weights| weights.row_sums)),
            partials: address(self.scratch.map(|scratch| scratch.address)),
            row_offsets: self.row_offsets,
            cached_len: self.cached_len,
            page_indptr: self.page_indptr,
            page_ids: self.page_ids,
            positions: address(self.positions),
            cos: address(self.rotation.map(|rotation| rotation.cos)),
            sin: address(self.rotation.map(|rotation| rotation.sin)),
            sinks: address(self.sinks),
            slopes: address(self.slopes),
            write_slots: address(self.slots.map(|slots| slots.write_slots)),
            token_pos: address(self.slots.map(|slots| slots.token_pos)),
            partial_count: self.partial_count() as i64,
            pool_pages: self.pool_pages as i64,
            window: self.window,
            sequences: self.sequences as i32,
            total_rows: self.total_rows as i32,
            query_heads: self.query_heads as i32,
            kv_heads: self.kv_heads as i32,
            head_size: self.head_size as i32,
            page_size: self.page_size as i32,
            page_entries: self.page_entries as i32,
            position_rows: self.rotation.map_or(0, |rotation| rotation.rows) as i32,
            half_width: self.rotation.map_or(0, |rotation| rotation.half_width) as i32,
            interleaved: self.rotation.is_some_and(|rotation| rotation.pairs == Pairs::Interleaved).into(),
            format: match self.format {
                KvFormat::Native => 0,
                KvFormat::Int8 => 1,
                KvFormat::Int4 => 2,
                KvFormat::Fp8 => 3,
            },
            slot_len: self.slots.map_or(0, |slots| slots.len) as i32,
            weights_len: self.key_weights.map_or(0, |weights| weights.len) as i32,
            scale: self.scale(),
            softcap: self.softcap,
        }
    }

    /// What scores are multiplied by.
    pub(super) fn scale(&self) -> f32 {
        if self.scale == 0.0 { (1.0 / (self.head_size as f64).sqrt()) as f32 } else { self.scale }
    }
}

/// Slots of a part; `span_of` of cuda/llm/paged_parts.cuh.
pub(super) fn span(format: KvFormat) -> usize {
    if format == KvFormat::Int8 { 512 } else { 256 }
}

/// A number of blocks that a launch takes.
pub(super) fn blocks(count: usize) -> Result<u32, CudaError> {
    u32::try_from(count).ok().filter(|count| *count <= i32::MAX as u32).ok_or_else(|| {
        CudaError::Unsupported(format!("{count} blocks of rows and heads in one call, expected fewer: split the batch"))
    })
}
