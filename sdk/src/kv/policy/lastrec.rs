//! The newest tokens stay, and a few at the beginning.

use super::cache_policy::{CachePolicy, DeviceRule};
use super::layer_slots::LayerSlots;
use super::ranking::Ranking;

/// The part of the slots that a prefix of unknown length takes, and that one of known length may take.
const PREFIX_PART: f64 = 0.5;

/// A ring of the newest tokens behind a beginning that stays: `lastrec` (the sinks of StreamingLLM) and `smart-lastrec` (a
/// system prompt).
#[derive(Clone, Copy, Debug)]
pub struct LastRecent {
    kept: Option<usize>,
    is_prefix: bool,
}

impl LastRecent {
    /// Keeps so many tokens at the beginning; `None`: an eighth of the slots, from 1 to 16.
    pub fn sink(tokens: Option<usize>) -> Self {
        Self { kept: tokens, is_prefix: false }
    }

    /// Keeps a prefix of so many tokens, at most half of the slots; `None`: half of them.
    pub fn prefix(tokens: Option<usize>) -> Self {
        Self { kept: tokens, is_prefix: true }
    }

    /// How many slots at the beginning keep their tokens.
    fn kept(&self, len: usize) -> usize {
        let most = (len as f64 * PREFIX_PART) as usize;
        match (self.is_prefix, self.kept) {
            (true, kept) => kept.unwrap_or(most).min(most),
            // One at least goes on.
            (false, Some(kept)) => kept.min(len - 1),
            (false, None) => (len / 8).clamp(1, 16).min(len - 1),
        }
    }
}

impl CachePolicy for LastRecent {
    fn most_rows(&self, len: usize) -> usize {
        len - self.kept(len)
    }

    fn rank(&self, slots: &LayerSlots, count: usize, to: &mut Ranking) {
        let (len, kept) = (slots.len(), self.kept(slots.len()));
        // The first token that finds no free slot goes to the first of the ring. `seen` is before this call.
        let first = slots.seen().max(len) - len;
        for _ in 0..slots.heads() {
            to.choose((first..first + count).map(|turn| kept + turn % (len - kept)));
        }
    }

    fn device_rule(&self, len: usize) -> Option<DeviceRule> {
        Some(DeviceRule::Ring { kept: self.kept(len) })
    }
}
