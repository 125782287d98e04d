//! The rows of a block: their queries, the slots they see, their scores.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::plan::Block;
use super::rotation::rotate;
use super::softmax::{SUM_ROWS, Sums, TILE, add_range, add_values, scale_values, softmax};
use super::stored::Stored;
use crate::Element;
use crate::cpu::common::simd::Simd;
use crate::llm::paged_attention::PagedAttention;

/// What a tile needs of memory.
pub(super) struct TileBuffers<'a> {
    /// `[TILE][padded]`, for keys that can not be read where they are.
    pub(super) keys: &'a mut [f32],
    /// The same of values.
    pub(super) values: &'a mut [f32],
    /// `[rows][TILE]`.
    pub(super) weights: &'a mut [f32],
}

/// The rows of a block: for each token the query heads of the group.
pub(super) struct Rows<'a, T> {
    pub(super) op: &'a PagedAttention<'a, T>,
    pub(super) block: &'a Block,
    /// How many slots the last of them can see.
    pub(super) slots: usize,
}

impl<'a, T: Element> Rows<'a, T> {
    pub(super) fn new(op: &'a PagedAttention<'a, T>, block: &'a Block) -> Self {
        let slots = match op.slots {
            Some(slots) => slots.len,
            None => op.cached(block.sequence) + block.tokens.end - op.rows(block.sequence).start,
        };
        Self { op, block, slots }
    }

    pub(super) fn count(&self) -> usize {
        self.block.tokens.len() * self.op.group()
    }

    /// The token and the query head of a row.
    pub(super) fn row(&self, row: usize) -> (usize, usize) {
        let group = self.op.group();
        (self.block.tokens.start + row / group, self.block.head * group + row % group)
    }

    /// The queries as f32, rotated, padded with zeros.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    pub(super) unsafe fn load_queries<S: Simd>(&self, queries: &mut [f32], padded: usize) {
        let size = self.op.head_size;
        for (row, to) in queries.chunks_exact_mut(padded).enumerate() {
            let (token, head) = self.row(row);
            let at = (token * self.op.query_heads + head) * size;
            // SAFETY: the caller's.
            unsafe { T::widen::<S>(&self.op.query[at..at + size], &mut to[..size]) };
            to[size..].fill(0.0);
            rotate(self.op, token, &mut to[..size]);
        }
    }

    /// The slots `start..end` that a row sees, where tokens are in order.
    #[inline(always)]
    pub(super) fn seen(&self, token: usize, start: usize, end: usize) -> Range<usize> {
        let position = self.op.row_position(self.block.sequence, token);
        let first = if self.op.window == 0 { 0 } else { (position + 1 - self.op.window).max(0) as usize };
        first.clamp(start, end)..((position + 1) as usize).clamp(start, end)
    }

    /// Whether a row sees a slot, where every head has slots of its own.
    #[inline(always)]
    fn sees_slot(&self, token: usize, slot: usize) -> bool {
        let Some(position) = self.op.slot_position(self.block.sequence, self.block.head, slot) else { return false };
        let distance = self.op.row_position(self.block.sequence, token) - position;
        distance >= 0 && (self.op.window == 0 || distance < self.op.window)
    }

    /// Adds to the sums what the slots `start..end` of one tile contribute.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the buffers are as long as their layouts say.
    #[inline(always)]
    pub(super) unsafe fn attend<S: Simd>(
        &self,
        stored: Stored<'_, T>,
        start: usize,
        end: usize,
        queries: &[f32],
        tile: &mut TileBuffers<'_>,
        sums: &mut Sums<'_>,
    ) {
        let (op, count) = (self.op, self.count());
        let padded = queries.len() / count;
        let group = op.group();
        let ordered = op.slots.is_none();
        // The slots that some row sees: no other is read.
        let any = if ordered {
            let [first, last] =
                [self.block.tokens.start, self.block.tokens.end - 1].map(|token| self.seen(token, start, end));
            first.start..last.end
        } else {
            start..end
        };
        if any.is_empty() {
            return;
        }
        // SAFETY: the caller's; slots that hold a token have blocks inside the pool, by the check.
        unsafe {
            // Every pointer is good for a row: those of slots that no row sees are never used for a result.
            let (key_buffer, value_buffer) = (tile.keys.as_mut_ptr(), tile.values.as_mut_ptr());
            let mut keys = [key_buffer.cast_const(); TILE];
            let mut values = [value_buffer.cast_const(); TILE];
            for slot in any.clone() {
                if ordered || op.slot_position(self.block.sequence, self.block.head, slot).is_some() {
                    let at = slot - start;
                    let [key, value] = [0, 1].map(|which| op.block(self.block.sequence, slot, which, self.block.head));
                    let [key_buffer, value_buffer] = [key_buffer, value_buffer]
                        .map(|buffer| std::slice::from_raw_parts_mut(buffer.add(at * padded), padded));
                    keys[at] = stored.block::<S>(op, key, key_buffer);
                    values[at] = stored.block::<S>(op, value, value_buffer);
                }
            }
            let mut scales = [1.0; SUM_ROWS];
            for rows in (0..count).step_by(SUM_ROWS) {
                let rows = rows..count.min(rows + SUM_ROWS);
                let mut seen = [const { 0..0 }; SUM_ROWS];
                for row in rows.clone() {
                    let (token, head) = (self.block.tokens.start + row / group, self.block.head * group + row % group);
                    let weights = &mut tile.weights[row * TILE..][..TILE];
                    let sees = if ordered { self.seen(token, start, end) } else { start..end };
                    seen[row - rows.start] = sees.start - start..sees.end - start;
                    if sees.is_empty() {
                        continue;
                    }
                    let query = &queries[row * padded..][..padded];
                    self.scores::<S>(query, &keys, &seen[row - rows.start], (token, head), start, weights);
                    scales[row - rows.start] = softmax::<S>(weights, &mut sums.most[row], &mut sums.total[row]);
                }
                let weights = &tile.weights[rows.start * TILE..];
                let to = &mut sums.values[rows.start * padded..rows.end * padded];
                if ordered {
                    add_values::<S>(&values, weights, &seen[..rows.len()], &scales, to, padded);
                } else {
                    for (row, to) in to.chunks_exact_mut(padded).enumerate() {
                        let token = self.block.tokens.start + (rows.start + row) / group;
                        let weights = &weights[row * TILE..][..TILE];
                        scale_values::<S>(to, scales[row]);
                        for slot in (start..end).filter(|&slot| self.sees_slot(token, slot)) {
                            let at = slot - start;
                            add_range::<S, 1>(&values, weights, &(at..at + 1), to, padded);
                        }
                    }
                }
            }
        }
    }

    /// The scores of one row against a tile, times log2(e); -inf for slots that it does not see.
    ///
    /// # Safety
    /// As for [`Self::attend`].
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(
        &self,
        query: &[f32],
        keys: &[*const f32; TILE],
        seen: &Range<usize>,
        (token, head): (usize, usize),
        start: usize,
        scores: &mut [f32],
    ) {
        let op = self.op;
        let scale = op.score_scale() as f32;
        let plain = op.softcap == 0.0 && op.slopes.is_none();
        let factor = if plain { scale * std::f32::consts::LOG2_E } else { scale };
        let unseen = f32::NEG_INFINITY;
        // SAFETY: the caller's; a tile is a multiple of the lanes.
        unsafe {
            let (first, end) = (S::splat(seen.start as f32), S::splat(seen.end as f32));
            let mut numbers = [0.0; 16];
            for (lane, number) in numbers.iter_mut().enumerate() {
                *number = lane as f32;
            }
            let numbers = S::load(numbers.as_ptr());
            for group in (0..TILE).step_by(S::LANES) {
                let to = scores[group..].as_mut_ptr();
                if group >= seen.end || group + S::LANES <= seen.start {
                    S::store(to, S::splat(unseen));
                    continue;
                }
                let mut products = [S::splat(0.0); 16];
                for at in (0..query.len()).step_by(S::LANES) {
                    let query = S::load(query.as_ptr().add(at));
                    for key in 0..S::LANES {
                        products[key] = S::fma(S::load(keys[group + key].add(at)), query, products[key]);
                    }
                }
                let score = S::mul(S::sums(&products), S::splat(factor));
                let number = S::add(numbers, S::splat(group as f32));
                S::store(to, S::select_within(number, first, end, score, S::splat(unseen)));
            }
        }
        if op.slots.is_some() {
            for (at, score) in scores.iter_mut().enumerate().take(seen.end) {
                if !self.sees_slot(token, start + at) {
                    *score = unseen;
                }
            }
        }
        if plain {
            return;
        }
        for (at, score) in scores[..seen.end].iter_mut().enumerate().filter(|(_, score)| **score != unseen) {
            if op.softcap > 0.0 {
                *score = op.softcap * (*score / op.softcap).tanh();
            }
            if let Some(slopes) = op.slopes {
                let slot = op.slot_position(self.block.sequence, self.block.head, start + at).unwrap_or_default();
                *score -= slopes[head] * (op.row_position(self.block.sequence, token) - slot) as f32;
            }
            *score *= std::f32::consts::LOG2_E;
        }
    }
}
