//! The cache of keys and values: each user's history as pages in a pool, the least recently used ones on disk.
//!
//! A [`KvCache`] keeps what a model computed of each user's history. A request asks it to [`prepare`](KvCache::prepare) a
//! batch, runs the model on the index tensors and pools of the [`Lease`] it gets, and [`commit`](Lease::commit)s what the
//! model has appended.

mod ahead;
mod device;
mod evict;
mod fetch;
mod fingerprint;
mod lease;
mod offload;
mod onload;
mod plan;
mod pool;
mod prepare;
mod shape;
mod stats;
mod table;

use std::sync::Arc;

use ahead::{Ahead, Signal};
pub use lease::{Lease, LeasedUser, Written};
use onload::Readers;
use plan::Rules;
use pool::Pool;
use prepare::Until;
use shape::Shape;
use stats::Counters;
pub use stats::KvStats;
use table::Table;

use crate::config::{KvOptions, Offload};
use crate::error::{Error, Result, Status};
use crate::store::{Found, Key, Space, Store, Ticket};
use crate::tensor::Tensor;

/// What one user of a batch brings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// The user.
    pub user: u64,
    /// The position of the first new token in the user's history.
    pub start: u64,
    /// How many new tokens there are.
    pub tokens: u32,
    /// How many candidates follow them.
    pub candidates: u32,
    /// If the cache looks out for edited histories: the items of the history up to the last new token, of all new tokens
    /// at least, and of as many before them as are to be checked.
    pub items: &'a [u64],
}

/// Where a user's history lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// Nowhere.
    #[default]
    None,
    /// In the pool.
    Resident,
    /// In the store, or on its way from there to the pool.
    Store,
}

/// What is cached of one user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedUser {
    /// The position of the first token.
    pub start: u64,
    /// How many tokens there are.
    pub tokens: u32,
    /// Where they lie.
    pub tier: Tier,
}

/// Which users.
#[derive(Clone, Copy, Debug)]
pub enum Users<'a> {
    /// Everyone.
    All,
    /// These.
    These(&'a [u64]),
}

/// Which tiers.
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
/// Dropping it stores what is in the pool, unless that is done by hand, and waits for it. Leases that are out stay good;
/// what they commit afterwards is stored only where that is done at commit.
pub struct KvCache {
    inner: Arc<Inner>,
    /// There if histories are stored ahead of their eviction.
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
    /// There if there is a store.
    readers: Option<Readers>,
    signal: Signal,
    counters: Counters,
}

impl KvCache {
    /// Opens a cache, above a store if there is one. Caches of several models or versions can share a store; a second one
    /// of the same version and shape is refused with BUSY, for each takes what is stored for its own.
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
        let space = shape::space(options);
        let pool = Pool::new(shape, pages, options.place)?;
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
            table: Table::new(pages, ahead),
            readers,
            store,
            signal: Signal::default(),
            counters: Counters::new(),
        };
        let inner = Arc::new(inner);
        let ahead = (ahead > 0).then(|| Ahead::start(&inner)).transpose()?;
        Ok(Self { inner, ahead })
    }

    /// The pool of one layer, `[pages, 2, page_size, heads, head_size]`: an input and an output of the model, both bound
    /// to it.
    pub fn pool(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.inner.layer(layer)
    }

    /// Whether everything that is brought back, for whomever, is in its pages: operators need not wait then. True in host memory.
    pub(crate) fn is_still(&self) -> bool {
        self.inner.pool.is_still()
    }

    /// How many layers there are.
    pub fn layers(&self) -> u32 {
        self.inner.shape.layers
    }

    /// Where each user's cached history begins, how long it is, and where it lies. Changes nothing.
    pub fn lookup(&self, users: &[u64]) -> Vec<CachedUser> {
        users.iter().map(|&user| self.inner.lookup(user)).collect()
    }

    /// Makes room for a batch and says where everything lies. Evicts the least recently used users if need be, and brings
    /// those of the batch back from the store. The users of the batch stay where they are until the lease ends.
    ///
    /// Any number of leases may read a user's history at the same time; one at most may add to it.
    pub fn prepare(&self, batch: &[Request<'_>]) -> Result<Lease> {
        let lease = prepare::prepare(&self.inner, batch, Until::Arrived)?;
        lease.count(false);
        Ok(lease)
    }

    /// As [`prepare`](Self::prepare), for a run on the GPU that the pages are on: returns as soon as what has to come back
    /// from the store is on its way, and each layer's operators wait for their own. In host memory the same as `prepare`.
    pub fn prepare_for_run(&self, batch: &[Request<'_>]) -> Result<Lease> {
        let lease = self.prepare_uncounted(batch)?;
        lease.count(false);
        Ok(lease)
    }

    /// As [`prepare_for_run`](Self::prepare_for_run), for whoever may not run it after all: [`Lease::count`] is theirs.
    pub(crate) fn prepare_uncounted(&self, batch: &[Request<'_>]) -> Result<Lease> {
        prepare::prepare(&self.inner, batch, Until::OnItsWay)
    }

    /// Writes histories to the store and waits until they are as durable as it promises. Says how many users had
    /// something that was not stored.
    pub fn offload(&self, users: Users<'_>) -> Result<usize> {
        self.inner.offload(users)
    }

    /// Removes histories from tiers. Those that leave the pool alone go to the store first, unless that is done by hand;
    /// those that leave the store are gone for good when this returns. Says how many users had something there. A user
    /// that a lease holds is an error; with [`Users::All`] it is left out.
    pub fn evict(&self, users: Users<'_>, tiers: Tiers) -> Result<usize> {
        self.inner.evict(users, tiers)
    }

    /// As [`evict`](Self::evict), of one user and all tiers; what is gone for good is so when the tickets are done.
    pub(crate) fn forget(&self, user: u64, tickets: &mut Vec<Ticket>) -> Result<bool> {
        self.inner.evict_user(user, Tiers::ALL, tickets)
    }

    /// Begins to bring histories from the store into the pool and returns at once. Says of how many users. Evicts others
    /// as `prepare` does, and stops where that is not enough.
    pub fn prefetch(&self, users: &[u64]) -> Result<usize> {
        let mut incoming = Vec::new();
        let outcome: Result<()> = users.iter().try_for_each(|&user| {
            // Not for those of this call, who move only behind it.
            incoming.extend(self.inner.fetch(user, incoming.is_empty())?);
            Ok(())
        });
        let count = incoming.len();
        // Whoever is in the table is waited for, whatever became of the others.
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

    /// What the cache has and what it did since it was opened.
    pub fn stats(&self) -> KvStats {
        let Inner { table, counters, .. } = &*self.inner;
        let (users, tokens) = table.count();
        KvStats {
            pages: table.pages() as u64,
            free_pages: table.free_pages() as u64,
            resident_users: users as u64,
            resident_tokens: tokens,
            tokens_from_pool: counters.from_pool.get(),
            tokens_from_store: counters.from_store.get(),
            tokens_new: counters.new.get(),
            evicted_users: counters.evicted.get(),
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
            && let Err(error) = self.inner.offload(Users::All)
        {
            log::warn!("a cache was closed and not all of it could be stored: {error}");
        }
        // What is being read keeps the store open, and whoever drops the cache may want to open it again.
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
    fn key(&self, user: u64) -> Key {
        Key { space: self.space, user }
    }

    fn found(&self, user: u64) -> Option<Found> {
        self.store.as_ref()?.find(self.key(user))
    }

    fn layer(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.pool.layer(layer).ok_or_else(|| self.no_layer(layer))
    }

    fn no_layer(&self, layer: u32) -> Error {
        Error::invalid("layer", format!("{layer} is beyond the {} layers of this cache", self.shape.layers))
    }

    fn lookup(&self, user: u64) -> CachedUser {
        let locked = self.table.lock(user);
        if let Some(entry) = locked.get(user).filter(|entry| entry.tokens > 0 && !entry.failed) {
            let tier = if entry.loading.is_some() { Tier::Store } else { Tier::Resident };
            return CachedUser { start: entry.start, tokens: entry.tokens, tier };
        }
        drop(locked);
        let Some(found) = self.found(user) else { return CachedUser::default() };
        CachedUser { start: found.start, tokens: (found.end - found.start) as u32, tier: Tier::Store }
    }

    /// Removes a user's tokens from a position on from the store.
    fn cut(&self, user: u64, from: u64) -> Result<Option<Ticket>> {
        self.store.as_ref().map(|store| store.cut(self.key(user), from)).transpose()
    }
}

fn busy(user: u64, why: &str) -> Error {
    Error::new(Status::Busy, format!("user {user} {why}"))
}
