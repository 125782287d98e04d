//! How a page holds keys and values: as they are, or quantised.
//!
//! A quantised format has one block for each head of each token, with a scale (and a low end) of its own, so a token can be
//! appended without touching others. All arithmetic is in f32.

use half::f16;

/// The format of keys and values in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Numbers of the type of the keys.
    #[default]
    Native,
    /// 8 bits: `low + code * scale`.
    Int8,
    /// 4 bits: `low + code * scale`; neighbours share a byte, the first in its low half.
    Int4,
    /// 8 bits: `code * scale`, the code being an e4m3fn.
    Fp8,
}

/// The smallest scale: what a block of equal numbers has.
const SMALLEST: f32 = 1.0 / 16_777_216.0;
/// The largest e4m3fn.
const FP8_MAX: f32 = 448.0;

impl KvFormat {
    /// The one with this name: `native`, `int8`, `int4` or `fp8`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "native" => Some(Self::Native),
            "int8" => Some(Self::Int8),
            "int4" => Some(Self::Int4),
            "fp8" => Some(Self::Fp8),
            _ => None,
        }
    }

    /// The last dimension of the pool, for heads of `head_size` numbers.
    pub fn pool_width(self, head_size: usize) -> usize {
        if self == Self::Int4 { head_size / 2 } else { head_size }
    }

    /// The last dimension of the scales; 0 where there are none.
    pub fn scales_width(self) -> usize {
        match self {
            Self::Native => 0,
            Self::Int8 | Self::Int4 => 2,
            Self::Fp8 => 1,
        }
    }

    /// Quantises the numbers of one head of one token. `scales` gets the scale and, for integers, the low end. Inlined, and
    /// without branches by number, so that it gets the vector instructions of its caller.
    ///
    /// # Panics
    /// For [`KvFormat::Native`], and where a length is not what [`pool_width`](Self::pool_width) and
    /// [`scales_width`](Self::scales_width) say.
    #[inline(always)]
    pub fn quantise(self, numbers: &[f32], codes: &mut [u8], scales: &mut [f16]) {
        assert_eq!((codes.len(), scales.len()), (self.pool_width(numbers.len()), self.scales_width()));
        match self {
            Self::Native => unreachable!("native numbers are not quantised"),
            Self::Int8 => {
                let (low, scale) = range(numbers, 255.0, scales);
                for (code, number) in codes.iter_mut().zip(numbers) {
                    *code = integer(*number, low, scale, 255.0);
                }
            }
            Self::Int4 => {
                let (low, scale) = range(numbers, 15.0, scales);
                for (code, pair) in codes.iter_mut().zip(numbers.chunks_exact(2)) {
                    *code = integer(pair[0], low, scale, 15.0) | (integer(pair[1], low, scale, 15.0) << 4);
                }
            }
            Self::Fp8 => {
                let largest =
                    extreme(numbers, 0.0, |number, most| if number.abs() > most { number.abs() } else { most });
                scales[0] = f16::from_f32((largest / FP8_MAX).max(SMALLEST));
                let scale = scales[0].to_f32();
                for (code, number) in codes.iter_mut().zip(numbers) {
                    *code = e4m3fn((number / scale).clamp(-FP8_MAX, FP8_MAX));
                }
            }
        }
    }

    /// The number at `index` of a block.
    ///
    /// # Panics
    /// As for [`quantise`](Self::quantise).
    pub fn dequantise(self, codes: &[u8], scales: &[f16], index: usize) -> f32 {
        let scale = scales[0].to_f32();
        match self {
            Self::Native => unreachable!("native numbers are not quantised"),
            Self::Int8 => scales[1].to_f32() + f32::from(codes[index]) * scale,
            Self::Int4 => {
                let code = (codes[index / 2] >> (index % 2 * 4)) & 15;
                scales[1].to_f32() + f32::from(code) * scale
            }
            Self::Fp8 => from_e4m3fn(codes[index]) * scale,
        }
    }
}

/// The low end and the scale of a block with codes up to `most`, as they are stored.
#[inline(always)]
fn range(numbers: &[f32], most: f32, scales: &mut [f16]) -> (f32, f32) {
    let least = extreme(numbers, f32::INFINITY, |number, least| if number < least { number } else { least });
    let largest = extreme(numbers, f32::NEG_INFINITY, |number, most| if number > most { number } else { most });
    scales[1] = f16::from_f32(least);
    let low = scales[1].to_f32();
    scales[0] = f16::from_f32(((largest - low) / most).max(SMALLEST));
    (low, scales[0].to_f32())
}

/// The last of the numbers by `take`, which takes the one or the other; NaN is never taken.
#[inline(always)]
fn extreme(numbers: &[f32], none: f32, take: impl Fn(f32, f32) -> f32) -> f32 {
    // Side by side, as lanes of vectors.
    const LANES: usize = 16;
    let mut found = [none; LANES];
    let lanes = numbers.chunks_exact(LANES);
    let rest = lanes.remainder();
    for numbers in lanes {
        for (found, number) in found.iter_mut().zip(numbers) {
            *found = take(*number, *found);
        }
    }
    found.into_iter().chain(rest.iter().copied()).fold(none, |found, number| take(number, found))
}

#[inline(always)]
fn integer(number: f32, low: f32, scale: f32, most: f32) -> u8 {
    let code = (number - low) / scale;
    // NaN becomes 0.
    let code = if code > 0.0 { code } else { 0.0 };
    rounded(if code < most { code } else { most }) as u8
}

/// The whole number nearest to one from 0 to 2^22, ties to even: such a number plus 1.5 * 2^23 has it as its last bits.
#[inline(always)]
fn rounded(number: f32) -> u32 {
    const POINT: f32 = 12_582_912.0;
    (number + POINT).to_bits() - POINT.to_bits()
}

/// The e4m3fn nearest to a number of at most 448, ties to even.
#[inline(always)]
fn e4m3fn(number: f32) -> u8 {
    let (bits, sign) = (number.to_bits() & 0x7fff_ffff, number.to_bits() >> 24 & 0x80);
    let magnitude = f32::from_bits(bits);
    let nearest = bits + 0x7_ffff + ((bits >> 20) & 1);
    let normal = (nearest >> 20).wrapping_sub((127 - 7) << 3);
    // Below the smallest normal number, 2^-6, codes are multiples of 2^-9.
    let code = if magnitude < 1.0 / 64.0 { rounded(magnitude.min(1.0) * 512.0) } else { normal };
    (sign | if magnitude.is_nan() { 0x7f } else { code }) as u8
}

/// The number of a code e4m3fn.
pub(crate) fn from_e4m3fn(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        0x7f => f32::NAN,
        small @ 0..8 => f32::from(small) / 512.0,
        normal => f32::from_bits((u32::from(normal) + ((127 - 7) << 3)) << 20),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_e4m3fn_is_its_own_nearest() {
        for code in (0..=255).filter(|code| code & 0x7f != 0x7f) {
            assert_eq!(e4m3fn(from_e4m3fn(code)), code, "{}", from_e4m3fn(code));
        }
        assert!(from_e4m3fn(0x7f).is_nan() && from_e4m3fn(0xff).is_nan());
        assert_eq!(from_e4m3fn(0x7e), 448.0);
    }

    #[test]
    fn numbers_between_two_e4m3fn_go_to_the_nearer_and_ties_to_even() {
        for code in 0..0x7e_u8 {
            let (below, above) = (from_e4m3fn(code), from_e4m3fn(code + 1));
            let middle = (below + above) / 2.0;
            assert_eq!(e4m3fn(middle), code + code % 2, "{middle}");
            assert_eq!(e4m3fn(middle - (above - below) / 64.0), code);
            assert_eq!(e4m3fn(-middle - (above - below) / 64.0), (code + 1) | 0x80);
        }
    }

    #[test]
    fn a_number_comes_back_within_half_a_step() {
        let numbers: Vec<f32> = (0..64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 17.0).collect();
        for format in [KvFormat::Int8, KvFormat::Int4, KvFormat::Fp8] {
            let mut codes = vec![0; format.pool_width(64)];
            let mut scales = vec![f16::ZERO; format.scales_width()];
            format.quantise(&numbers, &mut codes, &mut scales);
            let step = |number: f32| match format {
                KvFormat::Fp8 => (number.abs() / 8.0).max(scales[0].to_f32() / 512.0),
                _ => scales[0].to_f32(),
            };
            for (index, number) in numbers.iter().enumerate() {
                let error = (format.dequantise(&codes, &scales, index) - number).abs();
                assert!(error <= 0.51 * step(*number), "{format:?}: {number} is off by {error}");
            }
        }
    }

    #[test]
    fn a_block_of_equal_numbers_is_exact() {
        for format in [KvFormat::Int8, KvFormat::Int4] {
            let mut codes = vec![0; format.pool_width(8)];
            let mut scales = [f16::ZERO; 2];
            format.quantise(&[0.75; 8], &mut codes, &mut scales);
            assert!((0..8).all(|index| format.dequantise(&codes, &scales, index) == 0.75), "{format:?}");
        }
    }
}
