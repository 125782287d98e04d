//! The rows of a step, and where their sequences lie.

use std::ops::Range;

use super::super::plan::Precedence;
use crate::kv::Owner;

/// What tells a sequence from all that ever ran: its place in the order, which one after the other may have if they are beams, and its
/// owner, which requests of a session have in common. Its tokens only grow.
pub(in super::super) type SequenceKey = (Precedence, Owner);

/// A step, as a graph in the paged form takes it.
pub(in super::super) struct Step<'a> {
    pub(in super::super) input_ids: &'a [i32],
    pub(in super::super) row_offsets: &'a [i32],
    pub(in super::super) cached_len: &'a [i32],
    pub(in super::super) page_indptr: &'a [i32],
    pub(in super::super) page_ids: &'a [i32],
    pub(in super::super) logits_rows: &'a [i32],
    pub(in super::super) keys: &'a [SequenceKey],
}

impl<'a> Step<'a> {
    /// How many sequences it has.
    pub(super) fn len(&self) -> usize {
        self.cached_len.len()
    }

    /// The cached tokens of a sequence.
    pub(super) fn cached(&self, index: usize) -> usize {
        self.cached_len[index] as usize
    }

    /// Its rows, among those of all.
    fn all_rows(&self, index: usize) -> Range<usize> {
        self.row_offsets[index] as usize..self.row_offsets[index + 1] as usize
    }

    /// The number of its new tokens.
    pub(super) fn rows(&self, index: usize) -> usize {
        self.all_rows(index).len()
    }

    /// Its new tokens.
    pub(super) fn tokens(&self, index: usize) -> &'a [i32] {
        &self.input_ids[self.all_rows(index)]
    }

    /// Its pages, in order of position.
    pub(super) fn pages(&self, index: usize) -> &'a [i32] {
        &self.page_ids[self.page_indptr[index] as usize..self.page_indptr[index + 1] as usize]
    }

    /// Which of all logits are of it, and the row of each among its own.
    pub(super) fn logits(&self, index: usize) -> (Range<usize>, impl Iterator<Item = usize> + 'a) {
        let rows = self.all_rows(index);
        let from = self.logits_rows.partition_point(|&row| (row as usize) < rows.start);
        let to = self.logits_rows.partition_point(|&row| (row as usize) < rows.end);
        (from..to, self.logits_rows[from..to].iter().map(move |&row| row as usize - rows.start))
    }
}
