//! Versions of rows.

/// The version of a row or a tombstone. A higher version replaces a lower one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::embedding) struct Version(pub(in crate::embedding) u64);

impl Version {
    /// The version of loaded rows.
    pub(in crate::embedding) const LOADED: Self = Self(0);
    pub(in crate::embedding) const MAX: Self = Self(u64::MAX);
}
