//! Blocks of a quantised pool, each the numbers of one head of one token, read by vectors.

use half::f16;

use super::simd::Simd;
use crate::common::kv_format::KvFormat;

/// The numbers of a block. Whichever form reads it, they have the same bits.
pub(in crate::cpu) trait Numbers<S: Simd>: Copy {
    /// The vector that begins at a number of the block.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the vector is inside the block, and the block's memory is still there.
    unsafe fn vector(self, at: usize) -> S::V;
}

/// Codes of 8 bits.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Int8 {
    codes: *const u8,
    scale: f32,
    low: f32,
}

impl Int8 {
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn new<S: Simd>(codes: &[u8], scales: &[f16]) -> Self {
        // SAFETY: the caller's.
        unsafe { Self { codes: codes.as_ptr(), scale: S::from_f16(scales[0]), low: S::from_f16(scales[1]) } }
    }
}

impl<S: Simd> Numbers<S> for Int8 {
    #[inline(always)]
    unsafe fn vector(self, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::fma(S::widen_u8(self.codes.add(at)), S::splat(self.scale), S::splat(self.low)) }
    }
}

/// Codes of 4 bits.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Int4 {
    codes: *const u8,
    scale: f32,
    low: f32,
}

impl Int4 {
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn new<S: Simd>(codes: &[u8], scales: &[f16]) -> Self {
        // SAFETY: the caller's.
        unsafe { Self { codes: codes.as_ptr(), scale: S::from_f16(scales[0]), low: S::from_f16(scales[1]) } }
    }
}

impl<S: Simd> Numbers<S> for Int4 {
    #[inline(always)]
    unsafe fn vector(self, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::fma(S::widen_u4(self.codes.add(at / 2)), S::splat(self.scale), S::splat(self.low)) }
    }
}

/// Codes e4m3fn.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Fp8 {
    codes: *const u8,
    scale: f32,
}

impl Fp8 {
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn new<S: Simd>(codes: &[u8], scales: &[f16]) -> Self {
        // SAFETY: the caller's.
        unsafe { Self { codes: codes.as_ptr(), scale: S::from_f16(scales[0]) } }
    }
}

impl<S: Simd> Numbers<S> for Fp8 {
    #[inline(always)]
    unsafe fn vector(self, at: usize) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::mul(S::widen_e4m3fn(self.codes.add(at)), S::splat(self.scale)) }
    }
}

/// The numbers of a block as f32. `to` is as long as the block.
///
/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
pub(in crate::cpu) unsafe fn dequantise<S: Simd>(format: KvFormat, codes: &[u8], scales: &[f16], to: &mut [f32]) {
    assert_eq!((codes.len(), scales.len()), (format.pool_width(to.len()), format.scales_width()));
    let whole = to.len() / S::LANES * S::LANES;
    // SAFETY: the caller's; whole vectors of `to` are inside the block, by the lengths above.
    unsafe {
        match format {
            KvFormat::Native => unreachable!("native numbers are not quantised"),
            KvFormat::Int8 => copy::<S>(Int8::new::<S>(codes, scales), &mut to[..whole]),
            KvFormat::Int4 => copy::<S>(Int4::new::<S>(codes, scales), &mut to[..whole]),
            KvFormat::Fp8 => copy::<S>(Fp8::new::<S>(codes, scales), &mut to[..whole]),
        }
    }
    for (index, to) in to.iter_mut().enumerate().skip(whole) {
        *to = format.dequantise(codes, scales, index);
    }
}

/// # Safety
/// The CPU has the instructions of `S`; the block is as long as `to`, whole vectors.
#[inline(always)]
unsafe fn copy<S: Simd>(numbers: impl Numbers<S>, to: &mut [f32]) {
    for at in (0..to.len()).step_by(S::LANES) {
        // SAFETY: the caller's.
        unsafe { S::store(to.as_mut_ptr().add(at), numbers.vector(at)) };
    }
}
