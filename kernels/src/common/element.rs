//! The element types of the operators' tensors.

use half::{bf16, f16};

use crate::cpu::common::simd::Simd;

/// A type that tensors may hold: `f32`, `f16` or `bf16`. Sealed.
pub trait Element: sealed::Convert {
    /// The type's name as it appears in messages and benchmark rows.
    const NAME: &'static str;

    /// The value as an `f32`; exact.
    fn to_f32(self) -> f32;

    /// The nearest value of this type, ties to even.
    fn from_f32(value: f32) -> Self;
}

pub(crate) mod sealed {
    use super::Simd;

    /// Whole-row conversions. They are generic over the instruction set because a function without the matching
    /// `target_feature` cannot inline the conversion instructions.
    pub trait Convert: Copy + Default + Send + Sync + 'static {
        /// A vector of them.
        ///
        /// # Safety
        /// The CPU must have the instructions of `S`, and `from` be good for `LANES` elements.
        unsafe fn load<S: Simd>(from: *const Self) -> S::V;

        /// # Safety
        /// The CPU must have the instructions of `S`.
        unsafe fn widen<S: Simd>(from: &[Self], to: &mut [f32]);

        /// # Safety
        /// The CPU must have the instructions of `S`.
        unsafe fn narrow<S: Simd>(from: &[f32], to: &mut [Self]);
    }
}

impl Element for f32 {
    const NAME: &'static str = "f32";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for f16 {
    const NAME: &'static str = "f16";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self.to_f32_const()
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32_const(value)
    }
}

impl Element for bf16 {
    const NAME: &'static str = "bf16";

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // Without a branch, so that a loop over it vectorises; `half`'s own does not.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let nearest = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { nearest } as u16)
    }
}

impl sealed::Convert for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::load(from) }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    #[inline(always)]
    unsafe fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }
}

impl sealed::Convert for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::widen_bf16(from) }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        assert_eq!(from.len(), to.len());
        let whole = from.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: at + LANES <= whole <= both lengths; the caller vouches for the instructions.
            unsafe { S::store(to.as_mut_ptr().add(at), S::widen_bf16(from.as_ptr().add(at))) };
        }
        for (to, from) in to[whole..].iter_mut().zip(&from[whole..]) {
            *to = Element::to_f32(*from);
        }
    }

    #[inline(always)]
    unsafe fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = Element::from_f32(*from);
        }
    }
}

impl sealed::Convert for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(from: *const Self) -> S::V {
        // SAFETY: the caller's.
        unsafe { S::widen_f16(from) }
    }

    #[inline(always)]
    unsafe fn widen<S: Simd>(from: &[Self], to: &mut [f32]) {
        assert_eq!(from.len(), to.len());
        let whole = from.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: at + LANES <= whole <= both lengths; the caller vouches for the instructions.
            unsafe {
                let lanes = S::widen_f16(from.as_ptr().add(at));
                S::store(to.as_mut_ptr().add(at), lanes);
            }
        }
        for (to, from) in to[whole..].iter_mut().zip(&from[whole..]) {
            *to = Element::to_f32(*from);
        }
    }

    #[inline(always)]
    unsafe fn narrow<S: Simd>(from: &[f32], to: &mut [Self]) {
        assert_eq!(from.len(), to.len());
        let whole = from.len() / S::LANES * S::LANES;
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: as in `widen`.
            unsafe {
                let lanes = S::load(from.as_ptr().add(at));
                S::narrow_f16(lanes, to.as_mut_ptr().add(at));
            }
        }
        for (to, from) in to[whole..].iter_mut().zip(&from[whole..]) {
            *to = Element::from_f32(*from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let step = if cfg!(miri) { 90_001_003 } else { 10_007 };
        for bits in (0..=u32::MAX).step_by(step) {
            let value = f32::from_bits(bits);
            let ours = <bf16 as Element>::from_f32(value);
            let theirs = bf16::from_f32(value);
            assert!(ours.to_bits() == theirs.to_bits(), "{value:e} ({bits:#x}): {ours:?}, {theirs:?}");
        }
    }
}
