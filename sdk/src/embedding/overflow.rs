//! Which rows leave a floor that is full.

/// Which rows leave a floor when it has more than it may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// Any. Nothing has to be remembered of lookups, which makes it the fastest.
    #[default]
    Random,
    /// Those that were looked up or written longest ago.
    Oldest,
    /// Those that were looked up least often since they came.
    LeastUsed,
}
