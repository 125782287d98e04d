//! Leases: a batch's hold on its users, from `prepare` to `commit`.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::fingerprint::extend;
use super::onload::Onload;
use super::plan::{Cached, Plan, plan};
use super::table::Entry;
use super::{FoundHistory, Inner, Request, busy};
use crate::config::{Edited, Offload};
use crate::error::{Error, Result, Status};
use crate::store::{Room, Ticket};
use crate::tensor::Tensor;

/// How often a batch is prepared anew because a history could not be read, before the error is the caller's.
const ATTEMPTS: usize = 4;

/// A batch's hold on its users: where their histories lie, and room for what is new.
///
/// Ends with [`commit`](Lease::commit) or [`abort`](Lease::abort); dropping it aborts.
pub struct Lease {
    inner: Arc<Inner>,
    users: Vec<Held>,
    tensors: [Arc<Tensor>; 5],
}

/// One user in a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeasedUser {
    /// The user.
    pub user: u64,
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
#[derive(Default)]
#[must_use = "commits need not be waited for, but whoever wants to know whether they are durable must"]
pub struct Written {
    tickets: Vec<Ticket>,
    error: Option<Error>,
}

impl Written {
    /// Waits until what was committed is as durable as the store promises. At once, and with nothing promised, unless
    /// histories go to the store at commit.
    pub fn wait(self) -> Result<()> {
        self.error.map_or(Ok(()), Err)?;
        self.tickets.iter().try_for_each(Ticket::wait)
    }
}

/// What a lease has of one user.
struct Held {
    user: u64,
    plan: Plan,
    candidates: u32,
    hold: Hold,
    /// How many pages the user had before.
    had: usize,
    /// Those that the model sees.
    pages: Vec<u32>,
    new_pages: Vec<u32>,
    /// Hashes at the beginnings of the new pages, and at the end.
    hashes: (Vec<u64>, u64),
    onload: Option<Arc<Onload>>,
}

/// In which way the table knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hold {
    /// Not: there is nothing to hold.
    Nothing,
    Reads,
    Writes,
}

/// A user of the batch whose history is still in the store.
struct Stored {
    found: FoundHistory,
    /// Which user of the batch.
    index: usize,
}

/// Prepares a batch. Everything that fails leaves the cache as it was.
pub(super) fn prepare(inner: &Arc<Inner>, batch: &[Request<'_>]) -> Result<Lease> {
    check(inner, batch)?;
    let mut attempts = 0;
    loop {
        let Some(lease) = try_prepare(inner, batch)? else { continue };
        if inner.onload_in_background {
            return Ok(lease);
        }
        attempts += 1;
        match lease.wait() {
            Ok(()) => return Ok(lease),
            // The store has dropped what it could not read: without it, things look different.
            Err(error) if attempts == ATTEMPTS => return Err(error),
            Err(_) => {}
        }
    }
}

fn check(inner: &Inner, batch: &[Request<'_>]) -> Result<()> {
    let mut seen = HashSet::with_capacity(batch.len());
    let mut rows = 0_u64;
    for (index, request) in batch.iter().enumerate() {
        if !seen.insert(request.user) {
            let message = format!("user {} is in the batch twice", request.user);
            return Err(Error::invalid(format!("batch[{index}].user"), message));
        }
        rows += u64::from(request.tokens) + u64::from(request.candidates);
        let tokens = u64::from(request.tokens);
        // Positions and lengths are i32 to the operators.
        if tokens > i32::MAX as u64 || request.start.checked_add(tokens).is_none_or(|end| end > i64::MAX as u64) {
            let message = format!("{tokens} tokens from {} on are beyond what a history can have", request.start);
            return Err(Error::invalid(format!("batch[{index}].tokens"), message));
        }
        if !request.items.is_empty() && inner.rules.edited == Edited::Unnoticed {
            let message = "this cache does not look at items: open it with edited = refuse or invalidate";
            return Err(Error::invalid(format!("batch[{index}].items"), message));
        }
    }
    if rows > i32::MAX as u64 {
        return Err(Error::invalid("batch", format!("{rows} rows are more than the {} of one call", i32::MAX)));
    }
    Ok(())
}

/// As [`prepare`]; `None` if something changed meanwhile and it is to be tried again.
fn try_prepare(inner: &Arc<Inner>, batch: &[Request<'_>]) -> Result<Option<Lease>> {
    let mut users = Users { inner, held: Vec::with_capacity(batch.len()) };
    let mut stored = Vec::new();
    for (index, request) in batch.iter().enumerate() {
        let held = hold(inner, request, index, &mut stored).map_err(|error| match error.argument() {
            Some(argument) => error.clone().about(format!("batch[{index}].{argument}")),
            None => error,
        })?;
        let Some(held) = held else { return Ok(None) };
        users.held.push(held);
    }

    let page_size = inner.shape.page_size;
    let arriving: usize = stored.iter().map(|stored| inner.pages_of(&*stored.found.history)).sum();
    let needed = users.held.iter().map(|held| held.plan.new_pages(page_size)).sum::<usize>() + arriving;
    let in_all = needed + users.held.iter().map(|held| held.had).sum::<usize>();
    if in_all > inner.table.pages() {
        let message = format!(
            "the batch needs {in_all} pages and the cache has {}: prepare fewer users or tokens at once, or give the cache \
             more pages",
            inner.table.pages()
        );
        return Err(Error::new(Status::Capacity, message));
    }
    let mut pages = Pages { inner, pages: inner.allocate(needed)? };

    let mut incoming = Vec::with_capacity(stored.len());
    for Stored { found, index } in stored {
        let held = &mut users.held[index];
        let mut own = pages.take(inner.pages_of(&*found.history));
        let writes = held.plan.changes();
        let hold = |entry: &mut Entry| if writes { entry.writer = true } else { entry.readers = 1 };
        let Some(arrives) = inner.settle(held.user, found, &mut own, hold) else {
            inner.table.give_pages(&mut own);
            // The others are in the pool by the time of the next attempt.
            Inner::load(inner, incoming);
            return Ok(None);
        };
        let from = held.plan.dropped_pages as usize;
        held.pages = arrives.pages[from..from + held.plan.cached_pages(page_size)].to_vec();
        held.hold = if writes { Hold::Writes } else { Hold::Reads };
        held.onload = Some(Arc::clone(&arrives.onload));
        incoming.push(arrives);
    }
    let counters = &inner.counters;
    for held in &mut users.held {
        held.new_pages = pages.take(held.plan.new_pages(page_size));
        let from = if held.onload.is_some() { &counters.from_store } else { &counters.from_pool };
        from.fetch_add(held.plan.cached.into(), Ordering::Relaxed);
        counters.new.fetch_add(held.plan.tokens.into(), Ordering::Relaxed);
    }
    Inner::load(inner, incoming);
    let tensors = tensors(&users.held)?;
    let users = std::mem::take(&mut users.held);
    Ok(Some(Lease { inner: Arc::clone(inner), users, tensors }))
}

/// Holds one user of a batch, or notes that it has to come from the store. `None`: try again.
fn hold(inner: &Inner, request: &Request<'_>, index: usize, stored: &mut Vec<Stored>) -> Result<Option<Held>> {
    let user = request.user;
    let mut locked = inner.table.lock(user).wait_while(user, |entry| entry.leaving);
    if let Some(entry) = locked.get(user) {
        if entry.failed {
            return Err(busy(user, "could not be read from the store and another lease still holds it: try again"));
        }
        let plan = plan(entry.cached(), request, inner.rules)?;
        if plan.changes() && entry.writer {
            return Err(busy(user, "is being added to by another lease: try again when it has ended"));
        }
        let from = plan.dropped_pages as usize;
        let pages = entry.pages[from..from + plan.cached_pages(inner.shape.page_size)].to_vec();
        let base = base_hash(entry.cached(), plan, inner.shape.page_size);
        let (onload, had) = (entry.loading.clone(), entry.pages.len());
        let hold = if plan.changes() { Hold::Writes } else { Hold::Reads };
        locked.change(user, |entry| match hold {
            Hold::Writes => entry.writer = true,
            _ => entry.readers += 1,
        });
        drop(locked);
        return Ok(Some(Held { pages, had, onload, hold, ..Held::new(inner, request, plan, base) }));
    }
    drop(locked);
    if let Some(FoundHistory { history, hashes, end_hash }) = inner.stored_history(user)? {
        let tokens = u32::try_from(history.end() - history.start()).unwrap_or(u32::MAX);
        let cached = Cached { start: history.start(), tokens, hashes: &hashes, end_hash };
        let plan = plan(cached, request, inner.rules)?;
        let held = Held::new(inner, request, plan, base_hash(cached, plan, inner.shape.page_size));
        stored.push(Stored { found: FoundHistory { history, hashes, end_hash }, index });
        return Ok(Some(held));
    }
    let plan = plan(Cached::default(), request, inner.rules)?;
    let mut held = Held::new(inner, request, plan, 0);
    if plan.changes() {
        let mut locked = inner.table.lock(user);
        if locked.get(user).is_some() || inner.found(user).is_some() {
            return Ok(None);
        }
        locked.insert(user, Entry { writer: true, stamp: inner.table.now(), ..Entry::default() });
        held.hold = Hold::Writes;
    }
    Ok(Some(held))
}

/// The hash of the history before the new tokens. Where a history begins it may be any number: items are compared from
/// there on.
fn base_hash(cached: Cached<'_>, plan: Plan, page_size: u32) -> u64 {
    match (plan.cached, plan.cut) {
        (0, _) => 0,
        (_, false) => cached.end_hash,
        // Cut where a page begins.
        (_, true) => {
            let kept = plan.start + u64::from(plan.cached) - cached.start;
            cached.hashes[(kept / u64::from(page_size)) as usize]
        }
    }
}

impl Held {
    fn new(inner: &Inner, request: &Request<'_>, plan: Plan, base: u64) -> Self {
        let hashes = match inner.rules.edited {
            Edited::Unnoticed => (Vec::new(), 0),
            _ => new_hashes(base, plan, request.items, inner.shape.page_size),
        };
        Self {
            user: request.user,
            plan,
            candidates: request.candidates,
            hold: Hold::Nothing,
            had: 0,
            pages: Vec::new(),
            new_pages: Vec::new(),
            hashes,
            onload: None,
        }
    }
}

/// The hashes at the beginnings of new pages, and at the end.
fn new_hashes(base: u64, plan: Plan, items: &[u64], page_size: u32) -> (Vec<u64>, u64) {
    let mut items = &items[items.len() - plan.tokens as usize..];
    let (mut hash, mut hashes) = (base, Vec::new());
    let mut room = (page_size - plan.cached % page_size) % page_size;
    loop {
        let (now, later) = items.split_at((room as usize).min(items.len()));
        hash = extend(hash, now);
        if later.is_empty() {
            return (hashes, hash);
        }
        hashes.push(hash);
        (items, room) = (later, page_size);
    }
}

/// The index tensors of a batch, in the order of [`Lease`]'s accessors.
fn tensors(users: &[Held]) -> Result<[Arc<Tensor>; 5]> {
    let count = users.len();
    let pages = users.iter().map(|held| held.pages.len() + held.new_pages.len()).sum();
    let (mut row_offsets, mut page_indptr) = (Vec::with_capacity(count + 1), Vec::with_capacity(count + 1));
    let (mut rows, mut page_ids) = (0_i32, Vec::with_capacity(pages));
    row_offsets.push(0);
    page_indptr.push(0);
    for held in users {
        rows += (held.plan.tokens + held.candidates) as i32;
        row_offsets.push(rows);
        page_ids.extend(held.pages.iter().chain(&held.new_pages).map(|&page| page as i32));
        page_indptr.push(page_ids.len() as i32);
    }
    let candidates: Vec<i32> = users.iter().map(|held| held.candidates as i32).collect();
    let cached: Vec<i32> = users.iter().map(|held| held.plan.cached as i32).collect();
    let tensor = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values).map(Arc::new);
    Ok([tensor(&row_offsets)?, tensor(&candidates)?, tensor(&cached)?, tensor(&page_indptr)?, tensor(&page_ids)?])
}

impl Lease {
    /// Where each user's rows begin: i32 `[users + 1]`.
    pub fn row_offsets(&self) -> &Arc<Tensor> {
        &self.tensors[0]
    }

    /// How many candidates each user has: i32 `[users]`.
    pub fn num_candidates(&self) -> &Arc<Tensor> {
        &self.tensors[1]
    }

    /// How many tokens of each user are cached: i32 `[users]`.
    pub fn cached_len(&self) -> &Arc<Tensor> {
        &self.tensors[2]
    }

    /// Where each user's list of pages begins: i32 `[users + 1]`.
    pub fn page_indptr(&self) -> &Arc<Tensor> {
        &self.tensors[3]
    }

    /// Each user's pages in order of position: i32.
    pub fn page_ids(&self) -> &Arc<Tensor> {
        &self.tensors[4]
    }

    /// The pool of one layer, to be bound as an input and an output.
    pub fn pool(&self, layer: u32) -> Result<&Arc<Tensor>> {
        self.inner.layer(layer)
    }

    /// What the lease has of each user, in the order of the batch.
    pub fn users(&self) -> impl ExactSizeIterator<Item = LeasedUser> + '_ {
        self.users.iter().map(|&Held { user, plan, .. }| LeasedUser {
            user,
            start: plan.start,
            cached: plan.cached,
            tokens: plan.tokens,
            trimmed: plan.trimmed,
        })
    }

    /// Whether a layer of every user has arrived from the store. An error means that something could not be read: the
    /// lease is of no use, and the next one will find less in the cache.
    pub fn layer_ready(&self, layer: u32) -> Result<bool> {
        self.inner.layer(layer)?;
        for onload in self.onloads() {
            if !onload.ready(layer)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Waits until a layer of every user has arrived from the store; errors as [`layer_ready`](Self::layer_ready).
    pub fn wait_layer(&self, layer: u32) -> Result<()> {
        self.inner.layer(layer)?;
        self.onloads().try_for_each(|onload| onload.wait(layer))
    }

    /// Waits until everything has arrived from the store; errors as [`layer_ready`](Self::layer_ready).
    pub fn wait(&self) -> Result<()> {
        // Of all, also after an error: nothing of a lease that ends is on its way any more.
        let results: Vec<_> = self.onloads().map(Onload::wait_all).collect();
        results.into_iter().collect()
    }

    /// Makes the new tokens part of their histories: the model has appended them. What goes to the store at commit is on
    /// its way when this returns; [`Written::wait`] waits for it.
    ///
    /// Fails, and is an abort, if something could not be read from the store.
    pub fn commit(mut self) -> Result<Written> {
        self.wait()?;
        let mut written = Written::default();
        let users = std::mem::take(&mut self.users);
        let changed: Vec<u64> = users.iter().filter(|held| held.plan.changes()).map(|held| held.user).collect();
        for held in users {
            commit(&self.inner, held);
        }
        if self.inner.offload == Offload::AtCommit && self.inner.store.is_some() {
            for user in changed {
                match self.inner.save(user, Room::OrRefuse) {
                    Ok(tickets) => written.tickets.extend(tickets),
                    // What is not stored now is stored with a later commit, or when the user is evicted.
                    Err(error) => {
                        self.inner.counters.failed_offloads.fetch_add(1, Ordering::Relaxed);
                        written.error = Some(error);
                    }
                }
            }
        }
        Ok(written)
    }

    /// Leaves everything as it was before.
    pub fn abort(self) {}

    fn onloads(&self) -> impl Iterator<Item = &Onload> {
        self.users.iter().filter_map(|held| held.onload.as_deref())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        release(&self.inner, &mut self.users);
    }
}

/// Makes what one user brought part of its history, and lets go of it.
fn commit(inner: &Inner, mut held: Held) {
    let Held { user, plan, .. } = held;
    if held.hold == Hold::Nothing {
        return;
    }
    let now = inner.table.now();
    let mut locked = inner.table.lock(user);
    if plan.cut {
        // Whoever copies the old tokens must be done before the store hears that they are gone.
        locked = locked.wait_while(user, |entry| entry.copying);
        let from = if plan.cached == 0 { 0 } else { plan.start + u64::from(plan.cached) };
        if let Err(error) = inner.cut(user, from) {
            log::warn!("user {user}: what was edited can not be removed from the store: {error}");
        }
    }
    locked.change(user, |entry| {
        entry.stamp = now;
        if held.hold == Hold::Reads {
            entry.readers -= 1;
            return;
        }
        entry.writer = false;
        let (from, kept) = (plan.dropped_pages as usize, held.pages.len());
        let mut pages = std::mem::take(&mut entry.pages);
        entry.dropped.extend(pages.drain(from + kept..));
        entry.dropped.extend(pages.drain(..from));
        pages.reserve_exact(held.new_pages.len());
        pages.append(&mut held.new_pages);
        if !entry.hashes.is_empty() {
            entry.hashes.truncate(from + kept);
            entry.hashes.drain(..from);
        }
        entry.hashes.extend(&held.hashes.0);
        entry.end_hash = held.hashes.1;
        // New tokens that are more than the window.
        let after = plan.dropped_after as usize;
        entry.dropped.extend(pages.drain(..after));
        entry.hashes.drain(..after.min(entry.hashes.len()));
        let gone = plan.dropped_after * inner.shape.page_size;
        entry.start = plan.start + u64::from(gone);
        entry.tokens = plan.cached + plan.tokens - gone;
        entry.pages = pages;
    });
}

/// Lets go of users and of the pages that were meant for them.
fn release(inner: &Inner, users: &mut Vec<Held>) {
    for mut held in users.drain(..) {
        inner.table.give_pages(&mut held.new_pages);
        match held.hold {
            Hold::Nothing => {}
            Hold::Reads => inner.table.lock(held.user).change(held.user, |entry| entry.readers -= 1),
            Hold::Writes => inner.table.lock(held.user).change(held.user, |entry| entry.writer = false),
        }
    }
}

/// Users that are held until the lease is made; whatever goes wrong before lets go of them.
struct Users<'a> {
    inner: &'a Inner,
    held: Vec<Held>,
}

impl Drop for Users<'_> {
    fn drop(&mut self) {
        release(self.inner, &mut self.held);
    }
}

/// Pages that have no user yet.
struct Pages<'a> {
    inner: &'a Inner,
    pages: Vec<u32>,
}

impl Pages<'_> {
    fn take(&mut self, count: usize) -> Vec<u32> {
        self.pages.split_off(self.pages.len() - count)
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        self.inner.table.give_pages(&mut self.pages);
    }
}
