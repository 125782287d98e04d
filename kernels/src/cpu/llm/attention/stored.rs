//! The pool as it is read: numbers where they are, or converted to f32.

use std::any::TypeId;

use crate::Element;
use crate::cpu::common::simd::Simd;
use crate::llm::kv_format::KvFormat;
use crate::llm::paged_attention::{KvPool, PagedAttention};

/// The pool after the append, which is only read.
pub(super) enum Stored<'a, T> {
    Native(&'a [T]),
    Quantised(&'a [u8], &'a [half::f16]),
}

impl<T> Clone for Stored<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Stored<'_, T> {}

impl<'a, T: Element> Stored<'a, T> {
    pub(super) fn new(pool: &'a KvPool<'_, T>) -> Self {
        match pool {
            KvPool::Native(pool) => Self::Native(pool),
            KvPool::Quantised { codes, scales } => Self::Quantised(codes, scales),
        }
    }

    /// Asks for a block ahead of its use.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(self, op: &PagedAttention<'_, T>, block: usize) {
        let (from, width) = match self {
            Self::Native(pool) => (pool.as_ptr().cast::<u8>(), op.head_size * size_of::<T>()),
            Self::Quantised(codes, _) => (codes.as_ptr(), op.format.pool_width(op.head_size)),
        };
        for at in (0..width).step_by(64) {
            // SAFETY: the caller's; any address will do.
            unsafe { S::prefetch(from.wrapping_add(block * width + at)) };
        }
    }

    /// A block as f32: where it is, if it can be read there and need not be copied, else in `buffer`, padded with zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn block<S: Simd>(
        self,
        op: &PagedAttention<'_, T>,
        block: usize,
        copies: bool,
        buffer: &mut [f32],
    ) -> *const f32 {
        let size = op.head_size;
        match self {
            Self::Native(pool) => {
                let numbers = &pool[block * size..][..size];
                if !copies && size == buffer.len() && TypeId::of::<T>() == TypeId::of::<f32>() {
                    return numbers.as_ptr().cast();
                }
                // SAFETY: the caller's.
                unsafe { T::widen::<S>(numbers, &mut buffer[..size]) };
            }
            Self::Quantised(codes, scales) => {
                let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                // SAFETY: the caller's.
                unsafe { dequantise::<S>(op.format, codes, scales, &mut buffer[..size]) };
            }
        }
        if size < buffer.len() {
            buffer[size..].fill(0.0);
        }
        buffer.as_ptr()
    }
}

/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
unsafe fn dequantise<S: Simd>(format: KvFormat, codes: &[u8], scales: &[half::f16], to: &mut [f32]) {
    let whole = to.len() / S::LANES * S::LANES;
    // SAFETY: the vectors are inside `to`, and their codes inside `codes`; the rest is the caller's.
    unsafe {
        let scale = S::splat(S::from_f16(scales[0]));
        let (from, numbers) = (codes.as_ptr(), to.as_mut_ptr());
        match format {
            KvFormat::Int8 => {
                let low = S::splat(S::from_f16(scales[1]));
                for at in (0..whole).step_by(S::LANES) {
                    S::store(numbers.add(at), S::add(low, S::mul(S::widen_u8(from.add(at)), scale)));
                }
            }
            KvFormat::Int4 => {
                let low = S::splat(S::from_f16(scales[1]));
                for at in (0..whole).step_by(S::LANES) {
                    S::store(numbers.add(at), S::add(low, S::mul(S::widen_u4(from.add(at / 2)), scale)));
                }
            }
            _ => {
                for at in (0..whole).step_by(S::LANES) {
                    S::store(numbers.add(at), S::mul(S::widen_e4m3fn(from.add(at)), scale));
                }
            }
        }
    }
    for index in whole..to.len() {
        to[index] = format.dequantise(codes, scales, index);
    }
}
