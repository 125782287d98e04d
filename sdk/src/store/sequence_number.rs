//! The order of a store's records.

/// The number of a record. It grows with every record of the store: of two records, the one with the higher number is
/// newer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct SequenceNumber(pub(super) u64);

impl SequenceNumber {
    /// The number of no record.
    pub(super) const NONE: Self = Self(0);

    /// The number of a store's first record.
    pub(super) const FIRST: Self = Self(1);

    /// Higher than the number of any record.
    pub(super) const MAX: Self = Self(u64::MAX);

    pub(super) fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
