//! The cache of keys and values: each user's history as pages in a pool, the least recently used ones on disk.
//!
//! A [`KvCache`] keeps what a model computed of each user's history. A request asks it to [`prepare`](KvCache::prepare) a
//! batch, runs the model on the index tensors and pools of the [`Lease`] it gets, and [`commit`](Lease::commit)s what the
//! model has appended.

mod fingerprint;
mod lease;
mod offload;
mod onload;
mod plan;
mod pool;
mod table;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use lease::{Lease, LeasedUser, Written};
use onload::{Destination, Incoming, Onload, Readers};
use plan::Rules;
use pool::Pool;
use table::{Entry, Table};

use crate::config::{Edited, KvOptions, Offload, Pages};
use crate::error::{Error, Result, Status};
use crate::store::{Found, History, Key, Store};
use crate::tensor::{ElementType, Tensor};

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

/// What a cache has and what it did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Pages of the pool.
    pub pages: u64,
    /// Those that no one has.
    pub free_pages: u64,
    /// Users in the pool.
    pub resident_users: u64,
    /// Their tokens.
    pub resident_tokens: u64,
    /// Tokens of prepared histories that were in the pool.
    pub tokens_from_pool: u64,
    /// Tokens of prepared histories that came from the store.
    pub tokens_from_store: u64,
    /// Tokens that were new.
    pub tokens_new: u64,
    /// Users that left the pool.
    pub evicted_users: u64,
    /// Users that left the pool, or were committed, and could not be handed to the store.
    pub failed_offloads: u64,
    /// Histories that could not be read from the store.
    pub failed_onloads: u64,
}

/// A cache of keys and values. Any number of threads may use one at the same time.
pub struct KvCache {
    inner: Arc<Inner>,
}

/// The shape of keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) layers: u32,
    pub(crate) heads: u32,
    pub(crate) head_size: u32,
    pub(crate) page_size: u32,
    pub(crate) element: ElementType,
}

impl Shape {
    /// Bytes of the keys, or of the values, of one token in one layer.
    pub(crate) fn row_bytes(&self) -> usize {
        self.heads as usize * self.head_size as usize * self.element.bits() / 8
    }

    /// Bytes of a page in all layers.
    pub(crate) fn page_bytes(&self) -> usize {
        2 * self.layers as usize * self.page_size as usize * self.row_bytes()
    }
}

struct Inner {
    shape: Shape,
    rules: Rules,
    offload: Offload,
    onload_in_background: bool,
    space: u64,
    pool: Pool,
    table: Table,
    store: Option<Arc<dyn Store>>,
    /// There if there is a store.
    readers: Option<Readers>,
    counters: Counters,
}

/// A stored history that can be used.
struct FoundHistory {
    history: Box<dyn History>,
    /// The hash of the history before each page, if histories are hashed.
    hashes: Vec<u64>,
    end_hash: u64,
}

#[derive(Default)]
struct Counters {
    from_pool: AtomicU64,
    from_store: AtomicU64,
    new: AtomicU64,
    evicted: AtomicU64,
    failed_offloads: AtomicU64,
    failed_onloads: AtomicU64,
}

impl KvCache {
    /// Opens a cache, above a store if there is one. Several caches, also of other models, can share a store.
    pub fn open(options: &KvOptions, store: Option<Arc<dyn Store>>) -> Result<Self> {
        let (shape, pages) = check(options)?;
        let rules = Rules {
            page_size: options.page_size,
            max_history: options.max_history,
            overlap: options.overlap,
            edited: options.edited,
        };
        let inner = Inner {
            shape,
            rules,
            offload: options.offload,
            onload_in_background: options.onload_in_background,
            space: space(options),
            pool: Pool::new(shape, pages)?,
            table: Table::new(pages),
            readers: store.as_ref().map(|_| Readers::new(options.onload_threads)).transpose()?,
            store,
            counters: Counters::default(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The pool of one layer, `[pages, 2, page_size, heads, head_size]`: an input and an output of the model, both bound
    /// to it.
    pub fn pool(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.inner.layer(layer)
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
        lease::prepare(&self.inner, batch)
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

    /// Begins to bring histories from the store into the pool and returns at once. Says of how many users. Stops where
    /// there is no more room.
    pub fn prefetch(&self, users: &[u64]) -> Result<usize> {
        let mut incoming = Vec::new();
        for &user in users {
            match self.inner.fetch(user) {
                Ok(found) => incoming.extend(found),
                Err(error) if error.status() == Status::Capacity => break,
                Err(error) => return Err(error),
            }
        }
        let count = incoming.len();
        Inner::load(&self.inner, incoming);
        Ok(count)
    }

    /// Waits until everything that was handed to the store is as durable as it promises.
    pub fn flush(&self) -> Result<()> {
        self.inner.store.as_ref().map_or(Ok(()), |store| store.flush())
    }

    /// What the cache has and what it did since it was opened.
    pub fn stats(&self) -> KvStats {
        let Inner { table, counters, .. } = &*self.inner;
        let (users, tokens) = table.count();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        KvStats {
            pages: table.pages() as u64,
            free_pages: table.free_pages() as u64,
            resident_users: users as u64,
            resident_tokens: tokens,
            tokens_from_pool: read(&counters.from_pool),
            tokens_from_store: read(&counters.from_store),
            tokens_new: read(&counters.new),
            evicted_users: read(&counters.evicted),
            failed_offloads: read(&counters.failed_offloads),
            failed_onloads: read(&counters.failed_onloads),
        }
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // What is being read keeps the store open, and whoever drops the cache may want to open it again.
        if let Some(readers) = &self.inner.readers {
            readers.wait();
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

    /// Takes `count` pages, evicting the least recently used users as far as need be.
    fn allocate(&self, count: usize) -> Result<Vec<u32>> {
        let mut pages = Vec::with_capacity(count);
        loop {
            self.table.take_pages(&mut pages, count);
            if pages.len() == count {
                return Ok(pages);
            }
            // Nothing is evicted for a request that can not be met anyhow.
            if pages.len() + self.table.available() < count || !self.evict_least_recent() {
                self.table.give_pages(&mut pages);
                return Err(Error::new(
                    Status::Capacity,
                    format!(
                        "{count} more pages are needed and {} are available, the rest of the {} are held by live leases: \
                         try again when those have ended, or give the cache more pages",
                        self.table.available(),
                        self.table.pages()
                    ),
                ));
            }
        }
    }

    fn evict_least_recent(&self) -> bool {
        let Some(user) = self.table.least_recent() else { return false };
        self.leave(user);
        true
    }

    /// Sees a user off who is marked as leaving: to the store if the options say so, then out of the pool.
    fn leave(&self, user: u64) {
        if self.offload != Offload::ByHand && self.store.is_some() {
            self.save_leaving(user);
        }
        self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        self.table.lock(user).change(user, |entry| (entry.leaving, entry.tokens) = (false, 0));
    }

    fn evict(&self, users: Users<'_>, tiers: Tiers) -> Result<usize> {
        let everyone;
        let (users, skip_leased) = match users {
            Users::These(users) => {
                for &user in users {
                    self.not_leased(user)?;
                }
                (users, false)
            }
            Users::All => {
                let mut all: HashSet<u64> = self.table.users().into_iter().collect();
                if let Some(store) = self.store.as_ref().filter(|_| tiers.store) {
                    all.extend(store.users(self.space));
                }
                everyone = all.into_iter().collect::<Vec<_>>();
                (&*everyone, true)
            }
        };
        let mut evicted = 0;
        for &user in users {
            match self.evict_user(user, tiers) {
                Ok(had) => evicted += usize::from(had),
                Err(error) if error.status() == Status::Busy && skip_leased => {}
                Err(error) => return Err(error),
            }
        }
        if tiers.store
            && let Some(store) = &self.store
        {
            store.flush()?;
        }
        Ok(evicted)
    }

    fn not_leased(&self, user: u64) -> Result<()> {
        match self.table.lock(user).get(user).filter(|entry| entry.leased()) {
            Some(_) => Err(busy(user, "is held by a live lease: commit or abort it first")),
            None => Ok(()),
        }
    }

    /// Evicts one user; says whether there was anything.
    fn evict_user(&self, user: u64, tiers: Tiers) -> Result<bool> {
        loop {
            let mut locked = self.table.lock(user).wait_while(user, |entry| entry.leaving || entry.copying);
            let stored = tiers.store && self.found(user).is_some();
            let Some(entry) = locked.get(user) else {
                // Under the lock, so that no one brings it into the pool meanwhile.
                return if stored { self.cut(user, 0).map(|()| true) } else { Ok(false) };
            };
            if entry.leased() {
                return Err(busy(user, "is held by a live lease: commit or abort it first"));
            }
            if let Some(onload) = &entry.loading {
                let onload = Arc::clone(onload);
                drop(locked);
                // Whether it went well does not matter to someone who is about to leave.
                let _ = onload.wait_all();
                continue;
            }
            if stored {
                self.cut(user, 0)?;
            }
            if !tiers.resident {
                return Ok(stored);
            }
            if tiers.store {
                self.counters.evicted.fetch_add(1, Ordering::Relaxed);
                locked.change(user, |entry| entry.tokens = 0);
            } else {
                locked.change(user, |entry| entry.leaving = true);
                drop(locked);
                self.leave(user);
            }
            return Ok(true);
        }
    }

    /// Removes a user's tokens from a position on from the store.
    fn cut(&self, user: u64, from: u64) -> Result<()> {
        match &self.store {
            Some(store) => store.cut(self.key(user), from).map(drop),
            None => Ok(()),
        }
    }

    /// A user's stored history, if it can be used.
    fn stored_history(&self, user: u64) -> Result<Option<FoundHistory>> {
        let Some(store) = &self.store else { return Ok(None) };
        // A tag that can not be read takes its piece with it, so there are ever fewer.
        while let Some(history) = store.history(self.key(user)) {
            if self.rules.edited == Edited::Unnoticed {
                return Ok(Some(FoundHistory { history, hashes: Vec::new(), end_hash: 0 }));
            }
            match offload::hashes(&*history, self.shape.page_size) {
                Ok((hashes, end_hash)) => return Ok(Some(FoundHistory { history, hashes, end_hash })),
                Err(error) if error.status() == Status::Io => log::warn!("user {user} in the store: {error}"),
                Err(error) => {
                    log::warn!("user {user} in the store is left out: {error}");
                    self.cut(user, 0)?;
                }
            }
        }
        Ok(None)
    }

    /// Makes room in the pool for a stored history that no one holds; `None` if there is nothing to do.
    fn fetch(&self, user: u64) -> Result<Option<Incoming>> {
        if self.table.lock(user).get(user).is_some() {
            return Ok(None);
        }
        let Some(found) = self.stored_history(user)? else { return Ok(None) };
        let mut pages = self.allocate(self.pages_of(&*found.history))?;
        let incoming = self.settle(user, found, &mut pages, |_| ());
        self.table.give_pages(&mut pages);
        Ok(incoming)
    }

    fn pages_of(&self, history: &dyn History) -> usize {
        (history.end() - history.start()).div_ceil(self.shape.page_size.into()) as usize
    }

    /// Puts a stored history into the table, marked as loading; `None` if someone else was faster or it has changed in
    /// the store. `hold` says who holds it from the beginning.
    fn settle(
        &self,
        user: u64,
        FoundHistory { history, hashes, end_hash }: FoundHistory,
        pages: &mut Vec<u32>,
        hold: impl FnOnce(&mut Entry),
    ) -> Option<Incoming> {
        let mut locked = self.table.lock(user);
        let unchanged = |found: Found| (found.start, &*found.pieces) == (history.start(), history.pieces());
        if locked.get(user).is_some() || !self.found(user).is_some_and(unchanged) {
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
            ..Entry::default()
        };
        hold(&mut entry);
        let pages = entry.pages.clone();
        locked.insert(user, entry);
        Some(Incoming { user, history, pages, onload })
    }

    /// Has histories read that are in the table, marked as loading.
    fn load(inner: &Arc<Self>, incoming: Vec<Incoming>) {
        if incoming.is_empty() {
            return;
        }
        let readers = inner.readers.as_ref().expect("histories come from a store, and with one there are readers");
        let destination: Arc<dyn Destination> = inner.clone();
        readers.start(&destination, incoming, inner.shape.layers);
    }
}

impl Destination for Inner {
    fn arrived(&self, incoming: &Incoming, piece: usize, layer: u32, bytes: &[u8]) {
        let history = &*incoming.history;
        let piece = &history.pieces()[piece];
        // The history may begin inside its first piece.
        let skip = history.start().saturating_sub(piece.start);
        let first = piece.start + skip - history.start();
        let count = u64::from(piece.tokens) - skip;
        // Of a piece that was cut, less counts than is there.
        let held = (bytes.len() / (2 * self.shape.row_bytes()), skip as usize);
        // SAFETY: the user is marked as loading: whoever holds its pages waits for this layer before it reads, and writes
        // to other tokens only.
        unsafe { self.pool.write(layer, &incoming.pages, first as usize, count as usize, bytes, held) };
    }

    fn complete(&self, user: u64, result: Result<()>) {
        if let Err(error) = &result {
            log::warn!("user {user} can not be read from the store and counts as not cached: {error}");
            self.counters.failed_onloads.fetch_add(1, Ordering::Relaxed);
            // What the store could not read it has dropped itself; anything else must not be tried for ever.
            if error.status() != Status::Io
                && let Err(error) = self.cut(user, 0)
            {
                log::warn!("user {user} can not be removed from the store: {error}");
            }
        }
        self.table.lock(user).change(user, |entry| (entry.loading, entry.failed) = (None, result.is_err()));
    }
}

fn busy(user: u64, why: &str) -> Error {
    Error::new(Status::Busy, format!("user {user} {why}"))
}

/// The shape and the number of pages that the options ask for.
fn check(options: &KvOptions) -> Result<(Shape, u32)> {
    let KvOptions { layers, heads, head_size, page_size, element, .. } = *options;
    // More than any model has; the bytes of a page stay countable.
    const MOST: u32 = 1 << 13;
    for (value, name) in [(layers, "layers"), (heads, "heads"), (head_size, "head_size")] {
        if value == 0 || value > MOST {
            return Err(Error::invalid(name, format!("{value} is not between 1 and {MOST}")));
        }
    }
    if page_size == 0 || !page_size.is_multiple_of(8) || page_size > MOST {
        let message = format!("{page_size} is not a multiple of 8 between 8 and {MOST}");
        return Err(Error::invalid("page_size", message));
    }
    if !matches!(element, ElementType::F32 | ElementType::F16 | ElementType::Bf16) {
        return Err(Error::invalid("element", format!("{} is none of f32, f16 and bf16", element.name())));
    }
    if options.onload_threads == 0 || options.onload_threads > 1024 {
        let message = format!("{} is not between 1 and 1024", options.onload_threads);
        return Err(Error::invalid("onload_threads", message));
    }
    let shape = Shape { layers, heads, head_size, page_size, element };
    let pages = match options.pages {
        Pages::Count(count) => u64::from(count),
        Pages::Bytes(bytes) => bytes / shape.page_bytes() as u64,
    };
    // Page numbers are i32 in the index tensors.
    match u32::try_from(pages) {
        Ok(count) if count > 0 && count <= i32::MAX as u32 => Ok((shape, count)),
        _ => Err(Error::invalid(
            "pages",
            format!("{pages} is not between 1 and {} (a page takes {} bytes)", i32::MAX, shape.page_bytes()),
        )),
    }
}

/// The number that stands for a model's version and everything that decides what its stored bytes mean.
fn space(options: &KvOptions) -> u64 {
    let KvOptions { layers, heads, head_size, page_size, element, .. } = *options;
    let hashed = u32::from(options.edited != Edited::Unnoticed);
    let mut bytes = Vec::new();
    for number in [layers, heads, head_size, page_size, element as u32, hashed] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(options.model_version.as_bytes());
    crate::store::checksum(&bytes)
}
