//! Ids that no other request or answer has.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// 24 digits.
pub fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // The counter makes equal ids impossible to meet by chance alone.
    format!("{:016x}{:08x}", random(), NEXT.fetch_add(1, Ordering::Relaxed) as u32)
}

/// 64 bits that nobody can guess the next of, but no secret: each state has random keys of its own.
pub fn random() -> u64 {
    RandomState::new().hash_one(Instant::now())
}
