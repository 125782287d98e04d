//! Heavy hitters for quantised pages: what quantisation has damaged most leaves earlier.

use super::cache_policy::CachePolicy;
use super::h2o::{HeavyHitters, lowest};
use super::layer_slots::LayerSlots;

/// `qh2o` and `qh2o-vlen`: a score of [`HeavyHitters`], mixed with the error of a token's keys and values.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedHeavyHitters {
    /// The scores.
    pub scores: HeavyHitters,
    /// How much the score counts against the error: c, between 0 and 1.
    pub score_share: f32,
}

/// Scales the numbers of the slots that can leave, of all heads, to between 0 and 1; equal ones to 0.
fn min_max(numbers: &mut [f32], slots: &LayerSlots, grace: usize) {
    let can_leave = |slot: usize| slot % slots.len() < slots.len() - grace;
    let among = || numbers.iter().copied().enumerate().filter(|(slot, _)| can_leave(*slot)).map(|(_, number)| number);
    let (least, most) = (among().fold(f32::INFINITY, f32::min), among().fold(f32::NEG_INFINITY, f32::max));
    let scale = if most > least { 1.0 / (most - least) } else { 0.0 };
    numbers.iter_mut().for_each(|number| *number = (*number - least) * scale);
}

impl CachePolicy for QuantisedHeavyHitters {
    fn needs_weights(&self) -> bool {
        true
    }

    fn grace(&self) -> usize {
        self.scores.grace
    }

    fn first_eviction(&self, slots: &LayerSlots) -> Option<usize> {
        self.scores.first_eviction(slots)
    }

    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Vec<Vec<usize>>) {
        let (mut ranked, mut errors) = (self.scores.ranked(slots), slots.errors().to_vec());
        min_max(&mut ranked, slots, self.scores.grace);
        min_max(&mut errors, slots, self.scores.grace);
        let share = self.score_share;
        for (score, error) in ranked.iter_mut().zip(errors) {
            *score = share * *score + (share - 1.0) / 2.0 * error + (1.0 - share);
        }
        lowest(&ranked, slots, self.scores.grace, count, to);
    }

    fn scores(&self, slots: &LayerSlots, rows: usize, weights: &mut [f32]) {
        self.scores.scores(slots, rows, weights);
    }
}
