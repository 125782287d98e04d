//! The weights of slots, computed a second time once the sums of every row are known.

use super::attend::BLOCKS;
use super::plan::{Block, tokens_at_once};
use super::rows::{Rows, TileBuffers};
use super::softmax::{TILE, exp2};
use super::stored::{Copied, Stored};
use crate::Element;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work};
use crate::llm::paged_attention::PagedAttention;

/// The weights that slots get, computed a second time once the sums of every row are known.
pub(super) struct Weigh<'a, T> {
    pub(super) op: &'a PagedAttention<'a, T>,
    pub(super) stored: Stored<'a, T>,
    pub(super) stats: &'a [f32],
    pub(super) padded: usize,
    pub(super) len: usize,
    pub(super) weights: Shared<f32>,
}

impl<T: Element> Work for Weigh<'_, T> {
    /// # Safety
    /// No other thread runs the same task; the weights are as long as the call says.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (op, padded) = (self.op, self.padded);
        let (sequence, head) = (task / op.kv_heads, task % op.kv_heads);
        // SAFETY: the weights of this head of this sequence are this task's own.
        let to = unsafe { std::slice::from_raw_parts_mut(self.weights.pointer().add(task * self.len), self.len) };
        to.fill(0.0);
        let (rows, step) = (op.rows(sequence), tokens_at_once(op.group()));
        for first in rows.clone().step_by(step) {
            let block = Block { sequence, heads: head..head + 1, tokens: first..rows.end.min(first + step) };
            let rows = Rows::new(op, &block);
            let count = rows.count();
            let queries = &mut scratch.queries.at_least(count * padded)[..count * padded];
            // SAFETY: the caller's.
            unsafe { rows.load_queries::<S>(queries, padded) };
            scratch.masks.resize(count, 0);
            let mut tile = TileBuffers {
                blocks: &mut scratch.values.at_least(BLOCKS * padded)[..BLOCKS * padded],
                weights: &mut scratch.weights.at_least(count * TILE)[..count * TILE],
                masks: &mut scratch.masks,
            };
            for start in (0..rows.slots).step_by(TILE) {
                let end = rows.slots.min(start + TILE);
                rows.fill_masks(start, end, tile.masks);
                // SAFETY: the caller's; the buffers have the sizes that `rows` asks for.
                unsafe { rows.products::<S, Copied>(self.stored, &rows.locate(start, end), queries, &mut tile) };
                for row in (0..count).filter(|&row| tile.masks[row] != 0) {
                    let (token, query_head) = rows.row(row);
                    let stats = &self.stats[2 * (token * op.query_heads + query_head)..];
                    let (most, total) = (stats[0], stats[1]);
                    let scores = &mut tile.weights[row * TILE..][..TILE];
                    // SAFETY: the caller's.
                    unsafe { rows.scores::<S>(row, tile.masks[row], start, scores) };
                    for (to, score) in to[start..end].iter_mut().zip(scores) {
                        if *score != f32::NEG_INFINITY {
                            // SAFETY: the caller's.
                            *to += unsafe { exp2::<S>(*score - most) } / total;
                        }
                    }
                }
            }
        }
        to.iter_mut().for_each(|weight| *weight /= op.group() as f32);
    }
}
