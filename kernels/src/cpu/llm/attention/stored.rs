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

    /// A block as f32: where it is, if it can be read there, else in `buffer`, padded with zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn block<S: Simd>(
        self,
        op: &PagedAttention<'_, T>,
        block: usize,
        buffer: &mut [f32],
    ) -> *const f32 {
        let size = op.head_size;
        match self {
            Self::Native(pool) => {
                let numbers = &pool[block * size..][..size];
                if size == buffer.len() && TypeId::of::<T>() == TypeId::of::<f32>() {
                    return numbers.as_ptr().cast();
                }
                // SAFETY: the caller's.
                unsafe { T::widen::<S>(numbers, &mut buffer[..size]) };
            }
            Self::Quantised(codes, scales) => {
                let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
                let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
                let scale = scales[0].to_f32();
                match op.format {
                    KvFormat::Int8 => {
                        let low = scales[1].to_f32();
                        for (to, code) in buffer.iter_mut().zip(codes) {
                            *to = low + f32::from(*code) * scale;
                        }
                    }
                    KvFormat::Int4 => {
                        let low = scales[1].to_f32();
                        for (to, code) in buffer.chunks_exact_mut(2).zip(codes) {
                            to[0] = low + f32::from(code & 15) * scale;
                            to[1] = low + f32::from(code >> 4) * scale;
                        }
                    }
                    _ => {
                        for (index, to) in buffer[..size].iter_mut().enumerate() {
                            *to = op.format.dequantise(codes, scales, index);
                        }
                    }
                }
            }
        }
        buffer[size..].fill(0.0);
        buffer.as_ptr()
    }
}
