//! Bringing stored histories into the pool.

use std::sync::Arc;

use super::device::Part;
use super::onload::{Destination, Incoming, Onload};
use super::table::Entry;
use super::{Inner, offload};
use crate::config::Edited;
use crate::error::{Result, Status};
use crate::store::History;

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
}

impl Inner {
    /// A user's stored history, if it can be used.
    pub(super) fn stored_history(&self, user: u64) -> Option<FoundHistory> {
        let store = self.store.as_ref()?;
        // A tag that can not be read takes its piece with it, so there is ever less; unless the store is past that too.
        for _ in 0..ATTEMPTS {
            let history = store.history(self.key(user))?;
            if history.end() - history.start() > i32::MAX as u64 {
                break;
            }
            if self.rules.edited == Edited::Unnoticed {
                return Some(FoundHistory { history, hashes: Vec::new(), end_hash: 0 });
            }
            match offload::hashes(&*history, self.shape.page_size) {
                Ok((hashes, end_hash)) => return Some(FoundHistory { history, hashes, end_hash }),
                Err(error) if error.status() == Status::Io => log::warn!("user {user} in the store: {error}"),
                Err(error) => {
                    log::warn!("user {user} in the store is left out: {error}");
                    self.forget(user);
                }
            }
        }
        None
    }

    /// Removes what is stored of a user and is of no use; inference goes on if that can not be done.
    fn forget(&self, user: u64) {
        if let Err(error) = self.cut(user, 0) {
            log::warn!("user {user} can not be removed from the store: {error}");
        }
    }

    /// Whether the store has just what `seen` says of a user.
    pub(super) fn unchanged(&self, user: u64, seen: Option<&dyn History>) -> bool {
        match (self.found(user), seen) {
            (Some(found), Some(seen)) => (found.start, &*found.pieces) == (seen.start(), seen.pieces()),
            (found, seen) => found.is_none() && seen.is_none(),
        }
    }

    /// Makes room in the pool for a stored history that no one holds; `None` if there is nothing to do. Whoever `waits` does
    /// so for pages that others are moving.
    pub(super) fn fetch(&self, user: u64, waits: bool) -> Result<Option<Incoming>> {
        if self.table.lock(user).get(user).is_some() {
            return Ok(None);
        }
        let Some(found) = self.stored_history(user) else { return Ok(None) };
        let mut pages = self.allocate(self.pages_of(&*found.history), waits)?;
        let incoming = self.settle(user, found, &mut pages, |_| ());
        self.table.give_pages(&mut pages);
        Ok(incoming)
    }

    pub(super) fn pages_of(&self, history: &dyn History) -> usize {
        (history.end() - history.start()).div_ceil(self.shape.page_size.into()) as usize
    }

    /// Puts a stored history into the table, marked as loading; `None` if someone else was faster or it has changed in
    /// the store. `hold` says who holds it from the beginning.
    pub(super) fn settle(
        &self,
        user: u64,
        FoundHistory { history, hashes, end_hash }: FoundHistory,
        pages: &mut Vec<u32>,
        hold: impl FnOnce(&mut Entry),
    ) -> Option<Incoming> {
        let mut locked = self.table.lock(user);
        if locked.get(user).is_some() || !self.unchanged(user, Some(&*history)) {
            return None;
        }
        let onload = Arc::new(Onload::new(self.shape.layers));
        let mut entry = Entry {
            start: history.start(),
            tokens: (history.end() - history.start()) as u32,
            pages: std::mem::take(pages),
            hashes,
            end_hash,
            stamp: self.table.now(),
            loading: Some(Arc::clone(&onload)),
            saved: true,
            ..Entry::default()
        };
        hold(&mut entry);
        let pages = entry.pages.clone();
        locked.insert(user, entry);
        Some(Incoming { user, history, pages, onload })
    }

    /// Has histories read that are in the table, marked as loading.
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
        // SAFETY: the user is marked as loading: whoever holds its pages waits for this layer before it reads, and writes
        // to other tokens only. The history, whose bytes these are, lives until `settled` has returned.
        unsafe { self.pool.write(layer, &incoming.pages, 0, &parts) }
    }

    fn settled(&self) -> Result<()> {
        self.pool.settle()
    }

    fn complete(&self, user: u64, result: Result<()>) {
        if let Err(error) = &result {
            log::warn!("user {user} can not be read from the store and counts as not cached: {error}");
            self.counters.failed_onloads.add(1);
            // What the store could not read it has dropped itself, and a GPU that fails says nothing of what is stored; what
            // does not fit must not be tried for ever.
            if error.status() == Status::Internal {
                self.forget(user);
            }
        }
        self.table.lock(user).change(user, |entry| (entry.loading, entry.failed) = (None, result.is_err()));
    }
}
