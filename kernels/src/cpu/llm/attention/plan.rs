//! How a call is cut into tasks.

use std::ops::Range;

use crate::Element;
use crate::llm::paged_attention::PagedAttention;

/// Slots whose sums are computed apart; a multiple of the tile.
pub(super) const SEGMENT: usize = if cfg!(miri) { 32 } else { 256 };
/// Rows of a block of several tokens: their queries and sums fit the first cache.
pub(super) const ROWS: usize = 64;
/// The most rows of a block of several tokens whose segments are computed apart: more would take much memory for their sums.
const SPLIT_ROWS: usize = 16;
/// Tasks that keep every thread busy: with fewer, the heads of a token are spread too.
const TASKS: usize = 16;
/// The most blocks whose segments are computed apart: more keep every thread busy without.
const SPLIT_BLOCKS: usize = 64;

/// The rows of a block: of some tokens those query heads that read some kv heads.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) sequence: usize,
    /// kv heads.
    pub(super) heads: Range<usize>,
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
        let mut plan = Self { tasks: Vec::new(), splits: Vec::new(), partial_rows: 0, products: 0 };
        for sequence in 0..op.sequences() {
            let rows = op.rows(sequence);
            let step = tokens_at_once(op.group());
            for first in rows.clone().step_by(step) {
                plan.add(op, sequence, first..rows.end.min(first + step));
            }
        }
        plan
    }

    fn add<T: Element>(&mut self, op: &PagedAttention<'_, T>, sequence: usize, tokens: Range<usize>) {
        let slots = match op.slots {
            Some(slots) => slots.len,
            None => op.cached(sequence) + tokens.end - op.rows(sequence).start,
        };
        let segments = slots.div_ceil(SEGMENT);
        let count = tokens.len() * op.group();
        let few = tokens.len() == 1 || count <= SPLIT_ROWS;
        // The keys of all heads of a token are next to each other in memory, so few rows take all heads at once.
        let heads = match few {
            true => (op.kv_heads * segments * op.sequences() / TASKS).min(ROWS / count).clamp(1, op.kv_heads),
            false => 1,
        };
        let splits = segments > 1 && few && op.sequences() * op.kv_heads.div_ceil(heads) <= SPLIT_BLOCKS;
        for first in (0..op.kv_heads).step_by(heads) {
            let block = Block { sequence, heads: first..op.kv_heads.min(first + heads), tokens: tokens.clone() };
            let count = count * block.heads.len();
            let products = |slots: usize| (slots * count * op.head_size) as u64;
            self.products += products(slots);
            if !splits {
                self.tasks.push(Task { block, segments: 0..segments, partial: None, products: products(slots) });
                continue;
            }
            for segment in 0..segments {
                self.tasks.push(Task {
                    block: block.clone(),
                    segments: segment..segment + 1,
                    partial: Some(self.partial_rows + segment * count),
                    products: products(SEGMENT.min(slots - segment * SEGMENT)),
                });
            }
            self.splits.push(Split { block, segments, partial: self.partial_rows });
            self.partial_rows += segments * count;
        }
    }
}

/// The tokens of a block, so that its rows are a multiple of those that registers hold, where that is possible.
pub(super) fn tokens_at_once(group: usize) -> usize {
    let tokens = ROWS / group;
    if tokens > 4 { tokens / 4 * 4 } else { tokens.max(1) }
}
