//! What a policy decides.

use super::layer_slots::LayerSlots;
use super::ranking::Ranking;

/// Which tokens leave a full cache.
pub trait CachePolicy: std::fmt::Debug + Send + Sync {
    /// What [`LayerSlots::commit`] needs to know of a call.
    fn needs(&self) -> Needs {
        Needs::default()
    }

    /// Slots at the end that hold the newest tokens, in turn. A token that leaves them moves, with its score, to a slot that
    /// [`rank`](Self::rank) chooses.
    fn grace(&self) -> usize {
        0
    }

    /// The most tokens that a call may bring to `len` slots that are in use: no slot can take two of them.
    fn most_rows(&self, len: usize) -> usize {
        len - self.grace()
    }

    /// Where the first eviction begins if the first call filled all slots: there are no scores to choose by. `None`: it is
    /// chosen as any other.
    fn first_eviction(&self, slots: &LayerSlots) -> Option<usize> {
        let _ = slots;
        None
    }

    /// Chooses the slots of each head that are overwritten next, in this order: for one head after the other, `count` of them out
    /// of `0..slots.len() - self.grace()`.
    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Ranking);

    /// Adds to the scores of one head what a call of `rows` rows makes of its weights. `weights`, `lengths` (empty unless the
    /// policy needs them) and `scores` have a number for each slot of the head.
    fn add_scores(&self, rows: usize, weights: &[f32], lengths: &[f32], scores: &mut [f32]) {
        let _ = (rows, lengths);
        scores.iter_mut().zip(weights).for_each(|(score, weight)| *score += weight);
    }

    /// How [`DeviceSlots`](super::DeviceSlots) decides as this policy does, for `len` slots of each head; `None`: the host decides.
    fn device_rule(&self, len: usize) -> Option<DeviceRule> {
        let _ = len;
        None
    }
}

/// How the GPU decides.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeviceRule {
    /// The newest tokens stay, and those of the first `kept` slots.
    Ring {
        /// Slots at the beginning.
        kept: usize,
    },
    /// The slots with the lowest scores leave; those of [`HeavyHitters`](super::HeavyHitters) and its kin.
    Lowest {
        /// How scores grow, and which slots stay.
        scores: super::HeavyHitters,
        /// How much a score counts against the error of quantisation; `None`: errors do not count.
        score_share: Option<f32>,
    },
}

/// What a policy needs to know of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The weights that slots got: `key_weights` of `PagedAttention`.
    pub weights: bool,
    /// The lengths (2-norms) of values.
    pub lengths: bool,
    /// The errors of quantisation.
    pub errors: bool,
}
