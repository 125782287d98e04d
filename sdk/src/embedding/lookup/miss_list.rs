//! The keys of a lookup that the cache does not hold, and their rows as they arrive.

use super::tier_result::TierResult;
use super::unique_keys::UniqueKeys;
use crate::embedding::row::Layout;

/// The misses of one lookup.
pub(super) struct MissList {
    layout: Layout,
    /// The unique missing keys, and for each miss the index of its key.
    unique: UniqueKeys,
    /// For each unique key the start of its row in `numbers`.
    starts: Vec<Option<usize>>,
    numbers: Vec<f32>,
}

impl MissList {
    /// The misses of a lookup, which may contain duplicates.
    pub(super) fn new(layout: Layout, keys: impl ExactSizeIterator<Item = i64>) -> Self {
        let unique = UniqueKeys::of(keys);
        Self { layout, starts: vec![None; unique.keys.len()], unique, numbers: Vec::new() }
    }

    /// The unique missing keys.
    pub(super) fn keys(&self) -> &[i64] {
        &self.unique.keys
    }

    /// For each miss, in order, the index of its key in [`Self::keys`].
    pub(super) fn indices(&self) -> &[u32] {
        &self.unique.indices
    }

    /// Takes the rows that a search found for the keys at `indices`.
    pub(super) fn take(&mut self, indices: &[u32], found: &TierResult) {
        let layout = self.layout;
        for (place, &index) in indices.iter().enumerate() {
            if let Some(row) = found.row(place)
                && self.starts[index as usize].is_none()
            {
                let start = self.numbers.len();
                self.numbers.resize(start + layout.dim(), 0.0);
                layout.decode(row, &mut self.numbers[start..]);
                self.starts[index as usize] = Some(start);
            }
        }
    }

    /// The row of a key, if it has arrived.
    pub(super) fn row(&self, index: usize) -> Option<&[f32]> {
        self.starts[index].map(|start| &self.numbers[start..][..self.layout.dim()])
    }

    /// The number of keys whose row has not arrived.
    pub(super) fn without_row(&self) -> usize {
        self.starts.iter().filter(|start| start.is_none()).count()
    }
}
