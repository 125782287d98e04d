//! Which rows a full tier evicts.

/// Which rows a tier evicts when it is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Eviction {
    /// Any. Lookups record nothing, which makes it the fastest.
    #[default]
    Random,
    /// The least recently used: looked up or written longest ago.
    Oldest,
    /// The least frequently used: looked up least often since they were stored.
    LeastUsed,
}
