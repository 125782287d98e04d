//! Preparing a batch: what each owner needs, then the pages, then the lease.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

use super::fetch::FoundHistory;
use super::fingerprint::extend;
use super::lease::{Held, Hold, KvLease, release};
use super::pages::PageList;
use super::plan::{Cached, Plan, plan};
use super::table::Entry;
use super::{Edited, Inner, KvRequest, busy};
use crate::error::{Error, Result, Status};

/// How often a batch is prepared anew because a history could not be read, before the error is the caller's.
const ATTEMPTS: usize = 4;
/// The same because another thread has changed a history meanwhile, or the store contradicts itself.
const RACES: usize = 10_000;

/// An owner of the batch whose history is in the store.
struct Stored {
    found: FoundHistory,
    /// Which owner of the batch.
    index: usize,
}

/// How long `prepare` waits for what comes from the store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// Until it is in its pages.
    Arrived,
    /// Until a run on the pages' GPU finds it there.
    OnItsWay,
}

/// Prepares a batch. Everything that fails leaves the cache as it was.
pub(super) fn prepare(inner: &Arc<Inner>, batch: &[KvRequest<'_>], until: Until) -> Result<KvLease> {
    check(inner, batch)?;
    let (mut attempts, mut races) = (0, 0);
    loop {
        // Another thread has changed something meanwhile.
        let Some(lease) = try_prepare(inner, batch)? else {
            races += 1;
            if races == RACES {
                let message = "a history of the batch changes all the time, or the store can not read what it lists: try again, \
                               and see the log";
                return Err(Error::new(Status::Busy, message));
            }
            continue;
        };
        if inner.onload_in_background {
            return Ok(lease);
        }
        attempts += 1;
        let waited = if until == Until::OnItsWay { lease.wait_on_its_way() } else { lease.wait(None) };
        match waited {
            Ok(()) => return Ok(lease),
            // The store has dropped what it could not read. The next attempt finds less, once every lease has let go of it.
            Err(error) if attempts == ATTEMPTS => return Err(error),
            Err(_) => drop(lease.wait(None)),
        }
    }
}

fn check(inner: &Inner, batch: &[KvRequest<'_>]) -> Result<()> {
    let mut seen = HashSet::new();
    let mut rows = 0_u64;
    for (index, request) in batch.iter().enumerate() {
        if batch.len() > 1 && !seen.insert(request.owner) {
            let message = format!("owner {} is in the batch twice", request.owner);
            return Err(Error::invalid(format!("requests[{index}].owner"), message));
        }
        rows += u64::from(request.tokens) + u64::from(request.candidates);
        let tokens = u64::from(request.tokens);
        // Positions and lengths are i32 to the operators.
        if tokens > i32::MAX as u64 || request.start.checked_add(tokens).is_none_or(|end| end > i64::MAX as u64) {
            let message = format!("{tokens} tokens from {} on are beyond what a history can have", request.start);
            return Err(Error::invalid(format!("requests[{index}].tokens"), message));
        }
        if !request.items.is_empty() && inner.rules.edited == Edited::Unnoticed {
            let message = "this cache does not look at items: open it with edited = refuse or invalidate";
            return Err(Error::invalid(format!("requests[{index}].items"), message));
        }
    }
    if rows > i32::MAX as u64 {
        return Err(Error::invalid("requests", format!("{rows} rows are more than the {} of one call", i32::MAX)));
    }
    Ok(())
}

/// As [`prepare`]; `None` if something changed meanwhile and it is to be tried again.
fn try_prepare(inner: &Arc<Inner>, batch: &[KvRequest<'_>]) -> Result<Option<KvLease>> {
    let mut owners = HeldOwners { inner, held: Vec::with_capacity(batch.len()) };
    let (mut stored, mut resident) = (Vec::new(), Resident::default());
    for (index, request) in batch.iter().enumerate() {
        let held = hold(inner, request, index, &mut stored, &mut resident).map_err(|error| match error.argument() {
            Some(argument) => error.clone().about(format!("requests[{index}].{argument}")),
            None => error,
        })?;
        let Some(held) = held else { return Ok(None) };
        owners.held.push(held);
    }

    let page_size = inner.shape.page_size;
    let arriving: usize = stored.iter().map(|stored| inner.pages_of(&*stored.found.history)).sum();
    let needed = owners.held.iter().map(|held| held.plan.new_pages(page_size)).sum::<usize>() + arriving;
    let in_all = needed + resident.pages();
    if in_all > inner.table.pages().len() {
        let message = format!(
            "the batch needs {in_all} pages and the cache has {}: prepare fewer owners or tokens at once, or give the cache \
             more pages",
            inner.table.pages().len()
        );
        // The batch itself is at fault here; where other leases leave no room, no argument is.
        return Err(Error::new(Status::Capacity, message).about("requests"));
    }
    let mut pages = Pages { inner, pages: inner.allocate(needed, true)? };

    let mut incoming = Vec::with_capacity(stored.len());
    for Stored { found, index } in stored {
        let held = &mut owners.held[index];
        let mut own = pages.take(inner.pages_of(&*found.history));
        let writes = held.plan.changes();
        let hold = |entry: &mut Entry| if writes { entry.writer = true } else { entry.readers = 1 };
        let Some(arrives) = inner.settle(held.owner, found, &mut own, hold) else {
            inner.table.pages().give(&mut own);
            // The next attempt finds the others in the pool.
            Inner::load(inner, incoming);
            return Ok(None);
        };
        let from = held.plan.dropped_pages as usize;
        held.pages = arrives.pages[from..from + held.plan.cached_pages(page_size)].to_vec();
        held.hold = if writes { Hold::Writes } else { Hold::Reads };
        held.onload = Some(Arc::clone(&arrives.onload));
        incoming.push(arrives);
    }
    for held in &mut owners.held {
        held.new_pages = pages.take(held.plan.new_pages(page_size));
    }
    Inner::load(inner, incoming);
    let owners = std::mem::take(&mut owners.held);
    Ok(Some(KvLease { inner: Arc::clone(inner), owners, tensors: OnceLock::new() }))
}

/// Holds one owner of a batch, or notes that it has to come from the store. `None`: try again.
fn hold(
    inner: &Inner,
    request: &KvRequest<'_>,
    index: usize,
    stored: &mut Vec<Stored>,
    resident: &mut Resident,
) -> Result<Option<Held>> {
    let owner = request.owner;
    let mut locked = inner.table.lock(owner).wait_while(owner, |entry| entry.leaving);
    if let Some(entry) = locked.get(owner) {
        if entry.failed {
            return Err(busy(owner, "could not be read from the store and another lease still holds it: try again"));
        }
        let added = || busy(owner, "is being added to by another lease: try again when it has ended");
        // What the other lease adds may be what this request needs.
        if entry.writer && (entry.tokens == 0 || request.start > entry.cached().end()) {
            return Err(added());
        }
        let plan = plan(entry.cached(), request, inner.rules)?;
        if plan.changes() && entry.writer {
            return Err(added());
        }
        let from = plan.dropped_pages as usize;
        let pages = entry.pages[from..from + plan.cached_pages(inner.shape.page_size)].to_vec();
        let base = base_hash(entry.cached(), plan, inner.shape.page_size);
        let onload = entry.loading.clone();
        resident.add(&entry.pages);
        let hold = if plan.changes() { Hold::Writes } else { Hold::Reads };
        locked.lease(owner, |entry| match hold {
            Hold::Writes => entry.writer = true,
            _ => entry.readers += 1,
        });
        drop(locked);
        return Ok(Some(Held { pages, onload, hold, ..Held::new(inner, request, plan, base) }));
    }
    drop(locked);
    let found = inner.stored_history(owner);
    let cached = found.as_ref().map_or_else(Cached::default, FoundHistory::cached);
    let plan = plan(cached, request, inner.rules)?;
    let mut held = Held::new(inner, request, plan, base_hash(cached, plan, inner.shape.page_size));
    if plan.cached > 0 {
        stored.extend(found.map(|found| Stored { found, index }));
    } else if plan.changes() {
        // Nothing of what is stored can be used.
        let mut locked = inner.table.lock(owner);
        if locked.get(owner).is_some() || !inner.unchanged(owner, found.as_ref().map(|found| &*found.history)) {
            return Ok(None);
        }
        locked.insert(owner, Entry { writer: true, ..Entry::default() });
        // It has no pages in the pool that could be dropped.
        (held.hold, held.plan.dropped_pages) = (Hold::Writes, 0);
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
    fn new(inner: &Inner, request: &KvRequest<'_>, plan: Plan, base: u64) -> Self {
        let mut held = Self {
            owner: request.owner,
            plan,
            candidates: request.candidates,
            hold: Hold::Nothing,
            pages: Vec::new(),
            new_pages: Vec::new(),
            base_hash: base,
            hashes: (Vec::new(), 0),
            onload: None,
        };
        held.hash_new(inner, request.items);
        held
    }

    /// Hashes the new tokens, whose items are the last ones of `items`.
    pub(super) fn hash_new(&mut self, inner: &Inner, items: &[u64]) {
        if inner.rules.edited != Edited::Unnoticed {
            self.hashes = new_hashes(self.base_hash, self.plan, items, inner.shape.page_size);
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

/// Owners that are held until the lease is made. An error before that ends the holds.
struct HeldOwners<'a> {
    inner: &'a Inner,
    held: Vec<Held>,
}

impl Drop for HeldOwners<'_> {
    fn drop(&mut self) {
        release(self.inner, &mut self.held);
    }
}

/// The pages that the owners of a batch have already, each counted once.
#[derive(Default)]
struct Resident {
    own: usize,
    shared: HashSet<u32>,
}

impl Resident {
    fn add(&mut self, pages: &PageList) {
        self.own += pages.own().len();
        self.shared.extend(pages.shared());
    }

    fn pages(&self) -> usize {
        self.own + self.shared.len()
    }
}

/// Pages that have no owner yet.
struct Pages<'a> {
    inner: &'a Inner,
    pages: Vec<u32>,
}

impl Pages<'_> {
    fn take(&mut self, count: usize) -> Vec<u32> {
        match self.pages.len() - count {
            // Most often they are for one owner.
            0 => std::mem::take(&mut self.pages),
            left => self.pages.split_off(left),
        }
    }
}

impl Drop for Pages<'_> {
    fn drop(&mut self) {
        self.inner.table.pages().give(&mut self.pages);
    }
}
