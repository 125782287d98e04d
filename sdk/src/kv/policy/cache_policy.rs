//! What a policy decides.

use super::layer_slots::LayerSlots;

/// Which tokens leave a full cache.
pub trait CachePolicy: std::fmt::Debug + Send + Sync {
    /// Whether [`LayerSlots::commit`] needs the weights that slots got (`key_weights` of `PagedAttention`).
    fn needs_weights(&self) -> bool {
        false
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

    /// The slots of each head that are overwritten next, in this order: `count` of them for each head, out of
    /// `0..slots.len() - self.grace()`. All of these are in use.
    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Vec<Vec<usize>>);

    /// What a slot's score grows by, for its weight in a call of `rows` rows. `weights` is `[heads, len]`, and becomes it.
    fn scores(&self, slots: &LayerSlots, rows: usize, weights: &mut [f32]) {
        let _ = (slots, rows, weights);
    }
}
