//! The few vector operations that the kernels are written in, and their implementations by instruction set.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod portable;

use std::ops::Range;

use half::{bf16, f16};

use super::Isa;
use super::scratch::{self, Scratch};

/// Vectors of `f32` in one instruction set.
///
/// # Safety
/// Every method may only run on a CPU with the set's instructions, and pointers must be good for `LANES` elements;
/// they need no alignment. Implementations are `inline(always)`, so that they compile to plain instructions inside a
/// caller with the matching `target_feature`.
pub unsafe trait Simd: Copy + 'static {
    type V: Copy;
    const LANES: usize;
    /// How many vectors of rows one register block spans at most: 4 where there are 32 registers.
    const MAX_VECTORS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, fused where the set can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `x / (1 + e^-x)`: right for any finite x however large, NaN for NaN.
    unsafe fn silu(x: Self::V) -> Self::V;
    /// The larger of both; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// 2^x for x of at most 126, and 0 below -126. NaN for NaN.
    unsafe fn exp2(x: Self::V) -> Self::V;
    /// In lane i the sum of the lanes of vector i, of the first `LANES` vectors. The order of summation is that of a tree.
    unsafe fn sums(of: &[Self::V; 16]) -> Self::V;
    /// `yes` in the lanes where `lo <= x < hi`, `no` in the others.
    unsafe fn select_within(x: Self::V, lo: Self::V, hi: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// Asks for the cache line at `at` ahead of its use; any address will do.
    unsafe fn prefetch(at: *const u8);
    unsafe fn widen_f16(from: *const f16) -> Self::V;
    unsafe fn narrow_f16(v: Self::V, to: *mut f16);
    unsafe fn widen_bf16(from: *const bf16) -> Self::V;
    /// One f16.
    unsafe fn from_f16(x: f16) -> f32;
    /// The largest lane; lanes are no NaN.
    unsafe fn reduce_max(v: Self::V) -> f32;
    /// The sum of the lanes, by a tree.
    unsafe fn reduce_add(v: Self::V) -> f32;
    /// Bytes as numbers.
    unsafe fn widen_u8(from: *const u8) -> Self::V;
    /// Halves of bytes as numbers, the low half of a byte first; `from` is good for `LANES / 2` bytes.
    unsafe fn widen_u4(from: *const u8) -> Self::V;
    /// The low halves of bytes and their high halves as numbers, less 8; `from` is good for `LANES` bytes.
    unsafe fn halves_less_8(from: *const u8) -> [Self::V; 2];
    /// The numbers of both vectors, one behind the other, at even places and at odd ones.
    unsafe fn even_and_odd(a: Self::V, b: Self::V) -> [Self::V; 2];
    /// Bytes as numbers of the format e4m3fn.
    unsafe fn widen_e4m3fn(from: *const u8) -> Self::V;
    /// Runs a part of a kernel as a function of its own. What is `inline(always)` is compiled anew wherever it is used, and a
    /// function of a hundred kilobytes takes a compiler minutes.
    unsafe fn outline<P: Part<Self>>(part: P);
}

/// A part of a kernel that [`Simd::outline`] makes a function.
pub trait Part<S> {
    /// # Safety
    /// The CPU has the instructions of `S`; the rest is the implementation's to say. Implementations are `inline(always)`.
    unsafe fn run(self);
}

/// Tasks that are compiled for every instruction set.
pub(crate) trait Work: Sync {
    /// # Safety
    /// The CPU has the instructions of `S`; the rest is the implementation's to say.
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch);
}

/// Runs one task with the instructions of a set. The scratch memory is lent out here, because what is in a closure does
/// not get the instructions of the function around it.
///
/// # Safety
/// The CPU has them; what `W` asks for.
pub(crate) unsafe fn run_on<W: Work>(isa: Isa, work: &W, task: usize) {
    // SAFETY: the caller's.
    scratch::with(|scratch| unsafe {
        match isa {
            Isa::Portable => work.run::<portable::Portable>(task, scratch),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => run_avx2(work, task, scratch),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => run_avx512(work, task, scratch),
            #[cfg(not(target_arch = "x86_64"))]
            _ => unreachable!("not available"),
        }
    });
}

/// # Safety
/// As for [`run_on`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<W: Work>(work: &W, task: usize, scratch: &mut Scratch) {
    // SAFETY: the caller's; the features are enabled here.
    unsafe { work.run::<avx2::Avx2>(task, scratch) }
}

/// # Safety
/// As for [`run_on`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
unsafe fn run_avx512<W: Work>(work: &W, task: usize, scratch: &mut Scratch) {
    // SAFETY: the caller's; the features are enabled here.
    unsafe { work.run::<avx512::Avx512>(task, scratch) }
}

/// 2^f for f in [0, 1] as a polynomial, relative error 7.5e-8 (minimax); lowest power first.
#[cfg(target_arch = "x86_64")]
pub(crate) const EXP2_FROM_0: [f32; 6] =
    [0.999_999_94, 0.693_153_1, 0.240_153_61, 0.055_826_318, 0.008_989_34, 0.001_877_576_7];

/// The same for f in [-1/2, 1/2].
pub(crate) const EXP2_AROUND_0: [f32; 6] =
    [1.000_000_1, 0.693_146_94, 0.240_221_2, 0.055_507_13, 0.009_675_541, 0.001_327_647_2];

/// Exponents beyond this are cut off: 2^126 is still a normal number, and so is its reciprocal.
pub(crate) const MAX_EXPONENT: f32 = 126.0;

/// Splits `rows` rows into groups of 4, 2 or 1 vectors, with at most one vector not full.
#[inline(always)]
pub(crate) fn groups<S: Simd>(rows: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let needed = (rows - start).div_ceil(S::LANES);
        let vectors = match needed {
            0 => return None,
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        }
        .min(S::MAX_VECTORS);
        let group = start..rows.min(start + vectors * S::LANES);
        start = group.end;
        Some((group, vectors))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn silu_of<S: Simd>(xs: &[f32]) -> Vec<f32> {
        let mut ys = Vec::new();
        for &x in xs {
            let mut lanes = [0.0; 16];
            // SAFETY: LANES <= 16; the rest is the caller's.
            unsafe { S::store(lanes.as_mut_ptr(), S::silu(S::splat(x))) };
            ys.push(lanes[S::LANES - 1]);
        }
        ys
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn silu_avx2(xs: &[f32]) -> Vec<f32> {
        // SAFETY: the features are enabled here.
        unsafe { silu_of::<avx2::Avx2>(xs) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
    fn silu_avx512(xs: &[f32]) -> Vec<f32> {
        // SAFETY: the features are enabled here.
        unsafe { silu_of::<avx512::Avx512>(xs) }
    }

    fn silu(isa: Isa, xs: &[f32]) -> Vec<f32> {
        // SAFETY: the portable set needs nothing; the others are among `available`.
        unsafe {
            match isa {
                Isa::Portable => silu_of::<portable::Portable>(xs),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => silu_avx2(xs),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => silu_avx512(xs),
                #[cfg(not(target_arch = "x86_64"))]
                _ => unreachable!("not available"),
            }
        }
    }

    #[test]
    fn silu_is_right_everywhere() {
        let step = if cfg!(miri) { 7.3 } else { 0.0037 };
        let mut xs: Vec<f32> = (0..).map(|i| -60.0 + i as f32 * step).take_while(|x| *x < 120.0).collect();
        xs.extend([0.0, -0.0, 1e-30, -1e-30, 87.0, -87.0, -88.0, -104.0, 1e4, -1e4, 1e30, -1e30, f32::MAX, f32::MIN]);
        for isa in Isa::available() {
            for (&x, y) in xs.iter().zip(silu(isa, &xs)) {
                let wide = f64::from(x);
                let expected = wide / (1.0 + (-wide).exp());
                let error = (f64::from(y) - expected).abs();
                // The rounding of the exponent tells in e^-x by |x| times as much, where that is not small beside 1.
                let relative = 4e-7 + 1e-7 * f64::from((-x).clamp(0.0, 60.0));
                // Far down the true value is next to nothing; ours may be another next to nothing.
                let small = if x < -60.0 { wide.abs() * 1e-25 } else { 0.0 };
                let bound = expected.abs() * relative + small;
                assert!(error <= bound, "{isa:?}: silu({x:e}) = {y:e}, expected {expected:e}");
            }
            assert!(silu(isa, &[f32::NAN])[0].is_nan(), "{isa:?}");
        }
    }

    /// Every byte in each of the formats, and the maximum and the sum of some lanes.
    struct Bytes(std::sync::Mutex<Vec<[f32; 5]>>);

    impl Work for Bytes {
        #[inline(always)]
        unsafe fn run<S: Simd>(&self, task: usize, _: &mut Scratch) {
            let codes = [task as u8; 16];
            let (mut eight, mut four, mut e4m3fn) = ([0.0; 16], [0.0; 16], [0.0; 16]);
            let numbers: [f32; 16] = std::array::from_fn(|lane| ((task * 7 + lane * 5) % 16) as f32 - 8.0);
            // SAFETY: LANES <= 16; the rest is the caller's.
            unsafe {
                S::store(eight.as_mut_ptr(), S::widen_u8(codes.as_ptr()));
                S::store(four.as_mut_ptr(), S::widen_u4(codes.as_ptr()));
                S::store(e4m3fn.as_mut_ptr(), S::widen_e4m3fn(codes.as_ptr()));
                let numbers = S::load(numbers.as_ptr());
                let reduced = S::reduce_max(numbers) * 1000.0 + S::reduce_add(numbers);
                let last = S::LANES - 1;
                self.0.lock().unwrap().push([eight[last], four[last - 1], four[last], e4m3fn[last], reduced]);
            }
        }
    }

    #[test]
    fn bytes_become_the_numbers_of_their_formats() {
        for isa in Isa::available() {
            let bytes = Bytes(Default::default());
            for code in 0..=u8::MAX {
                // SAFETY: the set is available.
                unsafe { run_on(isa, &bytes, code.into()) };
                let [eight, low, high, e4m3fn, reduced] = bytes.0.lock().unwrap().pop().unwrap();
                let halves = [f32::from(code & 15), f32::from(code >> 4)];
                assert_eq!((eight, [low, high]), (f32::from(code), halves), "{isa:?}");
                let expected = crate::common::kv_format::from_e4m3fn(code);
                assert!(e4m3fn == expected || e4m3fn.is_nan() && expected.is_nan(), "{isa:?}: {code:#x} is {e4m3fn}");
                let lanes = if isa == Isa::Avx512 { 16 } else { 8 };
                let lanes: Vec<f32> =
                    (0..lanes).map(|lane| ((usize::from(code) * 7 + lane * 5) % 16) as f32 - 8.0).collect();
                let expected = lanes.iter().copied().fold(-8.0, f32::max) * 1000.0 + lanes.iter().sum::<f32>();
                assert_eq!(reduced, expected, "{isa:?}");
            }
        }
    }
}
