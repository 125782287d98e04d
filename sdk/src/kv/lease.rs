//! Leases: a batch's hold on its owners, from `prepare` to `commit`.

use std::sync::{Arc, OnceLock};

use super::Inner;
use super::offload::{Copying, Saved};
use super::onload::Onload;
use super::options::Offload;
use super::plan::Plan;
use super::prefix::page_ends;
use super::table::Entry;
use crate::error::{Error, Result};
use crate::store::{Owner, Room};
use crate::tensor::Tensor;

/// A batch's hold on its owners: where their histories lie, and room for the new tokens.
///
/// Ends with [`commit`](KvLease::commit) or [`abort`](KvLease::abort); dropping it aborts.
pub struct KvLease {
    pub(super) inner: Arc<Inner>,
    pub(super) owners: Vec<Held>,
    /// In the order of the functions that give them; made when one is asked for.
    pub(super) tensors: OnceLock<[Arc<Tensor>; 5]>,
}

/// One owner in a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedOwner {
    /// The owner of the history.
    pub owner: Owner,
    /// The position where the history begins, as the model sees it.
    pub start: u64,
    /// How many of its tokens are cached.
    pub cached: u32,
    /// How many are new; the model appends them.
    pub tokens: u32,
    /// How many rows at the beginning of the request were cached already, with overlaps trimmed: they must be left out of
    /// the model's rows.
    pub trimmed: u32,
}

/// What a commit has handed to the store.
#[must_use = "a commit is durable only when it was waited for; drop this if that does not matter"]
pub struct Written {
    inner: Arc<Inner>,
    saved: Vec<Saved>,
    error: Option<Error>,
}

impl Written {
    /// Waits until what was committed is as durable as the store promises. At once, and with nothing promised, unless
    /// histories go to the store at commit.
    pub fn wait(self) -> Result<()> {
        let waited = self.inner.wait_for(&self.saved);
        self.error.map_or(waited, Err)
    }
}

/// What a lease has of one owner.
pub(super) struct Held {
    pub(super) owner: Owner,
    pub(super) plan: Plan,
    pub(super) candidates: u32,
    pub(super) hold: Hold,
    /// Those that the model sees.
    pub(super) pages: Vec<u32>,
    pub(super) new_pages: Vec<u32>,
    /// The hash of the history before the new tokens.
    pub(super) base_hash: u64,
    /// Hashes at the beginnings of the new pages, and at the end.
    pub(super) hashes: (Vec<u64>, u64),
    pub(super) onload: Option<Arc<Onload>>,
}

/// How the table counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hold {
    /// Not at all: there is nothing to hold.
    Nothing,
    Reads,
    Writes,
}

impl KvLease {
    /// Where each owner's rows begin: i32 `[owners + 1]`.
    pub fn row_offsets(&self) -> &Arc<Tensor> {
        &self.tensors()[0]
    }

    /// How many candidates each owner has: i32 `[owners]`.
    pub fn num_candidates(&self) -> &Arc<Tensor> {
        &self.tensors()[1]
    }

    /// How many tokens of each owner are cached: i32 `[owners]`.
    pub fn cached_len(&self) -> &Arc<Tensor> {
        &self.tensors()[2]
    }

    /// Where each owner's list of pages begins: i32 `[owners + 1]`.
    pub fn page_indptr(&self) -> &Arc<Tensor> {
        &self.tensors()[3]
    }

    /// Each owner's pages in order of position: i32.
    pub fn page_ids(&self) -> &Arc<Tensor> {
        &self.tensors()[4]
    }

    /// The pool of one layer, to be bound as an input and an output.
    pub fn pool(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.inner.layer(layer)
    }

    /// What the lease has of each owner, in the order of the batch.
    pub fn owners(&self) -> impl ExactSizeIterator<Item = LeasedOwner> + '_ {
        self.owners.iter().map(|&Held { owner, plan, .. }| LeasedOwner {
            owner,
            start: plan.start,
            cached: plan.cached,
            tokens: plan.tokens,
            trimmed: plan.trimmed,
        })
    }

    /// Whether a layer of every owner has arrived from the store. An error means that something could not be read: the
    /// lease is of no use, and the next one will find less in the cache.
    pub fn ready(&self, layer: u32) -> Result<bool> {
        self.inner.layer(layer)?;
        let on_gpu = self.inner.pool.is_on_gpu();
        for onload in self.onloads() {
            // On a GPU only the operators there are told of single layers.
            if !(if on_gpu { onload.is_complete() } else { onload.ready(layer) })? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until a layer of every owner has arrived from the store; with `None`, until all layers have. Errors as
    /// [`ready`](Self::ready).
    pub fn wait(&self, layer: Option<u32>) -> Result<()> {
        let Some(layer) = layer else { return self.wait_all() };
        self.inner.layer(layer)?;
        if self.inner.pool.is_on_gpu() {
            return self.wait_all();
        }
        self.onloads().try_for_each(|onload| onload.wait(layer))
    }

    fn wait_all(&self) -> Result<()> {
        // Waits for all of them, also after an error: then nothing is on its way any more.
        let results: Vec<_> = self.onloads().map(Onload::wait_all).collect();
        results.into_iter().collect()
    }

    /// Waits until everything has arrived from the store, or is on its way to a GPU; errors as
    /// [`ready`](Self::ready).
    pub(super) fn wait_on_its_way(&self) -> Result<()> {
        let results: Vec<_> = self.onloads().map(Onload::wait_on_its_way).collect();
        results.into_iter().collect()
    }

    /// Has the commit add only the first new tokens of an owner: those with these items. The others were guessed, and wrong.
    pub(crate) fn keep_first(&mut self, index: usize, items: &[u64]) {
        let Self { inner, owners, .. } = self;
        let held = &mut owners[index];
        debug_assert!(items.len() <= held.plan.tokens as usize && held.plan.dropped_after == 0);
        held.plan.tokens = items.len() as u32;
        let pages = held.plan.new_pages(inner.shape.page_size);
        inner.table.pages().give(&mut held.new_pages.split_off(pages));
        held.hash_new(inner, items);
    }

    /// Makes the new tokens part of their histories: the model has appended them. What goes to the store at commit is on
    /// its way when this returns; [`Written::wait`] waits for it.
    ///
    /// Fails, and is an abort, if something could not be read from the store.
    pub fn commit(mut self) -> Result<Written> {
        self.wait_all()?;
        let inner = Arc::clone(&self.inner);
        let save = inner.offload == Offload::AtCommit && inner.store.is_some();
        let mut to_save = Vec::new();
        for held in &mut self.owners {
            if commit(&inner, held, save) {
                to_save.push(Copying { inner: &inner, owner: held.owner });
            }
        }
        inner.wake_ahead();
        let (mut saved, mut error) = (Vec::new(), None);
        for copying in to_save {
            match inner.save_copying(copying, Room::OrRefuse) {
                Ok(some) => saved.push(some),
                // What is not stored now is stored with a later commit, or when the owner is evicted.
                Err(failed) => {
                    inner.counters.failed_offloads.add(1);
                    error.get_or_insert(failed);
                }
            }
        }
        Ok(Written { inner, saved, error })
    }

    /// Leaves everything as it was before.
    pub fn abort(self) {}

    /// Counts what was found of the histories, and what is new. `onloaded`: they came from the store, for an earlier lease.
    pub(crate) fn count(&self, onloaded: bool) {
        let counters = &self.inner.counters;
        for held in &self.owners {
            let from = if onloaded || held.onload.is_some() { &counters.from_store } else { &counters.from_pool };
            from.add(held.plan.cached.into());
            counters.new.add(held.plan.tokens.into());
        }
    }

    /// Whether something has come from the store for it, or is on its way.
    pub(crate) fn is_onloading(&self) -> bool {
        self.onloads().next().is_some()
    }

    /// Each owner's pages in order of position.
    pub(crate) fn pages(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages_of_owners().flatten()
    }

    /// The pages of each owner in order of position, in the order of the batch.
    pub(crate) fn pages_of_owners(&self) -> impl Iterator<Item = impl Iterator<Item = u32> + '_> + '_ {
        self.owners.iter().map(|held| held.pages.iter().chain(&held.new_pages).copied())
    }

    fn tensors(&self) -> &[Arc<Tensor>; 5] {
        self.tensors.get_or_init(|| tensors(&self.owners))
    }

    fn onloads(&self) -> impl Iterator<Item = &Onload> {
        self.owners.iter().filter_map(|held| held.onload.as_deref())
    }
}

impl Drop for KvLease {
    fn drop(&mut self) {
        release(&self.inner, &mut self.owners);
    }
}

/// The index tensors of a batch, in the order of [`KvLease`]'s functions.
fn tensors(owners: &[Held]) -> [Arc<Tensor>; 5] {
    let count = owners.len();
    let pages = owners.iter().map(|held| held.pages.len() + held.new_pages.len()).sum();
    let (mut row_offsets, mut page_indptr) = (Vec::with_capacity(count + 1), Vec::with_capacity(count + 1));
    let (mut rows, mut page_ids) = (0_i32, Vec::with_capacity(pages));
    row_offsets.push(0);
    page_indptr.push(0);
    for held in owners {
        rows += (held.plan.tokens + held.candidates) as i32;
        row_offsets.push(rows);
        page_ids.extend(held.pages.iter().chain(&held.new_pages).map(|&page| page as i32));
        page_indptr.push(page_ids.len() as i32);
    }
    let candidates: Vec<i32> = owners.iter().map(|held| held.candidates as i32).collect();
    let cached: Vec<i32> = owners.iter().map(|held| held.plan.cached as i32).collect();
    let tensor = |values: &[i32]| {
        let made = Tensor::from_slice(&[values.len() as i64], values);
        Arc::new(made.expect("there is memory for what was a list a moment ago"))
    };
    [tensor(&row_offsets), tensor(&candidates), tensor(&cached), tensor(&page_indptr), tensor(&page_ids)]
}

/// Adds the new tokens of one owner to its history, and ends the hold on it. After a panic in a store the lease still has
/// its hold, and ends it as ever. Returns whether the owner is to be saved; then it is marked as copying in the same step, so
/// that it can not be evicted before.
fn commit(inner: &Inner, held: &mut Held, save: bool) -> bool {
    let Held { owner, plan, .. } = *held;
    if held.hold == Hold::Nothing {
        return false;
    }
    let save = save && held.hold == Hold::Writes;
    let mut locked = inner.table.lock(owner);
    if plan.cut || save {
        // A copy of the old tokens must have ended before the store removes them.
        locked = locked.wait_while(owner, |entry| entry.copying);
    }
    let mut uncut = None;
    if plan.cut {
        let from = if plan.cached == 0 { 0 } else { plan.start + u64::from(plan.cached) };
        uncut = inner.cut(owner, from).err();
    }
    let saves = locked.change_used(owner, |entry| {
        if std::mem::replace(&mut held.hold, Hold::Nothing) == Hold::Reads {
            entry.readers -= 1;
            return false;
        }
        (entry.writer, entry.saved) = (false, false);
        entry.edits += u32::from(plan.cut);
        let (from, kept) = (plan.dropped_pages as usize, held.pages.len());
        let Entry { pages, dropped, .. } = &mut *entry;
        pages.truncate(from + kept, dropped);
        pages.drop_front(from, dropped);
        pages.append(&mut held.new_pages);
        if !entry.hashes.is_empty() {
            entry.hashes.truncate(from + kept);
            entry.hashes.drain(..from);
        }
        entry.hashes.extend(&held.hashes.0);
        entry.end_hash = held.hashes.1;
        // New tokens that are more than the window.
        let after = plan.dropped_after as usize;
        entry.pages.drop_front(after, &mut entry.dropped);
        entry.hashes.drain(..after.min(entry.hashes.len()));
        let gone = plan.dropped_after * inner.shape.page_size;
        entry.start = plan.start + u64::from(gone);
        entry.tokens = plan.cached + plan.tokens - gone;
        entry.copying |= save && entry.tokens > 0;
        save && entry.tokens > 0
    });
    let from = (plan.cached / inner.shape.page_size) as usize;
    let ends = match locked.get(owner).filter(|_| inner.prefixes.is_some()) {
        Some(entry) => page_ends(entry.cached(), from, inner.shape.page_size),
        None => Vec::new(),
    };
    drop(locked);
    inner.index_pages(owner, ends);
    // Outside the lock: a logger may call the cache.
    if let Some(error) = uncut {
        log::warn!("owner {owner}: what was edited can not be removed from the store: {error}");
    }
    saves
}

/// Ends the holds on owners, and returns the pages that were meant for them.
pub(super) fn release(inner: &Inner, owners: &mut Vec<Held>) {
    for mut held in owners.drain(..) {
        inner.table.pages().give(&mut held.new_pages);
        match held.hold {
            Hold::Nothing => {}
            Hold::Reads => inner.table.lock(held.owner).change(held.owner, |entry| entry.readers -= 1),
            Hold::Writes => inner.table.lock(held.owner).change(held.owner, |entry| entry.writer = false),
        }
    }
}
