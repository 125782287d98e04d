//! Softmax without its division: the weight of a token is its probability over that of the most likely one.

use std::f64::consts::{LN_2, LOG2_E};

/// Sums are made of the sums of this many weights, so that a draw can skip as many at once.
const CHUNK: usize = 64;

/// Softmax of logits at a temperature.
#[derive(Clone, Copy, Debug)]
pub(super) struct Softmax {
    max: f64,
    scale: f64,
}

impl Softmax {
    /// `max` is the largest logit, above −∞; `temperature` is above 0.
    pub(super) fn new(max: f32, temperature: f32) -> Self {
        Self { max: f64::from(max), scale: LOG2_E / f64::from(temperature) }
    }

    /// e^((logit − max) / temperature), in f64: a small temperature or a huge logit overflows nothing. 0 for −∞ and NaN.
    /// The exponential is our own: that of the C library differs between systems, and a draw must not.
    #[inline(always)]
    pub(super) fn weight(self, logit: f32) -> f64 {
        let logit = f64::from(logit);
        // Where the largest logit is +∞, it has all of the probability.
        let exponent = if logit == self.max { 0.0 } else { (logit - self.max) * self.scale };
        exp2(exponent)
    }

    /// The weights of many logits.
    pub(super) fn weights(self, logits: &[f32], weights: &mut Vec<f64>) {
        weights.resize(logits.len(), 0.0);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { self.fill_avx2(logits, weights) };
        }
        self.fill(logits, weights);
    }

    /// The same numbers as [`fill`](Self::fill), because a product and a sum stay two roundings without FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn fill_avx2(self, logits: &[f32], weights: &mut [f64]) {
        self.fill(logits, weights);
    }

    #[inline(always)]
    fn fill(self, logits: &[f32], weights: &mut [f64]) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = self.weight(logit);
        }
    }
}

/// 2^x for x ≤ 0, to 1e-14 relative. 0 below 2^-1000, which no sum with a weight of 1 in it can tell from 0, and for NaN.
#[inline(always)]
fn exp2(x: f64) -> f64 {
    const SMALLEST: f64 = -1000.0;
    // Adding it rounds to a whole number, which is then in the low bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let shifted = x.max(SMALLEST) + ROUND;
    let fraction = x - (shifted - ROUND);
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    let mut sum = TAYLOR[TAYLOR.len() - 1];
    for &coefficient in TAYLOR[..TAYLOR.len() - 1].iter().rev() {
        sum = sum * fraction + coefficient;
    }
    if x >= SMALLEST { sum * power } else { 0.0 }
}

/// The coefficients of 2^x at 0.
const TAYLOR: [f64; 12] = {
    let mut coefficients = [1.0; 12];
    let mut n = 1;
    while n < coefficients.len() {
        coefficients[n] = coefficients[n - 1] * LN_2 / n as f64;
        n += 1;
    }
    coefficients
};

/// The sum of weights.
pub(super) fn total(weights: &[f64]) -> f64 {
    weights.chunks(CHUNK).map(chunk_sum).sum()
}

/// The index of the weight that `uniform`, above 0 and below 1, of the total falls on. It is never one of 0. At least
/// one weight must be above 0.
pub(super) fn draw(weights: &[f64], total: f64, uniform: f64) -> usize {
    let target = uniform * total;
    let mut sum = 0.0;
    let (mut last, mut before) = (0, 0.0);
    for (index, chunk) in weights.chunks(CHUNK).enumerate() {
        let next = sum + chunk_sum(chunk);
        if next > sum {
            (last, before) = (index, sum);
        }
        if next > target {
            break;
        }
        sum = next;
    }
    // Inside a chunk the sum is in another order, so rounding can leave it below the target: then it is the last weight.
    let mut drawn = last * CHUNK;
    for (index, &weight) in weights.iter().enumerate().skip(last * CHUNK).take(CHUNK) {
        if weight > 0.0 {
            drawn = index;
            before += weight;
            if before > target {
                break;
            }
        }
    }
    drawn
}

fn chunk_sum(chunk: &[f64]) -> f64 {
    // Independent lanes, so that the compiler can use vector instructions.
    let mut lanes = [0.0; 8];
    let mut parts = chunk.chunks_exact(8);
    for part in &mut parts {
        for (lane, &weight) in lanes.iter_mut().zip(part) {
            *lane += weight;
        }
    }
    lanes.iter().chain(parts.remainder()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp2_agrees_with_the_c_library() {
        for step in 0..200_000 {
            let x = -f64::from(step) * 0.00497;
            let (got, expected) = (exp2(x), x.exp2());
            assert!((got / expected - 1.0).abs() < 1e-14, "2^{x} = {expected}, not {got}");
        }
        assert_eq!(exp2(0.0), 1.0);
        assert_eq!(exp2(-1.0), 0.5);
        assert_eq!(exp2(-1000.0), (-1000f64).exp2());
        assert_eq!(exp2(-1001.0), 0.0);
        assert_eq!(exp2(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp2(f64::NAN), 0.0);
    }

    #[test]
    fn vector_instructions_give_the_same_numbers() {
        let logits: Vec<f32> = (0..5003).map(|index| index as f32 * -0.0137).chain([f32::NAN, f32::MIN]).collect();
        let softmax = Softmax::new(0.0, 0.7);
        let mut weights = Vec::new();
        softmax.weights(&logits, &mut weights);
        for (&logit, weight) in logits.iter().zip(weights) {
            assert_eq!(softmax.weight(logit).to_bits(), weight.to_bits(), "{logit}");
        }
    }

    #[test]
    fn extreme_logits_and_temperatures_overflow_nothing() {
        let weights = |logits: &[f32], temperature| {
            let mut weights = Vec::new();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            Softmax::new(max, temperature).weights(logits, &mut weights);
            weights
        };
        assert_eq!(weights(&[f32::MAX, f32::MIN, f32::MAX], 1e-3), [1.0, 0.0, 1.0]);
        assert_eq!(weights(&[f32::INFINITY, f32::MAX, f32::NEG_INFINITY], 1.0), [1.0, 0.0, 0.0]);
        assert_eq!(weights(&[1.0, 1.0 - f32::EPSILON, f32::NAN], 1e-45)[0], 1.0);
        assert_eq!(weights(&[1.0, 0.5], f32::MAX), [1.0, 1.0]);
        let tiny = weights(&[0.0, -0.001], 1e-3);
        assert!((tiny[1] - (-1f64).exp()).abs() < 1e-7, "{tiny:?}");
    }

    #[test]
    fn a_draw_never_takes_a_weight_of_0() {
        for place in [0, 1, 63, 64, 65, 199] {
            let mut weights = vec![0.0; 200];
            weights[place] = 0.3;
            for uniform in [f64::MIN_POSITIVE, 0.5, 1.0 - f64::EPSILON / 2.0, 1.0] {
                assert_eq!(draw(&weights, total(&weights), uniform), place);
            }
        }
    }

    #[test]
    fn a_draw_takes_the_weight_that_the_number_falls_on() {
        let weights: Vec<f64> = (0..1000).map(|index| f64::from(index % 7)).collect();
        let sum = total(&weights);
        assert_eq!(sum, weights.iter().sum::<f64>());
        let mut before = 0.0;
        for (index, &weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            assert_eq!(draw(&weights, sum, (before + 0.01) / sum), index);
            assert_eq!(draw(&weights, sum, (before + weight - 0.01) / sum), index);
            before += weight;
        }
    }
}
