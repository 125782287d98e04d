//! `PagedAttention` on the GPU: the call, and which kernels compute it.
//!
//! Which kernel computes a sequence depends on the call's shapes and on the sequence's own numbers, never on the rest of the
//! batch: a sequence has the same bits in any batch.

use std::ffi::c_void;
use std::ptr::from_mut;

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::{paged_attention_sm80, paged_attention_sm90, raw};
use crate::cuda::common::element_type::Type;
use crate::cuda::common::error::CudaError;
use crate::cuda::common::gpu::Gpu;
use crate::cuda::common::sizes::check_sizes;
use crate::cuda::hstu::call::Scratch;
use crate::{KvFormat, Pairs};

const THREADS: u32 = 128;
/// The largest head that the kernels take.
const HEAD_SIZE: usize = 512;

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
    /// What scores are multiplied by; 0 stands for 1/√D.
    pub scale: f32,
    /// How many positions a row sees; 0 = all.
    pub window: i64,
    /// 0 = none.
    pub softcap: f32,
    /// Memory to work in, [`scratch_bytes`](Self::scratch_bytes) long. Without it the plain kernel computes the call.
    pub scratch: Option<Scratch>,
}

/// Kernels that compute `PagedAttention`; later ones are faster and take less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PagedPath {
    /// Every type and option, D up to 512.
    Plain,
    /// Tensor cores of sm_80 and later (mma.sync): f16 and bf16, D = 64, 96, 128 or 256, pages of int4 and fp8 with D = 64 or
    /// 128 alone, without key_weights. Decode splits the keys (split-KV).
    Mma,
    /// As `Mma`, with wgmma and TMA of sm_90a for prefill: native pages, D = 64 or 128, without softcap, slopes and slots of
    /// heads.
    Hopper,
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

    /// Bytes of scratch memory that the faster kernels take; 0 where only the plain one takes the call. It depends on the shapes
    /// alone: B, T, the heads, D, the page size and how many page ids there are.
    pub fn scratch_bytes(&self) -> usize {
        if !self.suits_matrix_units() {
            return 0;
        }
        paged_attention_sm80::scratch_bytes(self).saturating_add(paged_attention_sm90::scratch_bytes(self))
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
            && self.key_weights.is_none()
            && aligned(self.query | self.pool | self.output, 16)
            && aligned(self.scales.unwrap_or(0), 4)
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
            partial_count: paged_attention_sm80::partial_count(self) as i64,
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
                PagedPath::Plain => plain(self, call, stream),
                PagedPath::Mma => paged_attention_sm80::launch(self, call, false, stream),
                PagedPath::Hopper => paged_attention_sm80::launch(self, call, true, stream),
            }
        }
    }
}

/// # Safety
/// As for [`Gpu::paged_attention`]; the call is checked.
unsafe fn plain(gpu: &Gpu, call: &PagedAttention, stream: CUstream) -> Result<(), CudaError> {
    let weights = call.key_weights.map_or(0, |weights| call.sequences * call.kv_heads * weights.len);
    let tasks = [
        ("append", call.total_rows * call.kv_heads * 2),
        ("attend", call.total_rows * call.query_heads),
        ("weigh", weights),
    ];
    for (kernel, warps) in tasks.into_iter().filter(|(_, warps)| *warps > 0) {
        let name = format!("paged_{kernel}_{}", call.element.name());
        let function = gpu.modules.paged_attention_simt.function(&name, 0)?;
        let mut raw = call.raw();
        let mut arguments = [from_mut(&mut raw).cast::<c_void>()];
        let blocks = blocks(warps.div_ceil(THREADS as usize / 32))?;
        // SAFETY: the kernel takes a `PagedCall`; the rest is the caller's.
        unsafe { function.launch(blocks, THREADS, 0, stream, &mut arguments) }?;
    }
    Ok(())
}

/// A number of blocks that a launch takes.
pub(super) fn blocks(count: usize) -> Result<u32, CudaError> {
    u32::try_from(count).ok().filter(|count| *count <= i32::MAX as u32).ok_or_else(|| {
        CudaError::Unsupported(format!("{count} blocks of rows and heads in one call, expected fewer: split the batch"))
    })
}
