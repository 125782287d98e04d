//! How a call is cut into tasks.

use std::ops::Range;

use crate::Element;
use crate::llm::paged_attention::PagedAttention;

/// Slots whose sums are computed apart; a multiple of the tile.
pub(super) const SEGMENT: usize = if cfg!(miri) { 32 } else { 1024 };
/// Rows of a block, unless one token has more.
pub(super) const ROWS: usize = 64;
/// The most rows of a block of several tokens whose segments are computed apart: more would take much memory for their sums.
pub(super) const SPLIT_ROWS: usize = 16;
/// The most blocks of one token each that are split: more keep every thread busy without.
pub(super) const SPLIT_BLOCKS: usize = 64;

/// The rows of a block.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) sequence: usize,
    pub(super) head: usize,
    /// Rows of the batch: tokens of the sequence.
    pub(super) tokens: Range<usize>,
}

/// A block, or one segment of it.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) block: Block,
    pub(super) segments: Range<usize>,
    /// Where the sums of the segment go, counted in rows, where segments are computed apart.
    pub(super) partial: Option<usize>,
    pub(super) products: u64,
}

/// A block whose segments are computed apart, and where their sums are.
pub(super) struct Split {
    pub(super) block: Block,
    pub(super) segments: usize,
    pub(super) partial: usize,
}

pub(super) struct Plan {
    pub(super) tasks: Vec<Task>,
    pub(super) splits: Vec<Split>,
    pub(super) partial_rows: usize,
    pub(super) products: u64,
}

impl Plan {
    pub(super) fn new<T: Element>(op: &PagedAttention<'_, T>) -> Self {
        let group = op.group();
        let mut plan = Self { tasks: Vec::new(), splits: Vec::new(), partial_rows: 0, products: 0 };
        for sequence in 0..op.sequences() {
            let rows = op.rows(sequence);
            for first in rows.clone().step_by((ROWS / group).max(1)) {
                let tokens = first..rows.end.min(first + (ROWS / group).max(1));
                let slots = match op.slots {
                    Some(slots) => slots.len,
                    None => op.cached(sequence) + tokens.end - rows.start,
                };
                let segments = slots.div_ceil(SEGMENT);
                let count = tokens.len() * group;
                for head in 0..op.kv_heads {
                    let block = Block { sequence, head, tokens: tokens.clone() };
                    let products = |slots: usize| (slots * count * op.head_size) as u64;
                    plan.products += products(slots);
                    let few = tokens.len() == 1 || count <= SPLIT_ROWS;
                    if segments < 2 || !few || op.sequences() * op.kv_heads > SPLIT_BLOCKS {
                        plan.tasks.push(Task {
                            block,
                            segments: 0..segments,
                            partial: None,
                            products: products(slots),
                        });
                        continue;
                    }
                    for segment in 0..segments {
                        plan.tasks.push(Task {
                            block: block.clone(),
                            segments: segment..segment + 1,
                            partial: Some(plan.partial_rows + segment * count),
                            products: products(SEGMENT),
                        });
                    }
                    plan.splits.push(Split { block, segments, partial: plan.partial_rows });
                    plan.partial_rows += segments * count;
                }
            }
        }
        plan
    }
}
