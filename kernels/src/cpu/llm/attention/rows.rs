//! The rows of a block: their queries, the slots they see, and what a tile of slots adds to their sums.

use std::ops::Range;

use super::plan::Block;
use super::products::{AddValues, Dots, FEW_VALUES, KEYS, VALUES};
use super::rotation::rotate;
use super::softmax::{Sums, TILE, scale_values, softmax};
use super::stored::{Copied, Form, Native, Stored};
use crate::Element;
use crate::common::kv_format::KvFormat;
use crate::cpu::common::kv_block::{Fp8, Int4, Int8};
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::Simd;
use crate::llm::paged_attention::PagedAttention;

/// What a tile needs of memory.
pub(super) struct TileBuffers<'a> {
    /// `[KEYS or VALUES][padded]`, for blocks of the pool that can not be read where they are.
    pub(super) blocks: &'a mut [f32],
    /// `[rows][TILE]`: scores, then weights.
    pub(super) weights: &'a mut [f32],
    /// `[rows]`: which slots of the tile a row sees, a bit for each.
    pub(super) masks: &'a mut [u64],
}

/// The scores of every row and query head, kept for the weights of slots.
#[derive(Clone, Copy)]
pub(super) struct KeptScores {
    /// `[rows of the call, query heads, stride]`.
    pub(super) scores: Shared<f32>,
    /// The slots, up to a multiple of `TILE`.
    pub(super) stride: usize,
}

impl KeptScores {
    /// # Safety
    /// The tile is inside the buffer, and no other thread uses this part of it.
    #[inline(always)]
    unsafe fn put<T>(self, op: &PagedAttention<'_, T>, (token, head): (usize, usize), start: usize, scores: &[f32]) {
        let at = (token * op.query_heads + head) * self.stride + start;
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(scores.as_ptr(), self.scores.pointer().add(at), TILE) };
    }
}

/// The slots of a tile that some row of a block sees, and where their keys are.
pub(super) struct TileSlots {
    /// Counted from the first slot of the tile.
    any: Range<usize>,
    /// The block of the key of head 0; that of page 0 for a slot without a token.
    keys: [usize; TILE],
}

/// Rows that read a block of the pool, from which on it pays to copy it: what is not f32 is then converted once. Blocks of a
/// head are often a multiple of 4 KiB apart, and push each other out of the first cache.
const COPIES_FROM: usize = 12;

/// How the pool is read: its numbers are copied first, or become f32 in registers.
enum ReadAs {
    Copied,
    Native,
    Int8,
    Int4,
    Fp8,
}

/// The rows of a block: for each kv head, for each token, the query heads of the group.
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
        self.of_a_head() * self.block.heads.len()
    }

    /// The rows that read one kv head.
    fn of_a_head(&self) -> usize {
        self.block.tokens.len() * self.op.group()
    }

    /// The token and the query head of a row.
    pub(super) fn row(&self, row: usize) -> (usize, usize) {
        let (group, of_a_head) = (self.op.group(), self.of_a_head());
        let (head, row) = (self.block.heads.start + row / of_a_head, row % of_a_head);
        (self.block.tokens.start + row / group, head * group + row % group)
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

    /// Adds to the sums what the slots `start..end` of one tile contribute.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; the buffers are as long as their layouts say.
    #[inline(always)]
    pub(super) unsafe fn attend<S: Simd>(
        &self,
        stored: Stored<'_, T>,
        Range { start, end }: Range<usize>,
        queries: &[f32],
        tile: &mut TileBuffers<'_>,
        sums: &mut Sums<'_>,
        kept: Option<KeptScores>,
    ) {
        let padded = queries.len() / self.count();
        self.fill_masks(start, end, tile.masks);
        let slots = self.locate(start, end);
        // SAFETY: the caller's; the form is that of the pool.
        unsafe {
            match self.form::<S>() {
                ReadAs::Copied => self.products::<S, Copied>(stored, &slots, queries, tile),
                ReadAs::Native => self.products::<S, Native<T>>(stored, &slots, queries, tile),
                ReadAs::Int8 => self.products::<S, Int8>(stored, &slots, queries, tile),
                ReadAs::Int4 => self.products::<S, Int4>(stored, &slots, queries, tile),
                ReadAs::Fp8 => self.products::<S, Fp8>(stored, &slots, queries, tile),
            }
            for row in 0..self.count() {
                let scores = &mut tile.weights[row * TILE..][..TILE];
                if tile.masks[row] == 0 {
                    if let Some(kept) = kept {
                        scores.fill(f32::NEG_INFINITY);
                        kept.put(self.op, self.row(row), start, scores);
                    }
                    continue;
                }
                self.scores::<S>(row, tile.masks[row], start, scores);
                if let Some(kept) = kept {
                    kept.put(self.op, self.row(row), start, scores);
                }
                let scale = softmax::<S>(scores, &mut sums.most[row], &mut sums.total[row]);
                if scale != 1.0 {
                    scale_values::<S>(&mut sums.values[row * padded..][..padded], scale);
                }
            }
            match self.form::<S>() {
                ReadAs::Copied => self.values::<S, Copied, VALUES>(stored, slots, tile, sums, padded),
                ReadAs::Native => self.values::<S, Native<T>, FEW_VALUES>(stored, slots, tile, sums, padded),
                ReadAs::Int8 => self.values::<S, Int8, FEW_VALUES>(stored, slots, tile, sums, padded),
                ReadAs::Int4 => self.values::<S, Int4, FEW_VALUES>(stored, slots, tile, sums, padded),
                ReadAs::Fp8 => self.values::<S, Fp8, FEW_VALUES>(stored, slots, tile, sums, padded),
            }
        }
    }

    /// The form in which the pool is read.
    #[inline(always)]
    fn form<S: Simd>(&self) -> ReadAs {
        // Portable code has but this form, so as not to take long to compile.
        let portable = S::MAX_VECTORS == 1;
        if portable || self.of_a_head() >= COPIES_FROM || !self.op.head_size.is_multiple_of(S::LANES) {
            return ReadAs::Copied;
        }
        match self.op.format {
            KvFormat::Native => ReadAs::Native,
            KvFormat::Int8 => ReadAs::Int8,
            KvFormat::Int4 => ReadAs::Int4,
            KvFormat::Fp8 => ReadAs::Fp8,
        }
    }

    /// Which slots of a tile each row sees.
    #[inline(always)]
    pub(super) fn fill_masks(&self, start: usize, end: usize, masks: &mut [u64]) {
        let (op, group, sequence) = (self.op, self.op.group(), self.block.sequence);
        let mut to = masks.chunks_exact_mut(group);
        for head in self.block.heads.clone() {
            for (token, to) in self.block.tokens.clone().zip(&mut to) {
                let position = op.row_position(sequence, token);
                let mut mask = 0;
                if op.slots.is_none() {
                    let first = if op.window == 0 { 0 } else { (position + 1 - op.window).max(0) as usize };
                    let seen = first.clamp(start, end) - start..((position + 1) as usize).clamp(start, end) - start;
                    if !seen.is_empty() {
                        mask = (u64::MAX >> (64 - seen.len())) << seen.start;
                    }
                } else if self.sees_all(head, position, start..end) {
                    mask = u64::MAX >> (64 - (end - start));
                } else {
                    for slot in start..end {
                        let distance = op.slot_position(sequence, head, slot).map_or(-1, |slot| position - slot);
                        let sees = distance >= 0 && (op.window == 0 || distance < op.window);
                        mask |= u64::from(sees) << (slot - start);
                    }
                }
                to.fill(mask);
            }
        }
    }

    /// Whether a row at `position` sees every one of some slots of a head. It is so of most tiles once the slots are full, and
    /// compares several slots at once.
    #[inline(always)]
    fn sees_all(&self, head: usize, position: i64, slots: Range<usize>) -> bool {
        let (Some(all), Ok(position), 0) = (self.op.slots, u32::try_from(position), self.op.window) else {
            return false;
        };
        let first = (self.block.sequence * self.op.kv_heads + head) * all.len;
        // An empty slot, -1, is beyond every position.
        let token_pos = &all.token_pos[first..][slots];
        token_pos.iter().fold(true, |seen, &slot| seen & (slot as u32 <= position))
    }

    /// Where the keys of a tile are that some row may see: no other is read.
    #[inline(always)]
    pub(super) fn locate(&self, start: usize, end: usize) -> TileSlots {
        let (op, sequence) = (self.op, self.block.sequence);
        let mut keys = [0; TILE];
        let any = if op.slots.is_none() {
            let first = op.row_position(sequence, self.block.tokens.start);
            let first = if op.window == 0 { 0 } else { (first + 1 - op.window).max(0) as usize };
            first.clamp(start, end)..end
        } else {
            start..end
        };
        // A slot is in a page if some head has a token there.
        let all_used = op.slots.is_none() || self.sees_all(self.block.heads.start, i32::MAX.into(), start..end);
        let (size, pages) = (op.pages.page_size, op.pages.of(sequence));
        let (mut page, mut offset) = (any.start / size, any.start % size);
        for slot in any.clone() {
            let used = |head| op.slot_position(sequence, head, slot).is_some();
            if all_used || self.block.heads.clone().any(used) {
                keys[slot - start] = (pages[page] as usize * 2 * size + offset) * op.kv_heads;
            }
            offset += 1;
            if offset == size {
                (page, offset) = (page + 1, 0);
            }
        }
        TileSlots { any: any.start - start..any.end - start, keys }
    }

    /// The products of all rows with the keys of a tile; those of slots that no row sees may be anything.
    ///
    /// # Safety
    /// As for [`Self::attend`].
    #[inline(always)]
    pub(super) unsafe fn products<S: Simd, N: Form<S, T>>(
        &self,
        stored: Stored<'_, T>,
        slots: &TileSlots,
        queries: &[f32],
        tile: &mut TileBuffers<'_>,
    ) {
        let (of_a_head, padded) = (self.of_a_head(), queries.len() / self.count());
        // Slots outside, heads inside: that is the order of memory.
        for first in (slots.any.start / KEYS * KEYS..slots.any.end).step_by(KEYS) {
            for (index, head) in self.block.heads.clone().enumerate() {
                // SAFETY: the caller's.
                unsafe {
                    let keys = self.blocks::<S, N, KEYS>(stored, slots, first, head, tile.blocks, padded);
                    let queries = queries[index * of_a_head * padded..][..of_a_head * padded].as_ptr();
                    let to = tile.weights[index * of_a_head * TILE..][..of_a_head * TILE].as_mut_ptr().add(first);
                    S::outline(Dots { rows: of_a_head, queries, padded, keys: &keys, to });
                }
            }
        }
    }

    /// Adds the values of a tile to the sums, by their weights.
    ///
    /// # Safety
    /// As for [`Self::attend`].
    #[inline(always)]
    unsafe fn values<S: Simd, N: Form<S, T>, const COUNT: usize>(
        &self,
        stored: Stored<'_, T>,
        mut slots: TileSlots,
        tile: &mut TileBuffers<'_>,
        sums: &mut Sums<'_>,
        padded: usize,
    ) {
        let of_a_head = self.of_a_head();
        let page = self.op.pages.page_size * self.op.kv_heads;
        slots.keys.iter_mut().for_each(|key| *key += page);
        for first in (slots.any.start / COUNT * COUNT..slots.any.end).step_by(COUNT) {
            for (index, head) in self.block.heads.clone().enumerate() {
                // SAFETY: the caller's.
                unsafe {
                    let values = self.blocks::<S, N, COUNT>(stored, &slots, first, head, tile.blocks, padded);
                    let rows = index * of_a_head..(index + 1) * of_a_head;
                    let to = sums.values[rows.start * padded..rows.end * padded].as_mut_ptr();
                    let weights = tile.weights[rows.start * TILE..rows.end * TILE].as_ptr().add(first);
                    let masks = &tile.masks[rows];
                    S::outline(AddValues { values: &values, weights, masks, first, to, padded });
                }
            }
        }
    }

    /// `COUNT` blocks of one head, from slot `first` of the tile on.
    ///
    /// # Safety
    /// As for [`Self::attend`]; `N` is the form of the pool.
    #[inline(always)]
    unsafe fn blocks<S: Simd, N: Form<S, T>, const COUNT: usize>(
        &self,
        stored: Stored<'_, T>,
        slots: &TileSlots,
        first: usize,
        head: usize,
        buffer: &mut [f32],
        padded: usize,
    ) -> [N; COUNT] {
        // SAFETY: the caller's; slots that hold a token have blocks inside the pool, by the check, and so has page 0: the pool
        // of a call with rows has pages.
        unsafe {
            for ahead in slots.keys[first..].iter().skip(COUNT).take(if N::AHEAD { COUNT } else { 0 }) {
                stored.prefetch::<S>(self.op, ahead + head);
            }
            let mut blocks = [N::of(stored, self.op, slots.keys[first] + head, &mut buffer[..padded]); COUNT];
            for (index, block) in blocks.iter_mut().enumerate().skip(1) {
                let buffer = &mut buffer[index * padded..][..padded];
                *block = N::of(stored, self.op, slots.keys[first + index] + head, buffer);
            }
            blocks
        }
    }

    /// Makes the products of one row with a tile its scores, times log2(e); -inf for slots that it does not see.
    ///
    /// # Safety
    /// As for [`Self::attend`].
    #[inline(always)]
    pub(super) unsafe fn scores<S: Simd>(&self, row: usize, mask: u64, start: usize, scores: &mut [f32]) {
        let op = self.op;
        let scale = op.score_scale() as f32;
        let plain = op.softcap == 0.0 && op.slopes.is_none();
        let factor = if plain { scale * std::f32::consts::LOG2_E } else { scale };
        let unseen = f32::NEG_INFINITY;
        let seen = mask.trailing_zeros() as usize..64 - mask.leading_zeros() as usize;
        // SAFETY: the caller's; a tile is a multiple of the lanes.
        unsafe {
            let (first, end) = (S::splat(seen.start as f32), S::splat(seen.end as f32));
            for at in (0..TILE).step_by(S::LANES) {
                let to = scores[at..].as_mut_ptr();
                let score = S::mul(S::load(to), S::splat(factor));
                let number = S::load(NUMBERS[at..].as_ptr());
                S::store(to, S::select_within(number, first, end, score, S::splat(unseen)));
            }
        }
        if mask.count_ones() as usize != seen.len() {
            for (at, score) in scores.iter_mut().enumerate().filter(|(at, _)| mask >> at & 1 == 0) {
                debug_assert!(at < TILE);
                *score = unseen;
            }
        }
        if plain {
            return;
        }
        let (token, head) = self.row(row);
        for (at, score) in scores[..seen.end].iter_mut().enumerate().filter(|(_, score)| **score != unseen) {
            if op.softcap > 0.0 {
                *score = op.softcap * (*score / op.softcap).tanh();
            }
            if let Some(slopes) = op.slopes {
                let slot = op.slot_position(self.block.sequence, head / op.group(), start + at).unwrap_or_default();
                *score -= slopes[head] * (op.row_position(self.block.sequence, token) - slot) as f32;
            }
            *score *= std::f32::consts::LOG2_E;
        }
    }
}

/// 0, 1, 2, …
const NUMBERS: [f32; TILE] = {
    let mut numbers = [0.0; TILE];
    let mut at = 0;
    while at < TILE {
        numbers[at] = at as f32;
        at += 1;
    }
    numbers
};
