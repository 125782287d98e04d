//! AVX-512 F and DQ.

#![expect(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands at the impl")]

use std::arch::x86_64::*;

use half::f16;

use super::{EXP2_FROM_0, MAX_EXPONENT, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY: only AVX-512 F and DQ instructions; each access covers 16 elements and is unaligned. The unsafe blocks
// inside rest on the trait's contract: the CPU has the instructions, the pointers are good.
unsafe impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const MAX_VECTORS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn silu(x: Self::V) -> Self::V {
        unsafe {
            let t = _mm512_mul_ps(x, _mm512_set1_ps(-std::f32::consts::LOG2_E));
            let t = _mm512_min_ps(_mm512_set1_ps(MAX_EXPONENT), t);
            // t less its floor; `scalef` below takes the floor by itself.
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t);
            let [c0, c1, c2, c3, c4, c5] = EXP2_FROM_0;
            let mut p = _mm512_fmadd_ps(_mm512_set1_ps(c5), f, _mm512_set1_ps(c4));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c3));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c2));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c1));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c0));
            let divisor = _mm512_add_ps(_mm512_scalef_ps(p, t), _mm512_set1_ps(1.0));
            // The reciprocal to 14 bits and one step of Newton: a third of the time of a division.
            let r = _mm512_rcp14_ps(divisor);
            let error = _mm512_fnmadd_ps(divisor, r, _mm512_set1_ps(1.0));
            let y = _mm512_mul_ps(x, r);
            _mm512_fmadd_ps(y, error, y)
        }
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        unsafe {
            // In this order NaN stays.
            let t = _mm512_max_ps(_mm512_set1_ps(-MAX_EXPONENT), x);
            let f = _mm512_reduce_ps::<{ _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC }>(t);
            let [c0, c1, c2, c3, c4, c5] = EXP2_FROM_0;
            let mut p = _mm512_fmadd_ps(_mm512_set1_ps(c5), f, _mm512_set1_ps(c4));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c3));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c2));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c1));
            p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c0));
            let small = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, _mm512_set1_ps(-MAX_EXPONENT));
            _mm512_mask_blend_ps(small, _mm512_scalef_ps(p, t), _mm512_setzero_ps())
        }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self::V; 16]) -> Self::V {
        unsafe {
            // Pairs, then fours, inside the quarters of the vectors; then the quarters.
            let two = |a, b| _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let four = |a, b| {
                let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
                _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
            };
            let quarters = |a, b| {
                let (even, odd) =
                    (_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
                _mm512_add_ps(even, odd)
            };
            let fours: [Self::V; 4] = std::array::from_fn(|i| {
                let of = &of[4 * i..4 * i + 4];
                four(two(of[0], of[1]), two(of[2], of[3]))
            });
            quarters(quarters(fours[0], fours[1]), quarters(fours[2], fours[3]))
        }
    }

    #[inline(always)]
    unsafe fn select_within(x: Self::V, lo: Self::V, hi: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        unsafe {
            let inside = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(lo, x), x, hi);
            _mm512_mask_blend_ps(inside, no, yes)
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const f16) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn narrow_f16(v: Self::V, to: *mut f16) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
}
