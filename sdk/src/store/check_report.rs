//! What a check of a store finds.

/// What a check of a store found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Segment files.
    pub segments: u64,
    /// Bytes of them.
    pub file_bytes: u64,
    /// Pieces of histories, including those that were replaced later.
    pub records: u64,
    /// Removals.
    pub removals: u64,
    /// Records whose data is damaged.
    pub corrupt_records: u64,
    /// Damaged regions.
    pub damaged_regions: u64,
    /// Unfinished writes at the end.
    pub torn_tails: u64,
}

impl CheckReport {
    /// Whether nothing is damaged. An unfinished write at the end is not damage.
    pub fn is_sound(&self) -> bool {
        self.corrupt_records == 0 && self.damaged_regions == 0
    }
}
