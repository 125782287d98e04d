//! The counts of the Redis tier.

/// The counts of a Redis Cluster since it was opened, for all tables together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct RedisStats {
    /// How often a circuit breaker opened because of failures of a node.
    pub trips: u64,
    /// Lookups and writes that exceeded their time limit.
    pub timeouts: u64,
    /// Lookups and writes that failed for some of their keys, for any reason.
    pub errors: u64,
    /// Rows that were evicted because their partition was full.
    pub evicted: u64,
}
