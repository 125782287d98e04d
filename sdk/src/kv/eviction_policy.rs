//! Which owner is evicted next.

use std::fmt;

use crate::store::Owner;

/// What an eviction policy knows of an owner.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Usage {
    /// The owner.
    pub owner: Owner,
    /// The time of this use. A logical clock: each use has a later time than every use before it.
    pub time: u64,
    /// How many times the owner was used since it came into the pool, this time included.
    pub uses: u32,
    /// How many tokens of the owner are in the pool.
    pub tokens: u32,
}

/// Decides which owner is evicted when the pool is full.
///
/// The cache keeps the owners that can be evicted in the order of their keys, the lowest first; owners with the same key
/// leave in any order. A policy says what the key is. Any number of threads call it at the same time. `key` runs inside a lock
/// of the cache: it must be quick and must not call the cache.
pub trait EvictionPolicy: fmt::Debug + Send + Sync {
    /// The key of an owner that was just used, or has come back from the store.
    fn key(&self, usage: &Usage) -> u64;

    /// The owner with this key was chosen to leave: for policies that age.
    fn evicted(&self, key: u64) {
        let _ = key;
    }
}

/// The least recently used owner leaves first.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeastRecentlyUsed;

impl EvictionPolicy for LeastRecentlyUsed {
    fn key(&self, usage: &Usage) -> u64 {
        usage.time
    }
}
