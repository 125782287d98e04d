//! The KV cache: keys and values of each owner's history as pages in a pool, with a store as the tier behind it.
//!
//! An [`Owner`] is a user of a ranker, a conversation, or a prompt that conversations share. A caller
//! [`prepare`](KvCache::prepare)s a batch, runs the model on the index tensors and pools of the [`KvLease`] it gets, and
//! [`commit`](KvLease::commit)s what the model has appended. [`fork`](KvCache::fork) has an owner begin with the pages of
//! another one. When the pool is full an [`EvictionPolicy`] chooses the owners that leave for the store.

mod ahead;
mod branch;
mod device;
mod evict;
mod eviction_policy;
mod fetch;
mod fingerprint;
mod fork;
mod format;
mod lease;
mod offload;
mod onload;
mod options;
mod pages;
mod plan;
mod plane_pool;
pub mod policy;
mod pool;
mod prefix;
mod prepare;
mod shape;
mod slots;
mod stats;
mod table;

use std::sync::Arc;

use ahead::{Ahead, Signal};
pub use eviction_policy::{EvictionPolicy, LeastRecentlyUsed, Usage};
pub use lease::{KvLease, LeasedOwner, Written};
use onload::Readers;
pub use options::{Edited, KvFormat, KvOptions, KvSize, Offload, Overlap};
use plan::Rules;
use pool::Pool;
use prefix::PrefixIndex;
use prepare::Until;
use shape::Shape;
use stats::Counters;
pub use stats::KvStats;
use table::Table;

use crate::error::{Error, Result, Status};
pub use crate::store::Owner;
pub use crate::store::TierStats;
use crate::store::{Found, Key, Space, Store, Ticket};
use crate::tensor::Tensor;

/// What a batch asks for one owner.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvRequest<'a> {
    /// The owner of the history.
    pub owner: Owner,
    /// The position of the first new token in the history.
    pub start: u64,
    /// How many new tokens there are.
    pub tokens: u32,
    /// How many candidates follow them.
    pub candidates: u32,
    /// If the cache detects edited histories: the items of the history up to the last new token, of all new tokens at least,
    /// and of as many before them as are to be checked.
    pub items: &'a [u64],
    /// Whether the new tokens are computed even if they are cached: what is cached from `start` on is dropped, whole pages of
    /// it. Otherwise they are trimmed or refused, as [`Overlap`] says.
    pub recompute: bool,
}

/// Where a history is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// It is not cached.
    #[default]
    None,
    /// In the pool.
    Resident,
    /// In the store, or on its way from there to the pool.
    Store,
}

/// What is cached of one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedOwner {
    /// The position of the first token.
    pub start: u64,
    /// How many tokens there are.
    pub length: u32,
    /// Where they are.
    pub tier: Tier,
}

/// A choice of owners.
#[derive(Clone, Copy, Debug)]
pub enum Owners<'a> {
    /// All of them.
    All,
    /// These.
    These(&'a [Owner]),
}

/// A choice of tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// The pool.
    pub resident: bool,
    /// The store.
    pub store: bool,
}

impl Tiers {
    /// Both.
    pub const ALL: Self = Self { resident: true, store: true };
    /// The pool alone.
    pub const RESIDENT: Self = Self { resident: true, store: false };
    /// The store alone.
    pub const STORE: Self = Self { resident: false, store: true };
}

/// A cache of keys and values. Any number of threads may use one at the same time.
///
/// Dropping it stores what is in the pool, unless [`Offload::ByHand`] is set, and waits for it. Live leases stay valid. What
/// they commit afterwards is stored only with [`Offload::AtCommit`].
pub struct KvCache {
    inner: Arc<Inner>,
    /// Set if histories are stored ahead of their eviction.
    ahead: Option<Ahead>,
}

struct Inner {
    shape: Shape,
    rules: Rules,
    offload: Offload,
    onload_in_background: bool,
    space: Space,
    pool: Pool,
    table: Table,
    store: Option<Arc<dyn Store>>,
    /// Set if there is a store.
    readers: Option<Readers>,
    signal: Signal,
    counters: Counters,
    /// Set if owners are found by their prefixes.
    prefixes: Option<PrefixIndex>,
}

impl KvCache {
    /// Opens a cache, with a store behind it if there is one. Caches of several models or versions can share a store. A second
    /// cache of the same version and shape is refused with BUSY: each would take the stored histories for its own.
    pub fn open(options: &KvOptions, store: Option<Arc<dyn Store>>) -> Result<Self> {
        let (shape, pages) = shape::check(options)?;
        let ahead = match (&store, options.offload) {
            (Some(_), Offload::OnEviction) => (u64::from(pages) * u64::from(options.ahead_percent) / 100) as u32,
            _ => 0,
        };
        let rules = Rules {
            page_size: options.page_size,
            max_history: options.max_history,
            overlap: options.overlap,
            edited: options.edited,
        };
        let space = shape::space(options, shape);
        let pool = Pool::new(shape, pages, options.device_id)?;
        let readers = store.as_ref().map(|_| Readers::new(options.onload_threads)).transpose()?;
        if store.as_ref().is_some_and(|store| !store.claim(space)) {
            let message =
                "another cache of this model version and shape uses the store: share that cache, or free it first";
            return Err(Error::new(Status::Busy, message));
        }
        let inner = Inner {
            shape,
            rules,
            offload: options.offload,
            onload_in_background: options.onload_in_background,
            space,
            pool,
            table: Table::new(pages, ahead, Arc::clone(&options.eviction)),
            readers,
            store,
            signal: Signal::default(),
            counters: Counters::new(),
            prefixes: (options.index_prefixes && options.edited != Edited::Unnoticed).then(PrefixIndex::new),
        };
        inner.index_stored();
        let inner = Arc::new(inner);
        let ahead = (ahead > 0).then(|| Ahead::start(&inner)).transpose()?;
        Ok(Self { inner, ahead })
    }

    /// The pool of one layer, `[pages, 2, page_size, heads, head_size]` (int4: half of it): an input and an output of the model, both bound
    /// to it.
    pub fn pool(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.inner.layer(layer)
    }

    /// The scales of one layer's pool, `[pages, 2, page_size, heads, 2]` (fp8: 1): an input and an output as the pool is.
    /// `None` for [`KvFormat::Native`].
    pub fn scales(&self, layer: u32) -> Result<Option<&Arc<Tensor>>> {
        self.inner.layer(layer)?;
        Ok(self.inner.pool.scales(layer))
    }

    /// Whether nothing is on its way to the pages of a GPU: operators need not wait then. True in host memory.
    pub(crate) fn is_still(&self) -> bool {
        self.inner.pool.is_still()
    }

    /// The tokens of a page.
    pub(crate) fn page_size(&self) -> u64 {
        self.inner.shape.page_size.into()
    }

    /// How many layers there are.
    pub fn layers(&self) -> u32 {
        self.inner.shape.layers
    }

    /// Where each owner's cached history begins, how long it is, and in which tier it is. Changes nothing.
    pub fn lookup(&self, owners: &[Owner]) -> Vec<CachedOwner> {
        owners.iter().map(|&owner| self.inner.lookup(owner)).collect()
    }

    /// Makes room for a batch and returns where its histories are. Evicts other owners if need be, and brings those of the
    /// batch back from the store. The owners of the batch are not evicted until the lease ends.
    ///
    /// Any number of leases may read a history at the same time; one at most may add to it.
    pub fn prepare(&self, requests: &[KvRequest<'_>]) -> Result<KvLease> {
        let lease = prepare::prepare(&self.inner, requests, Until::Arrived)?;
        lease.count(false);
        Ok(lease)
    }

    /// As [`prepare`](Self::prepare), for a run on the GPU that the pages are on: returns as soon as what has to come back
    /// from the store is on its way, and each layer's operators wait for their own. In host memory the same as `prepare`.
    pub fn prepare_for_run(&self, requests: &[KvRequest<'_>]) -> Result<KvLease> {
        let lease = self.prepare_uncounted(requests)?;
        lease.count(false);
        Ok(lease)
    }

    /// As [`prepare_for_run`](Self::prepare_for_run), without counting in the statistics: a caller that runs the batch calls
    /// [`KvLease::count`].
    pub(crate) fn prepare_uncounted(&self, requests: &[KvRequest<'_>]) -> Result<KvLease> {
        prepare::prepare(&self.inner, requests, Until::OnItsWay)
    }

    /// Has `to` begin with the first `tokens` tokens of `from`, which both share: a prompt that many conversations begin
    /// with, or the beams of a search. Returns how many tokens are shared: whole pages only, so perhaps fewer than asked for;
    /// 0 if none. `to` grows by itself from there. Brings `from` back from the store if it is there.
    ///
    /// A shared page counts once, and is free when its last owner has left. In a store each owner has a copy of its own, and
    /// comes back from there with pages of its own. Until a lease holds it, `to` can be evicted as any owner; without a store
    /// it is then gone. `to` must have no history yet.
    pub fn fork(&self, from: Owner, to: Owner, tokens: u32) -> Result<u32> {
        Inner::fork(&self.inner, from, to, tokens)
    }

    /// Has `to` begin with all tokens of `from`, as the beams of a search do that part. Whole pages are shared; the page that
    /// `from` ends in is copied, so that both can go on in it. Returns how many tokens `to` has: all of `from` if it is in the
    /// pool, only its whole pages if there is no page for the copy, and 0 if it is not in the pool. What is said of
    /// [`fork`](Self::fork) holds here, too.
    pub fn branch(&self, from: Owner, to: Owner) -> Result<u32> {
        self.inner.branch(from, to)
    }

    /// Removes an owner of which nothing is of use any more. As [`forget`](Self::forget), and without a word to the store where
    /// that has nothing of it.
    pub(crate) fn discard(&self, owner: Owner) -> Result<()> {
        self.inner.discard(owner)
    }

    /// How many of the first items are cached of an owner and agree with what was cached, in any tier. Where they do not agree,
    /// or are fewer than the cached tokens, whole pages count. For caches that detect edited histories, whose histories begin
    /// at 0.
    pub fn matching(&self, owner: Owner, items: &[u64]) -> u32 {
        self.inner.matching(owner, items)
    }

    /// An owner that has the longest prefix of these items, and how many tokens of it: whole pages, in any tier. `None` if no
    /// owner has a page of it, or the cache was opened without [`KvOptions::index_prefixes`].
    pub fn find_prefix(&self, items: &[u64]) -> Option<(Owner, u32)> {
        self.inner.find_prefix(items)
    }

    /// Writes histories to the store and waits until they are as durable as it promises. Says how many owners had
    /// something that was not stored.
    pub fn offload(&self, owners: Owners<'_>) -> Result<usize> {
        self.inner.offload(owners)
    }

    /// Removes histories from tiers. Those that leave the pool alone go to the store first, unless that is done by hand;
    /// those that leave the store are gone for good when this returns. Says how many owners had something there. An owner
    /// that a lease holds is an error; with [`Owners::All`] it is left out.
    pub fn evict(&self, owners: Owners<'_>, tiers: Tiers) -> Result<usize> {
        self.inner.evict(owners, tiers)
    }

    /// As [`evict`](Self::evict), of one owner and all tiers; what is gone for good is so when the tickets are done.
    pub(crate) fn forget(&self, owner: Owner, tickets: &mut Vec<Ticket>) -> Result<bool> {
        self.inner.evict_owner(owner, Tiers::ALL, tickets)
    }

    /// Begins to bring histories from the store into the pool and returns at once. Says of how many owners. Evicts others
    /// as `prepare` does, and stops where that is not enough.
    pub fn prefetch(&self, owners: &[Owner]) -> Result<usize> {
        let mut incoming = Vec::new();
        let outcome: Result<()> = owners.iter().try_for_each(|&owner| {
            // Only the first one waits for pages: those that this call itself brings in are not there before it ends.
            incoming.extend(self.inner.fetch(owner, incoming.is_empty())?);
            Ok(())
        });
        let count = incoming.len();
        // Also after an error: leases wait for the owners that are in the table as loading.
        Inner::load(&self.inner, incoming);
        match outcome {
            Err(error) if error.status() != Status::Capacity => Err(error),
            _ => Ok(count),
        }
    }

    /// Waits until everything that was handed to the store is as durable as it promises.
    pub fn flush(&self) -> Result<()> {
        self.inner.store.as_ref().map_or(Ok(()), |store| store.flush())
    }

    /// How full the tiers under the pool are, the fastest first.
    pub fn tiers(&self) -> Vec<TierStats> {
        self.inner.store.as_ref().map_or_else(Vec::new, |store| store.tiers())
    }

    /// What the cache has and what it did since it was opened.
    pub fn stats(&self) -> KvStats {
        let Inner { table, counters, .. } = &*self.inner;
        let (owners, tokens) = table.count();
        KvStats {
            pages: table.pages().len() as u64,
            free_pages: table.pages().free() as u64,
            shared_pages: table.pages().shared() as u64,
            resident_owners: owners as u64,
            resident_tokens: tokens,
            tokens_from_pool: counters.from_pool.get(),
            tokens_from_store: counters.from_store.get(),
            tokens_new: counters.new.get(),
            evicted_owners: counters.evicted.get(),
            failed_offloads: counters.failed_offloads.get(),
            failed_onloads: counters.failed_onloads.get(),
        }
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        self.ahead = None;
        if self.inner.store.is_some()
            && self.inner.offload != Offload::ByHand
            && let Err(error) = self.inner.offload(Owners::All)
        {
            log::warn!("a cache was closed and not all of it could be stored: {error}");
        }
        // What is being read keeps the store open, and the caller may want to open it again.
        if let Some(readers) = &self.inner.readers {
            readers.wait();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(store) = &self.store {
            store.release(self.space);
        }
    }
}

impl Inner {
    fn key(&self, owner: Owner) -> Key {
        Key { space: self.space, owner }
    }

    fn found(&self, owner: Owner) -> Option<Found> {
        self.store.as_ref()?.find(self.key(owner))
    }

    fn layer(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.pool.layer(layer).ok_or_else(|| self.no_layer(layer))
    }

    fn no_layer(&self, layer: u32) -> Error {
        Error::invalid("layer", format!("{layer} is beyond the {} layers of this cache", self.shape.layers))
    }

    fn lookup(&self, owner: Owner) -> CachedOwner {
        let locked = self.table.lock(owner);
        if let Some(entry) = locked.get(owner).filter(|entry| entry.tokens > 0 && !entry.failed) {
            let tier = if entry.loading.is_some() { Tier::Store } else { Tier::Resident };
            return CachedOwner { start: entry.start, length: entry.tokens, tier };
        }
        drop(locked);
        let Some(found) = self.found(owner) else { return CachedOwner::default() };
        CachedOwner { start: found.start, length: (found.end - found.start) as u32, tier: Tier::Store }
    }

    /// Removes an owner's tokens from a position on from the store.
    fn cut(&self, owner: Owner, from: u64) -> Result<Option<Ticket>> {
        self.store.as_ref().map(|store| store.cut(self.key(owner), from)).transpose()
    }
}

fn busy(owner: Owner, why: &str) -> Error {
    Error::new(Status::Busy, format!("owner {owner} {why}"))
}
