//! Heavy hitters: the tokens stay that got the most attention.

use super::cache_policy::{CachePolicy, DeviceRule, Needs};
use super::layer_slots::LayerSlots;
use super::ranking::Ranking;

/// `h2o` and `h2o-vlen`: a token's score is the sum of the weights that it got, and the lowest leave.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// What the slots of a head are ranked by, for each place.
    pub(super) fn ranked(&self, slots: &LayerSlots, head: usize) -> impl Iterator<Item = f32> {
        let (seen, first, normalise) = (slots.seen() as f32, slots.first() as i32 - 1, self.normalise);
        let age = move |position: i32| seen - position.max(first) as f32;
        let numbers = slots.scores(head).iter().zip(slots.positions(head));
        numbers.map(move |(&score, &position)| if normalise { score / age(position) } else { score })
    }
}

impl CachePolicy for HeavyHitters {
    fn needs(&self) -> Needs {
        Needs { weights: true, lengths: self.by_length, errors: false }
    }

    fn grace(&self) -> usize {
        self.grace
    }

    fn first_eviction(&self, slots: &LayerSlots) -> Option<usize> {
        Some((self.keep_initial_fraction * slots.len() as f32) as usize)
    }

    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Ranking) {
        let mut numbers = std::mem::take(&mut to.numbers);
        for head in 0..slots.heads() {
            if !self.normalise {
                to.choose_lowest(slots, head, self.grace, slots.scores(head), count);
                continue;
            }
            numbers.clear();
            numbers.extend(self.ranked(slots, head));
            to.choose_lowest(slots, head, self.grace, &numbers, count);
        }
        to.numbers = numbers;
    }

    fn add_scores(&self, rows: usize, weights: &[f32], lengths: &[f32], scores: &mut [f32]) {
        if !self.by_length {
            scores.iter_mut().zip(weights).for_each(|(score, weight)| *score += weight);
            return;
        }
        let sum: f32 = weights.iter().zip(lengths).map(|(weight, length)| weight * length).sum();
        let scale = if sum > 0.0 { rows as f32 / sum } else { 0.0 };
        for (score, (weight, length)) in scores.iter_mut().zip(weights.iter().zip(lengths)) {
            *score += weight * length * scale;
        }
    }

    fn device_rule(&self, _: usize) -> Option<DeviceRule> {
        Some(DeviceRule::Lowest { scores: *self, score_share: None })
    }
}
