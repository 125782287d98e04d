//! The attention of the tasks, and the merge of segments that were computed apart.

use super::plan::{SEGMENT, Split, Task};
use super::products::{KEYS, VALUES};
use super::rows::{KeptScores, Rows, TileBuffers};
use super::softmax::{Sums, TILE, exp2};
use super::stored::Stored;
use crate::Element;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work};
use crate::llm::paged_attention::PagedAttention;

/// Blocks of the pool that a tile converts at once.
pub(super) const BLOCKS: usize = if KEYS > VALUES { KEYS } else { VALUES };

/// The attention of every task.
pub(super) struct Attend<'a, T> {
    pub(super) op: &'a PagedAttention<'a, T>,
    pub(super) stored: Stored<'a, T>,
    pub(super) tasks: &'a [Task],
    /// The head size, up to a multiple of the lanes.
    pub(super) padded: usize,
    /// Of each row of a segment: the largest score, the sum of weights, the sum of weighted values.
    pub(super) partial: Shared<f32>,
    /// Of each row and query head: the largest score and the sum of weights, for the key weights.
    pub(super) stats: Option<Shared<f32>>,
    /// Where scores are kept for the key weights.
    pub(super) kept: Option<KeptScores>,
    pub(super) output: Shared<T>,
}

impl<T: Element> Work for Attend<'_, T> {
    /// # Safety
    /// No other thread runs the same task; the outputs are as long as the call says.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let Task { block, segments, partial, .. } = &self.tasks[task];
        let rows = Rows::new(self.op, block);
        let (count, padded) = (rows.count(), self.padded);
        let queries = &mut scratch.queries.at_least(count * padded)[..count * padded];
        // SAFETY: the caller's.
        unsafe { rows.load_queries::<S>(queries, padded) };
        let outputs = scratch.outputs.at_least(2 * count * (padded + 2));
        let (own, merged) = outputs[..2 * count * (padded + 2)].split_at_mut(count * (padded + 2));
        let [mut own, mut merged] = [own, merged].map(|sums| {
            let (most, rest) = sums.split_at_mut(count);
            let (total, values) = rest.split_at_mut(count);
            Sums { most, total, values }
        });
        merged.clear();
        let weights = &mut scratch.weights.at_least(count * TILE)[..count * TILE];
        let blocks = &mut scratch.values.at_least(BLOCKS * padded)[..BLOCKS * padded];
        scratch.masks.resize(count, 0);
        let mut tile = TileBuffers { blocks, weights, masks: &mut scratch.masks };
        for segment in segments.clone() {
            own.clear();
            let slots = segment * SEGMENT..((segment + 1) * SEGMENT).min(rows.slots);
            for start in slots.clone().step_by(TILE) {
                // SAFETY: the caller's; the buffers have the sizes that `rows` asks for.
                unsafe {
                    let end = slots.end.min(start + TILE);
                    rows.attend::<S>(self.stored, start..end, queries, &mut tile, &mut own, self.kept)
                };
            }
            for row in 0..count {
                let values = &own.values[row * padded..][..padded];
                // SAFETY: the caller's; each segment has rows of its own in `partial`.
                unsafe {
                    match partial {
                        Some(first) => {
                            let to = self.partial.pointer().add((first + row) * (padded + 2));
                            to.write(own.most[row]);
                            to.add(1).write(own.total[row]);
                            std::ptr::copy_nonoverlapping(values.as_ptr(), to.add(2), padded);
                        }
                        None => merged.merge::<S>(row, own.most[row], own.total[row], values),
                    }
                }
            }
        }
        if partial.is_none() {
            // SAFETY: the caller's; the rows are this task's own.
            unsafe { self.finish::<S>(&rows, &mut merged) };
        }
    }
}

impl<T: Element> Attend<'_, T> {
    /// Adds the sinks, divides and writes the rows of a block.
    ///
    /// # Safety
    /// As for [`Work::run`]; no other thread writes these rows.
    #[inline(always)]
    pub(super) unsafe fn finish<S: Simd>(&self, rows: &Rows<'_, T>, sums: &mut Sums<'_>) {
        let (op, padded) = (self.op, self.padded);
        for row in 0..rows.count() {
            let (token, head) = rows.row(row);
            let mut scale = 1.0;
            if let Some(sinks) = op.sinks {
                let sink = sinks[head].to_f32() * std::f32::consts::LOG2_E;
                let largest = if sums.most[row] > sink { sums.most[row] } else { sink };
                // SAFETY: the caller's.
                let (old, new) = unsafe { (exp2::<S>(sums.most[row] - largest), exp2::<S>(sink - largest)) };
                (sums.most[row], sums.total[row], scale) = (largest, sums.total[row] * old + new, old);
            }
            // A row that sees nothing is zeros.
            let scale = if sums.total[row] == 0.0 { 0.0 } else { scale / sums.total[row] };
            let values = &mut sums.values[row * padded..][..op.head_size];
            values.iter_mut().for_each(|value| *value *= scale);
            let at = token * op.query_heads + head;
            // SAFETY: the row is inside the output, and this task's own.
            unsafe {
                let to = self.output.pointer().add(at * op.head_size);
                T::narrow::<S>(values, std::slice::from_raw_parts_mut(to, op.head_size));
                if let Some(stats) = self.stats {
                    stats.pointer().add(2 * at).write(sums.most[row]);
                    stats.pointer().add(2 * at + 1).write(sums.total[row]);
                }
            }
        }
    }
}

/// Merges the segments of blocks that were computed apart.
pub(super) struct Merge<'a, T> {
    pub(super) attend: &'a Attend<'a, T>,
    pub(super) splits: &'a [Split],
}

impl<T: Element> Work for Merge<'_, T> {
    /// # Safety
    /// As for [`Attend`]; all segments are computed.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (Split { block, segments, partial }, padded) = (&self.splits[task], self.attend.padded);
        let rows = Rows::new(self.attend.op, block);
        let count = rows.count();
        let (most, rest) = scratch.outputs.at_least(count * (padded + 2))[..count * (padded + 2)].split_at_mut(count);
        let (total, values) = rest.split_at_mut(count);
        let mut sums = Sums { most, total, values };
        sums.clear();
        for (segment, row) in (0..*segments).flat_map(|segment| (0..count).map(move |row| (segment, row))) {
            // SAFETY: the caller's; the task of this segment has written it.
            unsafe {
                let from = self.attend.partial.pointer().add((partial + segment * count + row) * (padded + 2));
                let values = std::slice::from_raw_parts(from.add(2), padded);
                sums.merge::<S>(row, from.read(), from.add(1).read(), values);
            }
        }
        // SAFETY: the caller's.
        unsafe { self.attend.finish::<S>(&rows, &mut sums) };
    }
}
