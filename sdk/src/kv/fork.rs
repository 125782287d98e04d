//! Sharing pages: a new owner begins with the first tokens of another one.

use std::sync::Arc;

use super::prefix::page_ends;
use super::table::Entry;
use super::{Inner, busy};
use crate::error::{Error, Result};
use crate::store::Owner;

/// How many times `share` looks for the source's pages before it gives up because they keep being evicted.
const ATTEMPTS: usize = 16;

impl Inner {
    /// See [`KvCache::fork`](super::KvCache::fork).
    pub(super) fn fork(inner: &Arc<Self>, from: Owner, to: Owner, tokens: u32) -> Result<u32> {
        let table = &inner.table;
        let taken = || Error::invalid("to", format!("owner {to} has a history: evict it first"));
        if from == to || table.lock(to).get(to).is_some() || inner.found(to).is_some() {
            return Err(taken());
        }
        let Some(mut entry) = inner.share(from, tokens)? else { return Ok(0) };
        let shared = entry.tokens;
        let mut locked = table.lock(to);
        if locked.get(to).is_some() || inner.found(to).is_some() {
            drop(locked);
            table.pages().give_list(&mut entry.pages);
            return Err(taken());
        }
        let ends = page_ends(entry.cached(), 0, inner.shape.page_size);
        locked.insert(to, entry);
        drop(locked);
        inner.index_pages(to, ends);
        Ok(shared)
    }

    /// An entry that shares the whole pages of the first tokens of an owner, whose pages are busy; `None` if there are none.
    fn share(self: &Arc<Self>, from: Owner, tokens: u32) -> Result<Option<Entry>> {
        let page_size = self.shape.page_size;
        for _ in 0..ATTEMPTS {
            let mut locked = self.table.lock(from).wait_while(from, |entry| entry.leaving);
            let Some(entry) = locked.get(from) else {
                drop(locked);
                let Some(incoming) = self.fetch(from, true)? else {
                    // Nothing is stored of it, or another thread is moving it.
                    if self.table.lock(from).get(from).is_some() || self.stored_history(from).is_some() {
                        continue;
                    }
                    return Ok(None);
                };
                Self::load(self, vec![incoming]);
                continue;
            };
            if let Some(onload) = &entry.loading {
                let onload = Arc::clone(onload);
                drop(locked);
                // The store drops what it can not read: the next attempt finds less.
                let _ = onload.wait_all();
                continue;
            }
            if entry.failed {
                return Err(busy(from, "could not be read from the store and a lease still holds it: try again"));
            }
            let count = (entry.tokens.min(tokens) / page_size) as usize;
            if count == 0 {
                return Ok(None);
            }
            let mut forked = Entry { start: entry.start, tokens: count as u32 * page_size, ..Entry::default() };
            if !entry.hashes.is_empty() {
                forked.hashes = entry.hashes[..count].to_vec();
                forked.end_hash = entry.hashes.get(count).copied().unwrap_or(entry.end_hash);
            }
            forked.pages = locked.change_used(from, |entry| self.table.pages().share(&mut entry.pages, count));
            return Ok(Some(forked));
        }
        Err(busy(from, "leaves the pool as often as it is brought back: try again, or give the cache more pages"))
    }
}
