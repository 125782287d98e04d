//! The tiers that hold the rows of a table, from the fastest to the largest.

pub(super) mod cache;
pub(super) mod disk;
pub(super) mod gpu;
pub(super) mod memory;
#[cfg(feature = "redis")]
pub(super) mod redis;
#[cfg(not(feature = "redis"))]
#[path = "redis/absent.rs"]
pub(super) mod redis;
pub(super) mod tier;
