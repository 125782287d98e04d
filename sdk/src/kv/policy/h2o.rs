//! Heavy hitters: the tokens stay that got the most attention.

use super::cache_policy::CachePolicy;
use super::layer_slots::LayerSlots;

/// `h2o` and `h2o-vlen`: a token's score is the sum of the weights that it got, and the lowest leave.
#[derive(Clone, Copy, Debug)]
pub struct HeavyHitters {
    /// Whether a weight counts by the length of the value that it multiplies (`h2o-vlen`).
    pub by_length: bool,
    /// Slots for the newest tokens, which do not leave.
    pub grace: usize,
    /// The part of the slots that the first eviction leaves alone at the beginning.
    pub keep_initial_fraction: f32,
    /// Whether a score counts by the time that its token has been there.
    pub normalise: bool,
}

impl HeavyHitters {
    /// What slots are ranked by, `[heads, len]`.
    pub(super) fn ranked(&self, slots: &LayerSlots) -> Vec<f32> {
        let age = |position: i32| {
            let since = position.max(slots.first() as i32 - 1);
            slots.seen() as f32 - since as f32
        };
        let of = |(&score, &position): (&f32, &i32)| if self.normalise { score / age(position) } else { score };
        slots.scores().iter().zip(slots.token_pos()).map(of).collect()
    }
}

/// The slots of each head with the lowest numbers, ties to the lowest slot.
pub(super) fn lowest(numbers: &[f32], slots: &LayerSlots, grace: usize, count: usize, to: &mut [Vec<usize>]) {
    for (numbers, to) in numbers.chunks_exact(slots.len()).zip(to) {
        let mut order: Vec<usize> = (0..slots.len() - grace).collect();
        let by_number = |&a: &usize, &b: &usize| numbers[a].total_cmp(&numbers[b]).then(a.cmp(&b));
        if count < order.len() {
            order.select_nth_unstable_by(count, by_number);
            order.truncate(count);
        }
        order.sort_unstable_by(by_number);
        to.extend(order);
    }
}

impl CachePolicy for HeavyHitters {
    fn needs_weights(&self) -> bool {
        true
    }

    fn grace(&self) -> usize {
        self.grace
    }

    fn first_eviction(&self, slots: &LayerSlots) -> Option<usize> {
        Some((self.keep_initial_fraction * slots.len() as f32) as usize)
    }

    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Vec<Vec<usize>>) {
        lowest(&self.ranked(slots), slots, self.grace, count, to);
    }

    fn scores(&self, slots: &LayerSlots, rows: usize, weights: &mut [f32]) {
        if !self.by_length {
            return;
        }
        let lengths = slots.lengths().chunks_exact(slots.len());
        for (weights, lengths) in weights.chunks_exact_mut(slots.len()).zip(lengths) {
            weights.iter_mut().zip(lengths).for_each(|(weight, length)| *weight *= length);
            let sum: f32 = weights.iter().sum();
            let scale = if sum > 0.0 { rows as f32 / sum } else { 0.0 };
            weights.iter_mut().for_each(|weight| *weight *= scale);
        }
    }
}
