//! The result of a search through the tiers.

use crate::embedding::tiers::tier::Rows;
use crate::embedding::update::update_epochs::Epoch;
use crate::embedding::update::version::Version;

/// The state of a key after a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::embedding) enum KeyState {
    /// A tier holds its row.
    Found,
    /// A tier holds its tombstone.
    Deleted,
    /// No tier holds it.
    Absent,
    /// A tier that may hold it did not answer, was not asked, or has lost an update of it.
    Unknown,
}

/// What a search found, with one entry for each key.
#[derive(Clone)]
pub(in crate::embedding) struct TierResult {
    pub(in crate::embedding) states: Vec<KeyState>,
    pub(in crate::embedding) versions: Vec<Version>,
    /// Whether a newer version may exist: a shared tier above the one that holds the key did not answer, or has missed
    /// an update to a later version.
    pub(in crate::embedding) unverified: Vec<bool>,
    /// The index of the tier that holds the key.
    tiers: Vec<usize>,
    /// The rows. Keys without a row have unspecified bytes.
    rows: Vec<u8>,
    row_bytes: usize,
    /// The epochs of the keys before the search.
    epochs: Vec<Epoch>,
}

impl TierResult {
    /// A result in which every key is unknown.
    pub(super) fn new(row_bytes: usize, epochs: Vec<Epoch>) -> Self {
        let keys = epochs.len();
        Self {
            states: vec![KeyState::Unknown; keys],
            versions: vec![Version::LOADED; keys],
            unverified: vec![false; keys],
            tiers: vec![0; keys],
            rows: vec![0; keys * row_bytes],
            row_bytes,
            epochs,
        }
    }

    /// The row of one key, if it was found.
    pub(in crate::embedding) fn row(&self, index: usize) -> Option<&[u8]> {
        (self.states[index] == KeyState::Found).then(|| self.bytes(index))
    }

    /// Whether a tier holds a row or a tombstone of a key.
    pub(in crate::embedding) fn is_known(&self, index: usize) -> bool {
        matches!(self.states[index], KeyState::Found | KeyState::Deleted)
    }

    /// The epoch of a key before the search.
    pub(super) fn epoch(&self, index: usize) -> Epoch {
        self.epochs[index]
    }

    /// Sets what a tier holds of a key.
    pub(super) fn set(&mut self, index: usize, tier: usize, version: Version, row: Option<&[u8]>) {
        (self.versions[index], self.tiers[index]) = (version, tier);
        self.states[index] = match row {
            Some(row) => {
                self.rows[index * self.row_bytes..][..self.row_bytes].copy_from_slice(row);
                KeyState::Found
            }
            None => KeyState::Deleted,
        };
    }

    /// Replaces the state, version and row of a key by those of another search of the same keys.
    pub(in crate::embedding) fn replace(&mut self, index: usize, other: &Self) {
        (self.states[index], self.versions[index]) = (other.states[index], other.versions[index]);
        self.rows[index * self.row_bytes..][..self.row_bytes].copy_from_slice(other.bytes(index));
    }

    /// Whether two searches found different rows of a key.
    pub(in crate::embedding) fn differs(&self, index: usize, other: &Self) -> bool {
        self.states[index] != other.states[index] || self.row(index) != other.row(index)
    }

    /// Copies the rows and tombstones of the keys at `indices`.
    pub(in crate::embedding) fn gather(&self, keys: &[i64], indices: &[u32]) -> OwnedRows {
        let at = || indices.iter().map(|&index| index as usize);
        let mut rows = Vec::with_capacity(indices.len() * self.row_bytes);
        for index in at() {
            rows.extend_from_slice(self.bytes(index));
        }
        OwnedRows {
            keys: at().map(|index| keys[index]).collect(),
            versions: at().map(|index| self.versions[index]).collect(),
            rows,
            deleted: at().map(|index| self.states[index] != KeyState::Found).collect(),
        }
    }

    /// The indices of the keys that were found below one tier and may be stored in it. Unverified ones may not: a tier
    /// in between may hold a newer version.
    pub(in crate::embedding) fn found_below(&self, tier: usize) -> Vec<u32> {
        self.indices(|index| self.is_known(index) && self.tiers[index] > tier && !self.unverified[index])
    }

    /// The result of the keys at `indices` alone.
    pub(in crate::embedding) fn select(&self, indices: &[u32]) -> Self {
        let at = || indices.iter().map(|&index| index as usize);
        Self {
            states: at().map(|index| self.states[index]).collect(),
            versions: at().map(|index| self.versions[index]).collect(),
            unverified: at().map(|index| self.unverified[index]).collect(),
            tiers: at().map(|index| self.tiers[index]).collect(),
            rows: at().flat_map(|index| self.bytes(index)).copied().collect(),
            row_bytes: self.row_bytes,
            epochs: at().map(|index| self.epochs[index]).collect(),
        }
    }

    /// The indices for which `holds` returns true.
    pub(in crate::embedding) fn indices(&self, holds: impl Fn(usize) -> bool) -> Vec<u32> {
        (0..self.states.len() as u32).filter(|&index| holds(index as usize)).collect()
    }

    /// The number of bytes of all rows, found or not.
    #[cfg(test)]
    pub(in crate::embedding) fn row_bytes(&self) -> usize {
        self.rows.len()
    }

    fn bytes(&self, index: usize) -> &[u8] {
        &self.rows[index * self.row_bytes..][..self.row_bytes]
    }
}

/// Rows and tombstones with their keys and versions.
pub(in crate::embedding) struct OwnedRows {
    keys: Vec<i64>,
    pub(in crate::embedding) versions: Vec<Version>,
    rows: Vec<u8>,
    pub(in crate::embedding) deleted: Vec<bool>,
}

impl OwnedRows {
    pub(in crate::embedding) fn rows(&self) -> Rows<'_> {
        Rows { keys: &self.keys, versions: &self.versions, rows: &self.rows, deleted: &self.deleted }
    }
}
