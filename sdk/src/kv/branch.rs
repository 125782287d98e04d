//! Branches: a new owner goes on where another one is, inside a page, too.

use super::table::Entry;
use super::{Inner, Tiers};
use crate::error::{Error, Result};
use crate::store::Owner;

/// An owner that can not be evicted while its last page is copied.
struct Source<'a> {
    inner: &'a Inner,
    owner: Owner,
}

impl Drop for Source<'_> {
    fn drop(&mut self) {
        self.inner.table.lock(self.owner).change(self.owner, |entry| entry.readers -= 1);
    }
}

impl Inner {
    /// See [`KvCache::branch`](super::KvCache::branch).
    pub(super) fn branch(&self, from: Owner, to: Owner) -> Result<u32> {
        let taken = || Error::invalid("to", format!("owner {to} has a history: evict it first"));
        if from == to || self.table.lock(to).get(to).is_some() || self.found(to).is_some() {
            return Err(taken());
        }
        let mut locked = self.table.lock(from).wait_while(from, |entry| entry.leaving);
        let usable = |entry: &&Entry| entry.tokens > 0 && entry.loading.is_none() && !entry.failed;
        let Some(tokens) = locked.get(from).filter(usable).map(|entry| entry.tokens) else { return Ok(0) };
        locked.lease(from, |entry| entry.readers += 1);
        drop(locked);
        let source = Source { inner: self, owner: from };

        // Without a page for the copy its tokens are computed again.
        let page_size = self.shape.page_size;
        let mut copy = if tokens % page_size == 0 { Vec::new() } else { self.allocate(1, false).unwrap_or_default() };
        let branched = self.share_all(from, &mut copy);
        self.table.pages().give(&mut copy);
        drop(source);
        let mut entry = branched?;
        let tokens = entry.tokens;
        if tokens == 0 {
            return Ok(0);
        }
        let mut locked = self.table.lock(to);
        if locked.get(to).is_some() || self.found(to).is_some() {
            drop(locked);
            self.table.pages().give_list(&mut entry.pages);
            return Err(taken());
        }
        // Its pages are found by the owner that it came from: the index remembers few owners of a page, and branches come and go.
        locked.insert(to, entry);
        Ok(tokens)
    }

    /// An entry that shares the whole pages of an owner, which a lease holds, and has a copy of the page that it ends in, if there
    /// is a page for it.
    fn share_all(&self, from: Owner, copy: &mut Vec<u32>) -> Result<Entry> {
        let mut locked = self.table.lock(from);
        let entry = locked.get(from).expect("an owner with a lease is in the table");
        let page_size = self.shape.page_size;
        let (whole, rest) = ((entry.tokens / page_size) as usize, entry.tokens % page_size);
        let rest = if copy.is_empty() { 0 } else { rest };
        if rest > 0 {
            // SAFETY: tokens of an owner are not written again while it has them, and the lock keeps it from losing them; the other
            // page is no owner's.
            unsafe { self.pool.copy_page(entry.pages[whole], copy[0], rest as usize) }?;
        }
        let mut branch = Entry { start: entry.start, tokens: whole as u32 * page_size + rest, ..Entry::default() };
        if !entry.hashes.is_empty() {
            branch.hashes = entry.hashes[..whole + usize::from(rest > 0)].to_vec();
            branch.end_hash = match rest {
                0 => entry.hashes.get(whole).copied().unwrap_or(entry.end_hash),
                _ => entry.end_hash,
            };
        }
        branch.pages = locked.change_used(from, |entry| self.table.pages().share(&mut entry.pages, whole));
        if rest > 0 {
            branch.pages.append(copy);
        }
        Ok(branch)
    }

    /// See [`KvCache::discard`](super::KvCache::discard).
    pub(super) fn discard(&self, owner: Owner) -> Result<()> {
        let mut locked = self.table.lock(owner).wait_while(owner, |entry| entry.leaving || entry.copying);
        if self.found(owner).is_none() {
            match locked.get(owner) {
                None => return Ok(()),
                Some(entry) if !entry.leased() && entry.loading.is_none() => {
                    locked.change(owner, |entry| entry.tokens = 0);
                    return Ok(());
                }
                Some(_) => {}
            }
        }
        drop(locked);
        self.evict_owner(owner, Tiers::ALL, &mut Vec::new()).map(drop)
    }
}
