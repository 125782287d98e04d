//! The online softmax: the sums of rows, and what a tile of scores and values adds to them.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use crate::cpu::common::simd::Simd;

/// Keys in a tile; a multiple of the lanes of every instruction set.
pub(super) const TILE: usize = if cfg!(miri) { 16 } else { 64 };
/// Rows, and vectors of a row, that the sum over values has in registers.
pub(super) const SUM_ROWS: usize = 4;
pub(super) const SUM_VECTORS: usize = 4;

/// The sums of some rows: the largest score, the sum of weights, and the sum of weighted values.
pub(super) struct Sums<'a> {
    pub(super) most: &'a mut [f32],
    pub(super) total: &'a mut [f32],
    /// `[rows][padded]`.
    pub(super) values: &'a mut [f32],
}

impl Sums<'_> {
    pub(super) fn clear(&mut self) {
        self.most.fill(f32::NEG_INFINITY);
        self.total.fill(0.0);
        self.values.fill(0.0);
    }

    /// Adds the sums of another segment of one row.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; `values` is as long as a row here.
    #[inline(always)]
    pub(super) unsafe fn merge<S: Simd>(&mut self, row: usize, most: f32, total: f32, values: &[f32]) {
        if total == 0.0 {
            return;
        }
        let padded = values.len();
        let largest = if self.most[row] > most { self.most[row] } else { most };
        // SAFETY: the caller's.
        unsafe {
            let (old, new) = (exp2::<S>(self.most[row] - largest), exp2::<S>(most - largest));
            self.most[row] = largest;
            self.total[row] = self.total[row] * old + total * new;
            let to = self.values[row * padded..][..padded].as_mut_ptr();
            for at in (0..padded).step_by(S::LANES) {
                let scaled = S::mul(S::load(to.add(at)), S::splat(old));
                S::store(to.add(at), S::fma(S::load(values.as_ptr().add(at)), S::splat(new), scaled));
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `S`.
#[inline(always)]
pub(super) unsafe fn exp2<S: Simd>(x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: no set has more than 16 lanes; the rest is the caller's.
    unsafe { S::store(lanes.as_mut_ptr(), S::exp2(S::splat(x))) };
    lanes[0]
}

/// Turns scores into weights, and adds them to the total of their row. Returns what the row's sums are to be multiplied by.
///
/// # Safety
/// The CPU has the instructions of `S`; there is a score for each key of a tile.
#[inline(always)]
pub(super) unsafe fn softmax<S: Simd>(scores: &mut [f32], most: &mut f32, total: &mut f32) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut largest = S::splat(f32::NEG_INFINITY);
        for at in (0..TILE).step_by(S::LANES) {
            // In this order a NaN is passed over here, and comes back by its weight.
            largest = S::max(S::load(scores.as_ptr().add(at)), largest);
        }
        let mut lanes = [f32::NEG_INFINITY; 16];
        S::store(lanes.as_mut_ptr(), largest);
        let largest = lanes.iter().fold(*most, |largest, lane| if *lane > largest { *lane } else { largest });
        // Nothing but -inf so far: every weight is 0, or NaN where a score is.
        let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let mut sum = S::splat(0.0);
        for at in (0..TILE).step_by(S::LANES) {
            let weight = S::exp2(S::add(S::load(scores.as_ptr().add(at)), S::splat(-base)));
            S::store(scores.as_mut_ptr().add(at), weight);
            sum = S::add(sum, weight);
        }
        S::store(lanes.as_mut_ptr(), sum);
        // A tree, as `sums` has it.
        let mut count = S::LANES;
        while count > 1 {
            count /= 2;
            for lane in 0..count {
                lanes[lane] += lanes[lane + count];
            }
        }
        let scale = exp2::<S>(*most - base);
        (*most, *total) = (largest, *total * scale + lanes[0]);
        scale
    }
}

/// Multiplies the sums of up to [`SUM_ROWS`] rows by their scales, and adds the values they see by their weights.
///
/// # Safety
/// The CPU has the instructions of `S`; the layouts are those of [`TileBuffers`] and [`Sums`].
#[inline(always)]
pub(super) unsafe fn add_values<S: Simd>(
    values: &[*const f32; TILE],
    weights: &[f32],
    seen: &[Range<usize>],
    scales: &[f32],
    to: &mut [f32],
    padded: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        for (row, to) in to.chunks_exact_mut(padded).enumerate().filter(|(row, _)| !seen[*row].is_empty()) {
            scale_values::<S>(to, scales[row]);
        }
        let all =
            seen.iter().map(|seen| seen.start).max().unwrap_or(0)..seen.iter().map(|seen| seen.end).min().unwrap_or(0);
        // Rows that see the same slots share the loads of their values; what only some see comes before and after. Each row
        // adds in order of slots.
        if seen.len() == SUM_ROWS && all.start < all.end {
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &(seen[row].start..all.start), to, padded);
            }
            add_range::<S, SUM_ROWS>(values, weights, &all, to, padded);
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &(all.end..seen[row].end), to, padded);
            }
        } else {
            for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                add_range::<S, 1>(values, &weights[row * TILE..], &seen[row], to, padded);
            }
        }
    }
}

/// # Safety
/// The CPU has the instructions of `S`; the length is a multiple of the lanes.
#[inline(always)]
pub(super) unsafe fn scale_values<S: Simd>(to: &mut [f32], scale: f32) {
    for at in (0..to.len()).step_by(S::LANES) {
        // SAFETY: the caller's.
        unsafe {
            let to = to.as_mut_ptr().add(at);
            S::store(to, S::mul(S::load(to), S::splat(scale)));
        }
    }
}

/// Adds the values of some slots of a tile to the sums of `ROWS` rows.
///
/// # Safety
/// As for [`add_values`].
#[inline(always)]
pub(super) unsafe fn add_range<S: Simd, const ROWS: usize>(
    values: &[*const f32; TILE],
    weights: &[f32],
    slots: &Range<usize>,
    to: &mut [f32],
    padded: usize,
) {
    let vectors = padded / S::LANES;
    let mut first = 0;
    while first < vectors {
        // SAFETY: the caller's; the vectors are inside the rows.
        unsafe {
            match vectors - first {
                4.. => add_vectors::<S, ROWS, SUM_VECTORS>(values, weights, slots, to, padded, first * S::LANES),
                2 | 3 => add_vectors::<S, ROWS, 2>(values, weights, slots, to, padded, first * S::LANES),
                _ => add_vectors::<S, ROWS, 1>(values, weights, slots, to, padded, first * S::LANES),
            }
        }
        first += match vectors - first {
            4.. => SUM_VECTORS,
            2 | 3 => 2,
            _ => 1,
        };
    }
}

/// # Safety
/// As for [`add_range`]; `VECTORS` vectors from `at` on are inside a row.
#[inline(always)]
pub(super) unsafe fn add_vectors<S: Simd, const ROWS: usize, const VECTORS: usize>(
    values: &[*const f32; TILE],
    weights: &[f32],
    slots: &Range<usize>,
    to: &mut [f32],
    padded: usize,
    at: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [[S::splat(0.0); VECTORS]; ROWS];
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                sums[row][vector] = S::load(to.as_ptr().add(row * padded + at + vector * S::LANES));
            }
        }
        for slot in slots.clone() {
            let value = values[slot].add(at);
            let value: [S::V; VECTORS] = std::array::from_fn(|vector| S::load(value.add(vector * S::LANES)));
            for row in 0..ROWS {
                let weight = S::splat(*weights.as_ptr().add(row * TILE + slot));
                for vector in 0..VECTORS {
                    sums[row][vector] = S::fma(weight, value[vector], sums[row][vector]);
                }
            }
        }
        for row in 0..ROWS {
            for vector in 0..VECTORS {
                S::store(to.as_mut_ptr().add(row * padded + at + vector * S::LANES), sums[row][vector]);
            }
        }
    }
}
