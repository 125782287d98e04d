//! The online softmax: the sums of rows, and what the scores of a tile make of them.

use crate::cpu::common::simd::Simd;

/// Slots in a tile; a multiple of the lanes of every instruction set, and at most the bits of a mask.
pub(super) const TILE: usize = if cfg!(miri) { 16 } else { 64 };

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
        let largest = S::reduce_max(largest);
        let largest = if largest > *most { largest } else { *most };
        // Nothing but -inf so far: every weight is 0, or NaN where a score is.
        let base = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let mut sum = S::splat(0.0);
        for at in (0..TILE).step_by(S::LANES) {
            let weight = S::exp2(S::add(S::load(scores.as_ptr().add(at)), S::splat(-base)));
            S::store(scores.as_mut_ptr().add(at), weight);
            sum = S::add(sum, weight);
        }
        let scale = exp2::<S>(*most - base);
        (*most, *total) = (largest, *total * scale + S::reduce_add(sum));
        scale
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
