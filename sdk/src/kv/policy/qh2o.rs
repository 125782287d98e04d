//! Heavy hitters for quantised pages: what quantisation has damaged most leaves earlier.

use super::cache_policy::{CachePolicy, DeviceRule, Needs};
use super::h2o::HeavyHitters;
use super::layer_slots::LayerSlots;
use super::ranking::Ranking;

/// `qh2o` and `qh2o-vlen`: a score of [`HeavyHitters`], mixed with the error of a token's keys and values.
#[derive(Clone, Copy, Debug)]
pub struct QuantisedHeavyHitters {
    /// The scores.
    pub scores: HeavyHitters,
    /// How much the score counts against the error: c, between 0 and 1.
    pub score_share: f32,
}

/// How numbers are scaled to between 0 and 1; equal ones to 0.
#[derive(Clone, Copy)]
struct MinMax {
    least: f32,
    scale: f32,
}

impl MinMax {
    /// By the slots that can leave, of all heads.
    fn of(slots: &LayerSlots, grace: usize, numbers: impl Fn(usize, usize) -> f32) -> Self {
        let slots_of = move |head| (0..slots.len() - grace).map(move |slot| (head, slots.place(head, slot)));
        let among = || (0..slots.heads()).flat_map(slots_of).map(|(head, place)| numbers(head, place));
        let (least, most) = (among().fold(f32::INFINITY, f32::min), among().fold(f32::NEG_INFINITY, f32::max));
        Self { least, scale: if most > least { 1.0 / (most - least) } else { 0.0 } }
    }

    fn apply(self, number: f32) -> f32 {
        (number - self.least) * self.scale
    }
}

impl CachePolicy for QuantisedHeavyHitters {
    fn needs(&self) -> Needs {
        Needs { errors: true, ..self.scores.needs() }
    }

    fn grace(&self) -> usize {
        self.scores.grace
    }

    fn first_eviction(&self, slots: &LayerSlots) -> Option<usize> {
        self.scores.first_eviction(slots)
    }

    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Ranking) {
        let (len, grace, share) = (slots.len(), self.scores.grace, self.score_share);
        let mut numbers = std::mem::take(&mut to.numbers);
        numbers.clear();
        (0..slots.heads()).for_each(|head| numbers.extend(self.scores.ranked(slots, head)));
        let of_scores = MinMax::of(slots, grace, |head, place| numbers[head * len + place]);
        let of_errors = MinMax::of(slots, grace, |head, place| slots.errors(head)[place]);
        for (head, numbers) in numbers.chunks_exact_mut(len).enumerate() {
            for (number, &error) in numbers.iter_mut().zip(slots.errors(head)) {
                let error = (share - 1.0) / 2.0 * of_errors.apply(error);
                *number = share * of_scores.apply(*number) + error + (1.0 - share);
            }
            to.choose_lowest(slots, head, grace, numbers, count);
        }
        to.numbers = numbers;
    }

    fn add_scores(&self, rows: usize, weights: &[f32], lengths: &[f32], scores: &mut [f32]) {
        self.scores.add_scores(rows, weights, lengths, scores);
    }

    fn device_rule(&self, _: usize) -> Option<DeviceRule> {
        Some(DeviceRule::Lowest { scores: self.scores, score_share: Some(self.score_share) })
    }
}
