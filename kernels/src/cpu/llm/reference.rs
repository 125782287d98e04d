//! The operators of language models in their plainest form: scalar, pair by pair, float64.

use crate::common::kv_format::KvFormat;
use crate::llm::paged_attention::{KvPool, PagedAttention, Pairs, Rotation};
use crate::{BLOCK, BlockLinear, CodeBits, Element, Glu, GluActivation, InputError, Linear};

/// What `PagedAttention` computes beside the pool.
#[derive(Clone, Debug)]
pub struct Attended {
    /// `[T, Hq, D]`.
    pub output: Vec<f64>,
    /// `[B, Hkv, L]`: the weight that each slot gets, summed over the sequence's rows, mean over the query heads of a group.
    pub key_weights: Vec<f64>,
}

/// `PagedAttention` as the specification words it. Appends to the pool in place. `weights_len` is L of the weights.
pub fn paged_attention<T: Element>(
    op: &PagedAttention<'_, T>,
    pool: &mut KvPool<'_, T>,
    weights_len: usize,
) -> Result<Attended, InputError> {
    op.check(pool, Some(weights_len))?;
    append(op, pool);
    let (heads, size) = (op.query_heads, op.head_size);
    let mut output = vec![0.0; op.query.len()];
    let mut key_weights = vec![0.0; op.sequences() * op.kv_heads * weights_len];
    for sequence in 0..op.sequences() {
        for (row, head) in op.rows(sequence).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let kv_head = head / op.group();
            let at = (row * heads + head) * size;
            let query = rotated(op, &op.query[at..at + size], row);
            let seen = seen(op, sequence, row, kv_head);
            let scores: Vec<f64> = seen
                .iter()
                .map(|&(slot, distance)| {
                    let key = stored(op, pool, op.block(sequence, slot, 0, kv_head));
                    score(op, head, &query, &key, distance)
                })
                .collect();
            let sink = op.sinks.map(|sinks| wide(sinks[head]));
            let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().copied().chain(sink).map(|score| (score - most).exp()).sum();
            for (&(slot, _), score) in seen.iter().zip(scores) {
                let weight = (score - most).exp() / sum;
                let value = stored(op, pool, op.block(sequence, slot, 1, kv_head));
                for (out, value) in output[at..at + size].iter_mut().zip(value) {
                    *out += weight * value;
                }
                key_weights[(sequence * op.kv_heads + kv_head) * weights_len + slot] += weight / op.group() as f64;
            }
        }
    }
    Ok(Attended { output, key_weights })
}

/// The slots that a row sees in one kv head, each with how many positions it is before the row.
fn seen<T: Element>(op: &PagedAttention<'_, T>, sequence: usize, row: usize, head: usize) -> Vec<(usize, i64)> {
    let position = op.row_position(sequence, row);
    (0..op.slot_count(sequence))
        .filter_map(|slot| Some((slot, position - op.slot_position(sequence, head, slot)?)))
        .filter(|&(_, distance)| distance >= 0 && (op.window == 0 || distance < op.window))
        .collect()
}

fn score<T: Element>(op: &PagedAttention<'_, T>, head: usize, query: &[f64], key: &[f64], distance: i64) -> f64 {
    let mut score = op.score_scale() * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
    if op.softcap > 0.0 {
        let cap = f64::from(op.softcap);
        score = cap * (score / cap).tanh();
    }
    score - op.slopes.map_or(0.0, |slopes| f64::from(slopes[head]) * distance as f64)
}

/// Writes the new keys and values into their pages.
fn append<T: Element>(op: &PagedAttention<'_, T>, pool: &mut KvPool<'_, T>) {
    let (heads, size) = (op.kv_heads, op.head_size);
    for sequence in 0..op.sequences() {
        for (row, head) in op.rows(sequence).flat_map(|row| (0..heads).map(move |head| (row, head))) {
            let at = (row * heads + head) * size;
            let key = rotated(op, &op.key[at..at + size], row);
            let value = op.value[at..at + size].iter().map(|value| wide(*value)).collect();
            let slot = op.write_slot(sequence, row, head);
            for (which, numbers) in [key, value].into_iter().enumerate() {
                let numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
                write(op.format, pool, op.block(sequence, slot, which, head), &numbers);
            }
        }
    }
}

fn write<T: Element>(format: KvFormat, pool: &mut KvPool<'_, T>, block: usize, numbers: &[f32]) {
    match pool {
        KvPool::Native(pool) => {
            for (to, number) in pool[block * numbers.len()..].iter_mut().zip(numbers) {
                *to = T::from_f32(*number);
            }
        }
        KvPool::Quantised { codes, scales } => {
            let (width, scale) = (format.pool_width(numbers.len()), format.scales_width());
            format.quantise(numbers, &mut codes[block * width..][..width], &mut scales[block * scale..][..scale]);
        }
    }
}

/// The numbers of a block of the pool, as they are stored.
fn stored<T: Element>(op: &PagedAttention<'_, T>, pool: &KvPool<'_, T>, block: usize) -> Vec<f64> {
    let size = op.head_size;
    match pool {
        KvPool::Native(pool) => pool[block * size..][..size].iter().map(|number| wide(*number)).collect(),
        KvPool::Quantised { codes, scales } => {
            let (width, scale) = (op.format.pool_width(size), op.format.scales_width());
            let (codes, scales) = (&codes[block * width..][..width], &scales[block * scale..][..scale]);
            (0..size).map(|index| f64::from(op.format.dequantise(codes, scales, index))).collect()
        }
    }
}

/// A head of a row, rotated by the row's position. In f32, as every backend rotates: the rotated key is what is stored.
fn rotated<T: Element>(op: &PagedAttention<'_, T>, head: &[T], row: usize) -> Vec<f64> {
    let mut numbers: Vec<f32> = head.iter().map(|number| number.to_f32()).collect();
    if let (Some(Rotation { cos, sin, half_width, pairs }), Some(positions)) = (op.rotation, op.positions) {
        let first = positions[row] as usize * half_width;
        for index in 0..half_width {
            let (a, b) = match pairs {
                Pairs::Half => (index, index + half_width),
                Pairs::Interleaved => (2 * index, 2 * index + 1),
            };
            let (cos, sin) = (cos[first + index], sin[first + index]);
            (numbers[a], numbers[b]) = (numbers[a] * cos - numbers[b] * sin, numbers[b] * cos + numbers[a] * sin);
        }
    }
    numbers.into_iter().map(f64::from).collect()
}

fn wide<T: Element>(value: T) -> f64 {
    f64::from(value.to_f32())
}

/// `BlockLinear` as the specification words it: `[T, N]`.
pub fn block_linear(op: &BlockLinear<'_>) -> Result<Vec<f64>, InputError> {
    op.check(op.rows * op.width, None)?;
    let outputs = (0..op.rows * op.width).map(|at| {
        let (row, column) = (at / op.width, at % op.width);
        let x = op.x[row * op.inner..][..op.inner].iter();
        let products = x.enumerate().map(|(k, &x)| f64::from(x) * block_weight(op, column, k));
        products.sum::<f64>() + op.bias.map_or(0.0, |bias| f64::from(bias[column]))
    });
    Ok(outputs.collect())
}

fn block_weight(op: &BlockLinear<'_>, row: usize, column: usize) -> f64 {
    let at = row * op.inner + column;
    let (code, middle) = match op.bits {
        CodeBits::Four => (op.codes[at / 2] >> (at % 2 * 4) & 15, 8.0),
        CodeBits::Eight => (op.codes[at], 128.0),
    };
    let offset = op.offsets.map_or(0.0, |offsets| f64::from(offsets[at / BLOCK]));
    f64::from(op.scales[at / BLOCK]) * (f64::from(code) - middle) + offset
}

/// `Glu` as the specification words it: `[T, F]`.
pub fn glu<T: Element>(op: &Glu<'_, T>) -> Result<Vec<f64>, InputError> {
    op.check(op.x.len() / 2)?;
    let outputs = (0..op.rows * op.width).map(|at| {
        let gate = at / op.width * 2 * op.width + at % op.width;
        activation(op.activation, wide(op.x[gate])) * wide(op.x[gate + op.width])
    });
    Ok(outputs.collect())
}

/// `Linear` as the specification words it, without the rounding of what is normed: `[T, W]`, the columns of all outputs.
pub fn linear<T: Element>(op: &Linear<'_, T>) -> Result<Vec<f64>, InputError> {
    let width = op.width();
    op.check(op.widths().unwrap_or_default().map(|columns| op.rows * columns))?;
    let rows = (0..op.rows).flat_map(|row| {
        let mut x: Vec<f64> = op.x[row * op.inner..][..op.inner].iter().map(|x| wide(*x)).collect();
        if let Some(norm) = op.norm {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / op.inner as f64;
            let scale = 1.0 / (mean + f64::from(norm.epsilon)).sqrt();
            x.iter_mut().zip(norm.weight).for_each(|(x, weight)| *x *= scale * wide(*weight));
        }
        let sum = |column: usize| {
            let weight = &op.weight[column * op.inner..][..op.inner];
            let sum: f64 = x.iter().zip(weight).map(|(x, weight)| x * wide(*weight)).sum();
            sum + op.bias.map_or(0.0, |bias| wide(bias[column]))
        };
        let output = |column: usize| {
            let product = match op.activation {
                Some(kind) => activation(kind, sum(column)) * sum(width + column),
                None => sum(column),
            };
            product + op.residual.map_or(0.0, |residual| wide(residual[row * width + column]))
        };
        (0..width).map(output).collect::<Vec<_>>()
    });
    Ok(rows.collect())
}

fn activation(activation: GluActivation, x: f64) -> f64 {
    match activation {
        GluActivation::Silu => x / (1.0 + (-x).exp()),
        // Below 0 the complement, which does not cancel.
        GluActivation::Gelu => x / 2.0 * complementary_error(-x / std::f64::consts::SQRT_2),
        GluActivation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / (1.0 + (-2.0 * u).exp())
        }
    }
}

/// erfc(x) = 1 - erf(x).
fn complementary_error(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - complementary_error(-x);
    }
    let density = (-x * x).exp() / std::f64::consts::PI.sqrt();
    if x < 2.0 {
        // erf(x) = density · Σ 2 · (2x²)^n · x / (1 · 3 · … · (2n + 1)): all terms of one sign.
        let mut term = 2.0 * x;
        let mut sum = 0.0;
        for n in 1..100 {
            sum += term;
            term *= 2.0 * x * x / f64::from(2 * n + 1);
        }
        1.0 - density * sum
    } else {
        // The continued fraction x + (1/2)/(x + (2/2)/(x + (3/2)/(x + …))), from its end.
        let fraction = (1..200).rev().fold(0.0, |rest, k| f64::from(k) / 2.0 / (x + rest));
        density / (x + fraction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_complementary_error_function_is_that_of_tables() {
        let known = [
            (-3.0, 1.999_977_909_503_001_5),
            (-0.5, 1.520_499_877_813_046_5),
            (0.0, 1.0),
            (1e-3, 0.998_871_621_209_030_7),
            (1.0, 0.157_299_207_050_285_13),
            (1.99, 0.004_888_586_800_383_003),
            (2.0, 0.004_677_734_981_047_265),
            (5.0, 1.537_459_794_428_035_1e-12),
            (9.0, 4.137_031_746_513_81e-37),
        ];
        for (x, expected) in known {
            let found = complementary_error(x);
            assert!((found - expected).abs() <= 1e-12 * expected, "erfc({x}) = {found:e}, expected {expected:e}");
        }
    }
}
