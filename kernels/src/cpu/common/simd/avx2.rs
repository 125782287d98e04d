//! AVX2 with FMA and F16C.

#![expect(clippy::undocumented_unsafe_blocks, reason = "one reason for all of them stands at the impl")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{EXP2_AROUND_0, MAX_EXPONENT, Part, Simd};

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

// SAFETY: only AVX2, FMA and F16C instructions; each access covers 8 elements and is unaligned. The unsafe blocks
// inside rest on the trait's contract: the CPU has the instructions, the pointers are good.
unsafe impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const MAX_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::V {
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, v: Self::V) {
        unsafe { _mm256_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn silu(x: Self::V) -> Self::V {
        unsafe {
            let t = _mm256_mul_ps(x, _mm256_set1_ps(-std::f32::consts::LOG2_E));
            // A NaN becomes a bound here and comes back by the division.
            let t = _mm256_max_ps(_mm256_min_ps(t, _mm256_set1_ps(MAX_EXPONENT)), _mm256_set1_ps(-MAX_EXPONENT));
            let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(t);
            let f = _mm256_sub_ps(t, whole);
            let [c0, c1, c2, c3, c4, c5] = EXP2_AROUND_0;
            let mut p = _mm256_fmadd_ps(_mm256_set1_ps(c5), f, _mm256_set1_ps(c4));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c3));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c2));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c1));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c0));
            let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)));
            let divisor = _mm256_fmadd_ps(p, _mm256_castsi256_ps(exponent), _mm256_set1_ps(1.0));
            _mm256_div_ps(x, divisor)
        }
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn exp2(x: Self::V) -> Self::V {
        unsafe {
            // In this order NaN stays.
            let t = _mm256_max_ps(_mm256_set1_ps(-MAX_EXPONENT), x);
            let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(t);
            let f = _mm256_sub_ps(t, whole);
            let [c0, c1, c2, c3, c4, c5] = EXP2_AROUND_0;
            let mut p = _mm256_fmadd_ps(_mm256_set1_ps(c5), f, _mm256_set1_ps(c4));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c3));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c2));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c1));
            p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c0));
            let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)));
            let small = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(-MAX_EXPONENT));
            _mm256_andnot_ps(small, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn sums(of: &[Self::V; 16]) -> Self::V {
        unsafe {
            let a = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
            let b = _mm256_hadd_ps(_mm256_hadd_ps(of[4], of[5]), _mm256_hadd_ps(of[6], of[7]));
            _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
        }
    }

    #[inline(always)]
    unsafe fn select_within(x: Self::V, lo: Self::V, hi: Self::V, yes: Self::V, no: Self::V) -> Self::V {
        unsafe {
            let inside = _mm256_and_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(lo, x), _mm256_cmp_ps::<_CMP_LT_OQ>(x, hi));
            _mm256_blendv_ps(no, yes, inside)
        }
    }

    #[inline(always)]
    unsafe fn prefetch(at: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    unsafe fn widen_f16(from: *const f16) -> Self::V {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn narrow_f16(v: Self::V, to: *mut f16) {
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }

    #[inline(always)]
    unsafe fn widen_bf16(from: *const bf16) -> Self::V {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))) }
    }

    #[inline(always)]
    unsafe fn from_f16(x: f16) -> f32 {
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x.to_bits().into()))) }
    }

    #[inline(always)]
    unsafe fn reduce_max(v: Self::V) -> f32 {
        unsafe {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    unsafe fn reduce_add(v: Self::V) -> f32 {
        unsafe {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        }
    }

    #[inline(always)]
    unsafe fn widen_u8(from: *const u8) -> Self::V {
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }

    #[inline(always)]
    unsafe fn widen_u4(from: *const u8) -> Self::V {
        unsafe {
            // In 16 bits each: both halves, the high one moved into the upper byte.
            let pairs = _mm_cvtepu8_epi16(_mm_cvtsi32_si128(from.cast::<i32>().read_unaligned()));
            let halves = _mm_and_si128(_mm_or_si128(pairs, _mm_slli_epi16::<4>(pairs)), _mm_set1_epi16(0x0f0f));
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(halves))
        }
    }

    #[inline(always)]
    unsafe fn halves_less_8(from: *const u8) -> [Self::V; 2] {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let (low, high) = (_mm256_and_si256(bytes, _mm256_set1_epi32(15)), _mm256_srli_epi32::<4>(bytes));
            [low, high].map(|half| _mm256_cvtepi32_ps(_mm256_sub_epi32(half, _mm256_set1_epi32(8))))
        }
    }

    #[inline(always)]
    unsafe fn even_and_odd(a: Self::V, b: Self::V) -> [Self::V; 2] {
        unsafe {
            // Each half of a vector by itself, then the quarters in order.
            let (even, odd) = (_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b));
            let in_order = |v| _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
            [in_order(even), in_order(odd)]
        }
    }

    #[inline(always)]
    unsafe fn widen_e4m3fn(from: *const u8) -> Self::V {
        unsafe {
            let codes = _mm256_castsi128_si256(_mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast())));
            let numbers = _mm256_cvtph_ps(_mm256_castsi256_si128(e4m3fn_in_f16(codes)));
            _mm256_mul_ps(numbers, _mm256_set1_ps(256.0))
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
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
unsafe fn outline<P: Part<Avx2>>(part: P) {
    // SAFETY: the caller's; the features are enabled here.
    unsafe { part.run() }
}

/// Codes e4m3fn in 16 bits each, as f16 a 256th as large: that has one bit more of exponent and seven more of fraction, and
/// its small numbers are not slow as those of f32 are.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn e4m3fn_in_f16(codes: __m256i) -> __m256i {
    unsafe {
        let magnitude = _mm256_and_si256(codes, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_andnot_si256(_mm256_set1_epi16(0x7f), codes));
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        let nan = _mm256_and_si256(nan, _mm256_set1_epi16(0x7fff));
        _mm256_or_si256(_mm256_or_si256(sign, nan), _mm256_slli_epi16::<7>(magnitude))
    }
}
