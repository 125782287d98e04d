//! Ids that no other request or answer has.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// 24 digits.
pub fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Each state has random keys of its own; the counter makes equal ids impossible to meet by chance alone.
    let random = RandomState::new().hash_one(Instant::now());
    format!("{random:016x}{:08x}", NEXT.fetch_add(1, Ordering::Relaxed) as u32)
}
