//! The weights of slots, once the sums of every row are known: from the scores that were kept, or from scores that are computed a
//! second time where there are too many to keep.

use super::attend::BLOCKS;
use super::plan::{Block, tokens_at_once};
use super::rows::{KeptScores, Rows, TileBuffers};
use super::softmax::TILE;
use super::stored::{Copied, Stored};
use crate::Element;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work};
use crate::llm::paged_attention::PagedAttention;

/// The most bytes of scores that a call keeps: a step that decodes, or a chunk of a prompt with a few thousand slots.
const MOST_BYTES: usize = if cfg!(miri) { 1 << 16 } else { 32 << 20 };

/// Memory for the scores of a call, and their stride; `None` where they are too many.
pub(super) fn kept_scores<T: Element>(op: &PagedAttention<'_, T>) -> Option<(Vec<f32>, usize)> {
    let slots = (0..op.sequences()).map(|sequence| op.slot_count(sequence)).max().unwrap_or(0);
    let stride = slots.next_multiple_of(TILE);
    let count = op.total_rows * op.query_heads * stride;
    // What is read of it is written before; zeros that are not touched take no time.
    (count * size_of::<f32>() <= MOST_BYTES).then(|| (vec![0.0; count], stride))
}

/// The weights that slots get, by the scores that were kept.
pub(super) struct WeighKept<'a, T> {
    pub(super) op: &'a PagedAttention<'a, T>,
    pub(super) kept: KeptScores,
    pub(super) stats: &'a [f32],
    pub(super) len: usize,
    pub(super) weights: Shared<f32>,
}

impl<T: Element> Work for WeighKept<'_, T> {
    /// # Safety
    /// No other thread runs the same task; the weights are as long as the call says, and all scores are there.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let op = self.op;
        let (sequence, head) = (task / op.kv_heads, task % op.kv_heads);
        let sums = &mut scratch.weights.at_least(self.kept.stride)[..self.kept.stride];
        sums.fill(0.0);
        for (token, query_head) in op.rows(sequence).flat_map(|token| (0..op.group()).map(move |at| (token, at))) {
            let row = token * op.query_heads + head * op.group() + query_head;
            let (most, total) = (self.stats[2 * row], self.stats[2 * row + 1]);
            if total == 0.0 {
                continue;
            }
            // Without slots of its own a row sees none behind its position, and those tiles may have no scores.
            let slots = match op.slots {
                Some(slots) => slots.len,
                None => op.row_position(sequence, token) as usize + 1,
            };
            // SAFETY: the caller's; the scores of these tiles are written.
            unsafe {
                let scores = self.kept.scores.pointer().add(row * self.kept.stride);
                for start in (0..slots).step_by(TILE) {
                    add_weights::<S>(scores.add(start), most, total * op.group() as f32, sums[start..].as_mut_ptr());
                }
            }
        }
        // SAFETY: the weights of this head of this sequence are this task's own.
        let to = unsafe { std::slice::from_raw_parts_mut(self.weights.pointer().add(task * self.len), self.len) };
        put(sums, to);
    }
}

/// Adds the weights of a tile's scores. Both ways add the same numbers in the same order, so that the weights of a sequence do not
/// depend on what else is in the call.
///
/// # Safety
/// The CPU has the instructions of `S`; there are `TILE` scores and sums.
#[inline(always)]
unsafe fn add_weights<S: Simd>(scores: *const f32, most: f32, total: f32, sums: *mut f32) {
    // SAFETY: the caller's; a tile is a multiple of the lanes.
    unsafe {
        let scale = S::splat(1.0 / total);
        for at in (0..TILE).step_by(S::LANES) {
            let weight = S::exp2(S::add(S::load(scores.add(at)), S::splat(-most)));
            S::store(sums.add(at), S::fma(weight, scale, S::load(sums.add(at))));
        }
    }
}

/// The sums of a head's slots, and zeros for what is not used.
fn put(sums: &[f32], to: &mut [f32]) {
    let count = to.len().min(sums.len());
    to[..count].copy_from_slice(&sums[..count]);
    to[count..].fill(0.0);
}

/// The weights that slots get, by scores that are computed a second time.
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
        let stride = op.slot_count(sequence).next_multiple_of(TILE);
        let sums = &mut scratch.row.at_least(stride)[..stride];
        sums.fill(0.0);
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
                    if total != 0.0 {
                        // SAFETY: the caller's.
                        unsafe {
                            let total = total * op.group() as f32;
                            add_weights::<S>(scores.as_ptr(), most, total, sums[start..].as_mut_ptr());
                        }
                    }
                }
            }
        }
        // SAFETY: the weights of this head of this sequence are this task's own.
        let to = unsafe { std::slice::from_raw_parts_mut(self.weights.pointer().add(task * self.len), self.len) };
        put(sums, to);
    }
}
