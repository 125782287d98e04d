//! The prefix index: which owners have the pages of a token prefix.
//!
//! A page is known by the hash of the whole history up to its end, so that equal hashes mean equal prefixes. The cache adds the
//! pages of an owner as they are committed. An owner that has left all tiers is found out when it is looked up, and by a
//! sweep when the index has doubled.

use std::collections::HashMap;
use std::sync::Arc;

use super::fingerprint::extend;
use super::plan::{Cached, matching};
use super::{Inner, KvRequest};
use crate::store::Owner;
use crate::sync::Mutex;

/// The index is not swept before it has so many pages.
const SMALLEST_SWEEP: usize = 4096;
/// How many owners of one page are remembered: one of them is enough, the others are for when it leaves.
const OWNERS_OF_A_PAGE: usize = 4;

/// Which owners have the pages of a prefix.
pub(super) struct PrefixIndex {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The owners of a page, the last one to use it last.
    pages: HashMap<u64, Vec<Owner>>,
    /// The number of pages at which it is swept.
    sweep_at: usize,
}

impl PrefixIndex {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State { sweep_at: SMALLEST_SWEEP, ..State::default() }) }
    }

    /// An owner has these pages. Returns whether the index is to be swept.
    pub(super) fn insert(&self, owner: Owner, hashes: impl IntoIterator<Item = u64>) -> bool {
        let mut state = self.state.lock();
        for hash in hashes {
            let owners = state.pages.entry(hash).or_default();
            owners.retain(|&known| known != owner);
            if owners.len() == OWNERS_OF_A_PAGE {
                owners.remove(0);
            }
            owners.push(owner);
        }
        state.pages.len() >= state.sweep_at
    }

    /// The owners that may have a page, the last one to use it first.
    fn owners(&self, hash: u64) -> Vec<Owner> {
        let state = self.state.lock();
        state.pages.get(&hash).map_or_else(Vec::new, |owners| owners.iter().rev().copied().collect())
    }

    fn remove(&self, hash: u64, owner: Owner) {
        let mut state = self.state.lock();
        if let Some(owners) = state.pages.get_mut(&hash) {
            owners.retain(|&known| known != owner);
            if owners.is_empty() {
                state.pages.remove(&hash);
            }
        }
    }

    /// Removes owners that have left all tiers. `is_known` is called without a lock.
    fn sweep(&self, is_known: impl Fn(Owner) -> bool) {
        let mut owners: Vec<Owner> = self.state.lock().pages.values().flatten().copied().collect();
        owners.sort_unstable();
        owners.dedup();
        owners.retain(|&owner| !is_known(owner));
        let mut state = self.state.lock();
        state.pages.retain(|_, of_page| {
            of_page.retain(|owner| owners.binary_search(owner).is_err());
            !of_page.is_empty()
        });
        state.sweep_at = (2 * state.pages.len()).max(SMALLEST_SWEEP);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.state.lock().pages.len()
    }
}

/// The hashes of a history at the ends of its whole pages.
pub(super) fn page_hashes(items: &[u64], page_size: u32) -> Vec<u64> {
    let mut hash = 0;
    let page = |items: &[u64]| {
        hash = extend(hash, items);
        hash
    };
    items.chunks_exact(page_size as usize).map(page).collect()
}

/// The hashes at the ends of the whole pages of a history, from page `from` on. None of a history that does not begin at 0.
pub(super) fn page_ends(cached: Cached<'_>, from: usize, page_size: u32) -> Vec<u64> {
    if cached.start > 0 || cached.hashes.is_empty() {
        return Vec::new();
    }
    let whole = (cached.tokens / page_size) as usize;
    (from..whole).map(|page| cached.hashes.get(page + 1).copied().unwrap_or(cached.end_hash)).collect()
}

impl Inner {
    /// Notes in the prefix index that an owner has these pages.
    pub(super) fn index_pages(&self, owner: Owner, ends: Vec<u64>) {
        let Some(index) = self.prefixes.as_ref().filter(|_| !ends.is_empty()) else { return };
        if index.insert(owner, ends) {
            index.sweep(|owner| self.lookup(owner).length > 0);
        }
    }

    /// Adds what a store has from earlier.
    pub(super) fn index_stored(&self) {
        let (Some(_), Some(store)) = (&self.prefixes, &self.store) else { return };
        for owner in store.owners(self.space) {
            if let Some(found) = self.stored_history(owner) {
                self.index_pages(owner, page_ends(found.cached(), 0, self.shape.page_size));
            }
        }
    }

    /// See [`KvCache::matching`](super::KvCache::matching).
    pub(super) fn matching(&self, owner: Owner, items: &[u64]) -> u32 {
        let request = KvRequest { owner, start: 0, tokens: items.len() as u32, items, ..KvRequest::default() };
        let locked = self.table.lock(owner).wait_while(owner, |entry| entry.leaving);
        if let Some(entry) = locked.get(owner).filter(|entry| entry.tokens > 0 && !entry.failed) {
            return matching(entry.cached(), &request, self.rules);
        }
        drop(locked);
        self.stored_history(owner).map_or(0, |found| matching(found.cached(), &request, self.rules))
    }

    /// See [`KvCache::find_prefix`](super::KvCache::find_prefix).
    pub(super) fn find_prefix(self: &Arc<Self>, items: &[u64]) -> Option<(Owner, u32)> {
        let (index, page_size) = (self.prefixes.as_ref()?, self.shape.page_size);
        for (page, &hash) in page_hashes(items, page_size).iter().enumerate().rev() {
            let tokens = (page + 1) * page_size as usize;
            for owner in index.owners(hash) {
                if self.matching(owner, &items[..tokens]) as usize == tokens {
                    return Some((owner, tokens as u32));
                }
                index.remove(hash, owner);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_known_by_the_whole_history_up_to_its_end() {
        let items: Vec<u64> = (0..70).collect();
        let hashes = page_hashes(&items, 32);
        assert_eq!(hashes, [extend(0, &items[..32]), extend(0, &items[..64])]);
        let other: Vec<u64> = (1..33).chain(32..64).collect();
        assert_ne!(page_hashes(&other, 32)[1], hashes[1]);
    }

    #[test]
    fn the_last_owner_to_use_a_page_is_tried_first() {
        let index = PrefixIndex::new();
        for owner in [1, 2, 1, 3, 4, 5, 6] {
            index.insert(Owner(owner), [7]);
        }
        assert_eq!(index.owners(7), [6, 5, 4, 3].map(Owner));
        index.remove(7, Owner(5));
        assert_eq!(index.owners(7), [6, 4, 3].map(Owner));
    }

    #[test]
    fn a_sweep_removes_owners_that_are_gone() {
        let index = PrefixIndex::new();
        index.insert(Owner(1), 0..3000);
        assert!(index.insert(Owner(2), 2000..5000), "it has doubled");
        index.sweep(|owner| owner == Owner(2));
        assert_eq!((index.len(), index.owners(1999), index.owners(2500)), (3000, vec![], vec![Owner(2)]));
        assert!(!index.insert(Owner(1), 0..1000), "not before it has doubled");
    }
}
