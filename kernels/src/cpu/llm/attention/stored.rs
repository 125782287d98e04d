//! The pool as it is read: blocks whose numbers become f32 in registers, or are copied as f32 to a buffer first.

use half::f16;

use crate::Element;
use crate::cpu::common::kv_block::{Fp8, Int4, Int8, Numbers, dequantise};
use crate::cpu::common::simd::Simd;
use crate::llm::paged_attention::{KvPool, PagedAttention};

/// The pool after the append, which is only read.
pub(super) enum Stored<'a, T> {
    Native(&'a [T]),
    Quantised(&'a [u8], &'a [f16]),
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

    #[inline(always)]
    fn numbers(self, op: &PagedAttention<'_, T>, block: usize) -> &'a [T] {
        match self {
            Self::Native(pool) => &pool[block * op.head_size..][..op.head_size],
            Self::Quantised(..) => &[],
        }
    }

    #[inline(always)]
    fn codes(self, op: &PagedAttention<'_, T>, block: usize) -> (&'a [u8], &'a [f16]) {
        match self {
            Self::Native(_) => (&[], &[]),
            Self::Quantised(codes, scales) => {
                let (width, scale) = (op.format.pool_width(op.head_size), op.format.scales_width());
                (&codes[block * width..][..width], &scales[block * scale..][..scale])
            }
        }
    }
}

/// A form in which blocks of a pool are read. Apart from [`Numbers`], so that the arithmetic of a quantised form is compiled
/// once for all types of the queries.
pub(super) trait Form<S: Simd, T: Element>: Numbers<S> {
    /// Whether the next blocks are asked for ahead of their use. Few rows read blocks in order of memory, which the CPU sees.
    const AHEAD: bool = false;

    /// A block of a pool of this form. It may be put into `buffer`, which is as long as a block with its padding.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the pool is of this form.
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, buffer: &mut [f32]) -> Self;
}

/// Numbers of the type of the keys. The head size is a multiple of the lanes, as for all forms but [`Copied`].
#[derive(Clone, Copy)]
pub(super) struct Native<T>(*const T);

impl<S: Simd, T: Element> Form<S, T> for Native<T> {
    #[inline(always)]
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, _: &mut [f32]) -> Self {
        Self(stored.numbers(op, block).as_ptr())
    }
}

impl<S: Simd, T: Element> Numbers<S> for Native<T> {
    #[inline(always)]
    unsafe fn vector(self, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { T::load::<S>(self.0.add(at)) }
    }
}

impl<S: Simd, T: Element> Form<S, T> for Int8 {
    #[inline(always)]
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, _: &mut [f32]) -> Self {
        let (codes, scales) = stored.codes(op, block);
        // SAFETY: the caller's.
        unsafe { Self::new::<S>(codes, scales) }
    }
}

impl<S: Simd, T: Element> Form<S, T> for Int4 {
    #[inline(always)]
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, _: &mut [f32]) -> Self {
        let (codes, scales) = stored.codes(op, block);
        // SAFETY: the caller's.
        unsafe { Self::new::<S>(codes, scales) }
    }
}

impl<S: Simd, T: Element> Form<S, T> for Fp8 {
    #[inline(always)]
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, _: &mut [f32]) -> Self {
        let (codes, scales) = stored.codes(op, block);
        // SAFETY: the caller's.
        unsafe { Self::new::<S>(codes, scales) }
    }
}

/// Any form, copied to the buffer as f32, with zeros as padding.
#[derive(Clone, Copy)]
pub(super) struct Copied(*const f32);

impl<S: Simd, T: Element> Form<S, T> for Copied {
    const AHEAD: bool = true;

    #[inline(always)]
    unsafe fn of(stored: Stored<'_, T>, op: &PagedAttention<'_, T>, block: usize, buffer: &mut [f32]) -> Self {
        let size = op.head_size;
        // SAFETY: the caller's; the form is that of the pool.
        unsafe {
            match stored {
                Stored::Native(_) => T::widen::<S>(stored.numbers(op, block), &mut buffer[..size]),
                Stored::Quantised(..) => {
                    let (codes, scales) = stored.codes(op, block);
                    dequantise::<S>(op.format, codes, scales, &mut buffer[..size]);
                }
            }
        }
        if size < buffer.len() {
            buffer[size..].fill(0.0);
        }
        Self(buffer.as_ptr())
    }
}

impl<S: Simd> Numbers<S> for Copied {
    #[inline(always)]
    unsafe fn vector(self, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load(self.0.add(at)) }
    }
}
