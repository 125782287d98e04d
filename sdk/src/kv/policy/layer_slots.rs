//! The slots of one layer of one sequence, and what is in them.

/// The slots of one layer of one sequence.
///
/// Slots are counted as a policy sees them. Where a slot is in the pages is [`place`](Self::place): a token that moves from
/// one slot to another stays where it is, and the slots change places.
#[derive(Clone, Debug)]
pub struct LayerSlots {
    pub(super) heads: usize,
    pub(super) len: usize,
    pub(super) used: usize,
    /// Tokens that came so far, and those of the first call.
    pub(super) seen: usize,
    pub(super) first: usize,
    /// Whether a token has left since all slots were in use.
    pub(super) evicted: bool,
    /// The slot whose token leaves the grace period next, counted from the first of them.
    pub(super) turn: usize,
    /// All `[heads, len]`.
    pub(super) place: Vec<usize>,
    pub(super) token_pos: Vec<i32>,
    pub(super) scores: Vec<f32>,
    pub(super) lengths: Vec<f32>,
    pub(super) errors: Vec<f32>,
}

impl LayerSlots {
    /// Heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Slots of each head.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no slot is in use.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Slots that are in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Tokens that came so far.
    pub fn seen(&self) -> usize {
        self.seen
    }

    /// Tokens of the first call.
    pub fn first(&self) -> usize {
        self.first
    }

    /// `[heads, len]`: where each slot is in the pages.
    pub fn place(&self) -> &[usize] {
        &self.place
    }

    /// `[heads, len]`: the position of the token in each slot; -1: none.
    pub fn token_pos(&self) -> &[i32] {
        &self.token_pos
    }

    /// `[heads, len]`: the score of each slot.
    pub fn scores(&self) -> &[f32] {
        &self.scores
    }

    /// `[heads, len]`: the lengths of the values.
    pub fn lengths(&self) -> &[f32] {
        &self.lengths
    }

    /// `[heads, len]`: the errors of quantisation.
    pub fn errors(&self) -> &[f32] {
        &self.errors
    }
}
