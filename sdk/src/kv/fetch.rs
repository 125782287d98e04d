//! Bringing stored histories into the pool.

use std::sync::Arc;

use super::device::Part;
use super::onload::{Destination, Incoming, Onload};
use super::options::Edited;
use super::plan::Cached;
use super::table::Entry;
use super::{Inner, offload};
use crate::error::{Result, Status};
use crate::store::{History, Owner};

/// How many pieces of one history may turn out to be unreadable before it is given up.
const ATTEMPTS: usize = 64;

/// A stored history that can be used.
pub(super) struct FoundHistory {
    pub(super) history: Box<dyn History>,
    /// The hash of the history before each page, if histories are hashed.
    pub(super) hashes: Vec<u64>,
    pub(super) end_hash: u64,
}

impl FoundHistory {
    /// How many tokens it has.
    pub(super) fn tokens(&self) -> u32 {
        // No more than i32::MAX, or it would not have been found.
        (self.history.end() - self.history.start()) as u32
    }

    /// What is cached with it.
    pub(super) fn cached(&self) -> Cached<'_> {
        Cached { start: self.history.start(), tokens: self.tokens(), hashes: &self.hashes, end_hash: self.end_hash }
    }
}

impl Inner {
    /// An owner's stored history, if it can be used.
    pub(super) fn stored_history(&self, owner: Owner) -> Option<FoundHistory> {
        let store = self.store.as_ref()?;
        // The store drops a piece whose tag it can not read, so each attempt finds less; a store that fails altogether may not.
        for _ in 0..ATTEMPTS {
            let history = store.history(self.key(owner))?;
            if history.end() - history.start() > i32::MAX as u64 {
                break;
            }
            if self.rules.edited == Edited::Unnoticed {
                return Some(FoundHistory { history, hashes: Vec::new(), end_hash: 0 });
            }
            match offload::hashes(&*history, self.shape.page_size) {
                Ok((hashes, end_hash)) => return Some(FoundHistory { history, hashes, end_hash }),
                Err(error) if error.status() == Status::Io => log::warn!("owner {owner} in the store: {error}"),
                Err(error) => {
                    log::warn!("owner {owner} in the store is left out: {error}");
                    self.forget(owner);
                }
            }
        }
        None
    }

    /// Removes what is stored of an owner and can not be used. A failure is logged, and inference goes on.
    fn forget(&self, owner: Owner) {
        if let Err(error) = self.cut(owner, 0) {
            log::warn!("owner {owner} can not be removed from the store: {error}");
        }
    }

    /// Whether the store has just what `seen` says of an owner.
    pub(super) fn unchanged(&self, owner: Owner, seen: Option<&dyn History>) -> bool {
        match (self.found(owner), seen) {
            (Some(found), Some(seen)) => (found.start, &*found.pieces) == (seen.start(), seen.pieces()),
            (found, seen) => found.is_none() && seen.is_none(),
        }
    }

    /// Makes room in the pool for a stored history that is not there; `None` if there is nothing to do. With `waits`, waits
    /// for pages that other threads are moving.
    pub(super) fn fetch(&self, owner: Owner, waits: bool) -> Result<Option<Incoming>> {
        if self.table.lock(owner).get(owner).is_some() {
            return Ok(None);
        }
        let Some(found) = self.stored_history(owner) else { return Ok(None) };
        let mut pages = self.allocate(self.pages_of(&*found.history), waits)?;
        let incoming = self.settle(owner, found, &mut pages, |_| ());
        self.table.pages().give(&mut pages);
        Ok(incoming)
    }

    pub(super) fn pages_of(&self, history: &dyn History) -> usize {
        (history.end() - history.start()).div_ceil(self.shape.page_size.into()) as usize
    }

    /// Puts a stored history into the table, marked as loading; `None` if another thread was faster or it has changed in
    /// the store. `hold` sets the lease that holds it from the beginning.
    pub(super) fn settle(
        &self,
        owner: Owner,
        FoundHistory { history, hashes, end_hash }: FoundHistory,
        pages: &mut Vec<u32>,
        hold: impl FnOnce(&mut Entry),
    ) -> Option<Incoming> {
        let mut locked = self.table.lock(owner);
        if locked.get(owner).is_some() || !self.unchanged(owner, Some(&*history)) {
            return None;
        }
        let onload = Arc::new(Onload::new(self.shape.layers));
        let mut entry = Entry {
            start: history.start(),
            tokens: (history.end() - history.start()) as u32,
            pages: std::mem::take(pages).into(),
            hashes,
            end_hash,
            loading: Some(Arc::clone(&onload)),
            saved: true,
            ..Entry::default()
        };
        hold(&mut entry);
        let pages = entry.pages.to_vec();
        locked.insert(owner, entry);
        Some(Incoming { owner, history, pages, onload })
    }

    /// Starts to read histories that are in the table, marked as loading.
    pub(super) fn load(inner: &Arc<Self>, incoming: Vec<Incoming>) {
        if incoming.is_empty() {
            return;
        }
        let readers = inner.readers.as_ref().expect("histories come from a store, and with one there are readers");
        let destination: Arc<dyn Destination> = inner.clone();
        readers.start(&destination, incoming, inner.shape.layers);
    }
}

impl Destination for Inner {
    fn arrived(&self, incoming: &Incoming, layer: u32, pieces: &[&[u8]]) -> Result<()> {
        let history = &*incoming.history;
        let parts = history.pieces().iter().zip(pieces).map(|(piece, &bytes)| {
            // The history may begin inside its first piece.
            let skip = history.start().saturating_sub(piece.start) as usize;
            // Of a piece that was cut, less counts than is there.
            let held = bytes.len() / (2 * self.shape.row_bytes());
            Part { bytes, held, skip, count: piece.tokens as usize - skip }
        });
        let parts: Vec<_> = parts.collect();
        // SAFETY: the owner is marked as loading: a lease on its pages waits for this layer before it reads, and writes to
        // other tokens only. The history, whose bytes these are, lives until `settled` has returned.
        unsafe { self.pool.write(layer, &incoming.pages, 0, &parts) }
    }

    fn settled(&self) -> Result<()> {
        self.pool.settle()
    }

    fn complete(&self, owner: Owner, result: Result<()>) {
        if let Err(error) = &result {
            log::warn!("owner {owner} can not be read from the store and counts as not cached: {error}");
            self.counters.failed_onloads.add(1);
            // The store has dropped what it could not read, and a GPU that fails says nothing of what is stored. What does
            // not fit must not be tried for ever.
            if error.status() == Status::Internal {
                self.forget(owner);
            }
        }
        self.table.lock(owner).change(owner, |entry| (entry.loading, entry.failed) = (None, result.is_err()));
    }
}
