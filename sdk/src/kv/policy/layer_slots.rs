//! The slots of one layer of one sequence, and what is in them.

/// The slots of one layer of one sequence.
///
/// A policy counts slots; the pages have places. A token that moves from one slot to another, as it leaves the grace period, stays
/// where it is, and the slots change places. Without a grace period a slot is its place. What is known of a token is kept by
/// place: it never moves.
#[derive(Clone, Debug, PartialEq)]
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
    /// `[heads, len]`: the place of each slot; empty where each is its own.
    pub(super) places: Vec<u32>,
    /// `[heads, len]` by place.
    pub(super) token_pos: Vec<i32>,
    /// The same; each is empty where the policy does not need it.
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

    /// The place of a slot of a head.
    pub fn place(&self, head: usize, slot: usize) -> usize {
        self.places(head).map_or(slot, |places| places[slot] as usize)
    }

    /// The places of a head's slots; `None`: each is its own.
    pub fn places(&self, head: usize) -> Option<&[u32]> {
        (!self.places.is_empty()).then(|| &self.places[head * self.len..][..self.len])
    }

    /// `[heads, len]`: the position of the token in each place; -1: none. It is `token_pos` of `PagedAttention`.
    pub fn token_pos(&self) -> &[i32] {
        &self.token_pos
    }

    /// The positions of a head, by place.
    pub fn positions(&self, head: usize) -> &[i32] {
        &self.token_pos[head * self.len..][..self.len]
    }

    /// The scores of a head, by place; empty if the policy needs none.
    pub fn scores(&self, head: usize) -> &[f32] {
        self.of_head(&self.scores, head)
    }

    /// The lengths of a head's values, by place; empty if the policy needs none.
    pub fn lengths(&self, head: usize) -> &[f32] {
        self.of_head(&self.lengths, head)
    }

    /// The errors of quantisation of a head, by place; empty if the policy needs none.
    pub fn errors(&self, head: usize) -> &[f32] {
        self.of_head(&self.errors, head)
    }

    fn of_head<'a>(&self, numbers: &'a [f32], head: usize) -> &'a [f32] {
        numbers.get(head * self.len..(head + 1) * self.len).unwrap_or_default()
    }
}
