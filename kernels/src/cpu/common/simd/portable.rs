//! Plain Rust over arrays, for any CPU and for Miri; the compiler makes of it what the baseline has.

use half::{bf16, f16};

use super::{EXP2_AROUND_0, MAX_EXPONENT, Part, Simd};
use crate::common::kv_format::from_e4m3fn;

#[derive(Clone, Copy)]
pub(crate) struct Portable;

const LANES: usize = 8;

#[inline(always)]
fn map(a: [f32; LANES], f: impl Fn(f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i]))
}

// SAFETY: no special instructions, and `LANES` elements read and written.
unsafe impl Simd for Portable {
    type V = [f32; LANES];
    const LANES: usize = LANES;
    const MAX_VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        // SAFETY: the caller's pointer is good for LANES elements.
        unsafe { from.cast::<Self::V>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        // SAFETY: as for `load`.
        unsafe { to.cast::<Self::V>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] / b[i])
    }

    // Not `mul_add`: without the instruction that is a call to libm for every lane.
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    unsafe fn silu(x: Self::V) -> Self::V {
        map(x, |x| {
            let t = (x * -std::f32::consts::LOG2_E).clamp(-MAX_EXPONENT, MAX_EXPONENT);
            // Adding and taking away 1.5 · 2^23 rounds to a whole number without a call.
            const ROUND: f32 = 12_582_912.0;
            let whole = (t + ROUND) - ROUND;
            let f = t - whole;
            let p = EXP2_AROUND_0.iter().rev().fold(0.0, |p, c| p * f + c);
            let scale = f32::from_bits(((whole as i32 + 127) << 23) as u32);
            x / (1.0 + p * scale)
        })
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        map(x, |x| {
            let t = if x < -MAX_EXPONENT { -MAX_EXPONENT } else { x };
            const ROUND: f32 = 12_582_912.0;
            let whole = (t + ROUND) - ROUND;
            let f = t - whole;
            let p = EXP2_AROUND_0.iter().rev().fold(0.0, |p, c| p * f + c);
            let scale = f32::from_bits(((whole as i32 + 127) << 23) as u32);
            if x < -MAX_EXPONENT { 0.0 } else { p * scale }
        })
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self::V; 16]) -> Self::V {
        std::array::from_fn(|i| {
            let [a, b, c, d, e, f, g, h] = of[i];
            ((a + b) + (c + d)) + ((e + f) + (g + h))
        })
    }

    #[inline(always)]
    unsafe fn select_within(x: Self::V, lo: Self::V, hi: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        std::array::from_fn(|i| if lo[i] <= x[i] && x[i] < hi[i] { yes[i] } else { no[i] })
    }

    #[inline(always)]
    unsafe fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn widen_f16(from: *const f16) -> Self::V {
        // SAFETY: the caller's pointer is good for LANES elements.
        let from = unsafe { from.cast::<[f16; LANES]>().read_unaligned() };
        from.map(f16::to_f32_const)
    }

    #[inline(always)]
    unsafe fn narrow_f16(v: Self::V, to: *mut f16) {
        // SAFETY: as for `widen_f16`.
        unsafe { to.cast::<[f16; LANES]>().write_unaligned(v.map(f16::from_f32_const)) }
    }

    #[inline(always)]
    unsafe fn widen_bf16(from: *const bf16) -> Self::V {
        // SAFETY: the caller's pointer is good for LANES elements.
        let from = unsafe { from.cast::<[bf16; LANES]>().read_unaligned() };
        from.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn from_f16(x: f16) -> f32 {
        x.to_f32_const()
    }

    #[inline(always)]
    unsafe fn reduce_max(v: Self::V) -> f32 {
        v.iter().fold(f32::NEG_INFINITY, |largest, &lane| if lane > largest { lane } else { largest })
    }

    #[inline(always)]
    unsafe fn reduce_add([a, b, c, d, e, f, g, h]: Self::V) -> f32 {
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    unsafe fn widen_u8(from: *const u8) -> Self::V {
        // SAFETY: the caller's pointer is good for LANES bytes.
        unsafe { from.cast::<[u8; LANES]>().read() }.map(f32::from)
    }

    #[inline(always)]
    unsafe fn widen_u4(from: *const u8) -> Self::V {
        // SAFETY: the caller's pointer is good for LANES / 2 bytes.
        let bytes = unsafe { from.cast::<[u8; LANES / 2]>().read() };
        std::array::from_fn(|i| f32::from((bytes[i / 2] >> (i % 2 * 4)) & 15))
    }

    #[inline(always)]
    unsafe fn halves_less_8(from: *const u8) -> [Self::V; 2] {
        // SAFETY: the caller's pointer is good for LANES bytes.
        let bytes = unsafe { from.cast::<[u8; LANES]>().read() };
        [bytes.map(|byte| f32::from(byte & 15) - 8.0), bytes.map(|byte| f32::from(byte >> 4) - 8.0)]
    }

    #[inline(always)]
    unsafe fn even_and_odd(a: Self::V, b: Self::V) -> [Self::V; 2] {
        let at = |i: usize| if i < LANES { a[i] } else { b[i - LANES] };
        [std::array::from_fn(|i| at(2 * i)), std::array::from_fn(|i| at(2 * i + 1))]
    }

    #[inline(always)]
    unsafe fn widen_e4m3fn(from: *const u8) -> Self::V {
        // SAFETY: as for `widen_u8`.
        unsafe { from.cast::<[u8; LANES]>().read() }.map(from_e4m3fn)
    }

    #[inline(always)]
    unsafe fn outline<P: Part<Self>>(part: P) {
        // SAFETY: the caller's.
        unsafe { part.run() }
    }
}
