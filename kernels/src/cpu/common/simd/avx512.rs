//! AVX-512 F and DQ.

#![expect(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands at the impl")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{EXP2_FROM_0, MAX_EXPONENT, Part, Simd};

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
            let [a, b, c, d] = [fours(of, 0), fours(of, 4), fours(of, 8), fours(of, 12)];
            quarters(quarters(a, b), quarters(c, d))
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

    #[inline(always)]
    unsafe fn widen_bf16(from: *const bf16) -> Self::V {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))) }
    }

    #[inline(always)]
    unsafe fn from_f16(x: f16) -> f32 {
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.to_bits().into()))) }
    }

    #[inline(always)]
    unsafe fn reduce_max(v: Self::V) -> f32 {
        unsafe { _mm512_reduce_max_ps(v) }
    }

    #[inline(always)]
    unsafe fn reduce_add(v: Self::V) -> f32 {
        unsafe {
            let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let v = _mm512_add_ps(v, _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
            let v = _mm512_castps512_ps128(v);
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    unsafe fn widen_u8(from: *const u8) -> Self::V {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn widen_u4(from: *const u8) -> Self::V {
        unsafe {
            // In 16 bits each: both halves, the high one moved into the upper byte.
            let pairs = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
            let halves = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16::<4>(pairs)), _mm_set1_epi16(0x0f0f));
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(halves))
        }
    }

    #[inline(always)]
    unsafe fn halves_less_8(from: *const u8) -> [Self::V; 2] {
        unsafe {
            // A table: its index is the lowest four bits of a lane, whatever the others are.
            let numbers =
                _mm512_setr_ps(-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0);
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm512_srli_epi32::<4>(bytes);
            [_mm512_permutexvar_ps(bytes, numbers), _mm512_permutexvar_ps(high, numbers)]
        }
    }

    #[inline(always)]
    unsafe fn even_and_odd(a: Self::V, b: Self::V) -> [Self::V; 2] {
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b)]
        }
    }

    #[inline(always)]
    unsafe fn widen_e4m3fn(from: *const u8) -> Self::V {
        unsafe {
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
            _mm512_mul_ps(_mm512_cvtph_ps(super::avx2::e4m3fn_in_f16(codes)), _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    unsafe fn outline<P: Part<Self>>(part: P) {
        // SAFETY: the caller's.
        unsafe { outline(part) }
    }
}

/// # Safety
/// As for [`Part::run`].
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
#[inline(never)]
unsafe fn outline<P: Part<Avx512>>(part: P) {
    // SAFETY: the caller's; the features are enabled here.
    unsafe { part.run() }
}

/// In quarter q of lane i the sum of quarter q of vector `first + i`, of four vectors.
///
/// # Safety
/// The CPU has the instructions.
#[inline(always)]
unsafe fn fours(of: &[__m512; 16], first: usize) -> __m512 {
    unsafe {
        let (a, b) = (two(of[first], of[first + 1]), two(of[first + 2], of[first + 3]));
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let (low, high) = (_mm512_unpacklo_pd(a, b), _mm512_unpackhi_pd(a, b));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    }
}

/// # Safety
/// As for [`fours`].
#[inline(always)]
unsafe fn two(a: __m512, b: __m512) -> __m512 {
    unsafe { _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)) }
}

/// Sums of neighbouring quarters, those of `a` first.
///
/// # Safety
/// As for [`fours`].
#[inline(always)]
unsafe fn quarters(a: __m512, b: __m512) -> __m512 {
    unsafe {
        let (even, odd) = (_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b));
        _mm512_add_ps(even, odd)
    }
}
