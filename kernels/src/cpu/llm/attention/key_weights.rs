//! The weights of slots, computed a second time once the sums of every row are known.

use super::plan::Block;
use super::rows::Rows;
use super::softmax::{TILE, exp2};
use super::stored::Stored;
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
        for token in op.rows(sequence) {
            let block = Block { sequence, head, tokens: token..token + 1 };
            let rows = Rows::new(op, &block);
            let queries = &mut scratch.queries.at_least(rows.count() * padded)[..rows.count() * padded];
            // SAFETY: the caller's.
            unsafe { rows.load_queries::<S>(queries, padded) };
            let key_buffer = scratch.keys.at_least(TILE * padded).as_mut_ptr();
            let mut scores = [0.0; TILE];
            for start in (0..rows.slots).step_by(TILE) {
                let end = rows.slots.min(start + TILE);
                let seen = if op.slots.is_none() { rows.seen(token, start, end) } else { start..end };
                if seen.is_empty() {
                    continue;
                }
                let mut keys = [key_buffer.cast_const(); TILE];
                for slot in seen.clone().filter(|&slot| op.slot_position(sequence, head, slot).is_some()) {
                    let at = slot - start;
                    let block = op.block(sequence, slot, 0, head);
                    // SAFETY: the caller's; the slot holds a token, and the buffer has a row for each slot of a tile.
                    keys[at] = unsafe {
                        let buffer = std::slice::from_raw_parts_mut(key_buffer.add(at * padded), padded);
                        self.stored.block::<S>(op, block, buffer)
                    };
                }
                let seen = seen.start - start..seen.end - start;
                for row in 0..rows.count() {
                    let (_, query_head) = rows.row(row);
                    let query = &queries[row * padded..][..padded];
                    let [most, total] =
                        [0, 1].map(|which| self.stats[2 * (token * op.query_heads + query_head) + which]);
                    // SAFETY: the caller's.
                    unsafe {
                        rows.scores::<S>(query, &keys, &seen, (token, query_head), start, &mut scores);
                        for slot in seen.clone().filter(|&slot| scores[slot] != f32::NEG_INFINITY) {
                            to[start + slot] += exp2::<S>(scores[slot] - most) / total;
                        }
                    }
                }
            }
        }
        to.iter_mut().for_each(|weight| *weight /= op.group() as f32);
    }
}
