//! Random operations, compared after each one with a model of the cache: a naive map.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pagoda::kv::{CachedOwner, KvRequest, Owner, Owners, Tier, Tiers};
use pagoda::store::{DiskStore, Store};
use pagoda::{Edited, ElementType, KvCache, KvLease, KvOptions, KvSize, Offload, Overlap, Status, StoreOptions};
use pagoda_test_support::{Folder, Random};

use crate::pattern::{Shape, device_id};

/// The default of `PAGODA_KV_SEQUENCES`.
const SEQUENCES: u64 = 600;
const STEPS: usize = 25;
/// The steps of the one long sequence.
const MANY_STEPS: usize = 10_000;
/// The store is reopened after this many sequences, with their leftovers in it.
const REOPEN: u64 = 200;
const USERS: usize = 6;
const SHAPE: Shape = Shape { layers: 2, page_size: 8, row: 4 };

#[test]
fn random_sequences() {
    let folder = Folder::new();
    let mut store = open(&folder);
    let sequences = std::env::var("PAGODA_KV_SEQUENCES").map_or(SEQUENCES, |number| number.parse().expect("a number"));
    for seed in 0..sequences {
        if seed % REOPEN == REOPEN - 1 {
            drop(store);
            store = open(&folder);
        }
        told(seed, || sequence(seed, &store));
    }
}

/// One cache for all of them, with a small pool above a store, so that slow leaks show.
#[test]
fn ten_thousand_steps_of_one_cache() {
    let folder = Folder::new();
    let store = open(&folder);
    // A configuration in which users are evicted to the store automatically.
    let fits = |world: &World| world.has_store && world.options.offload == Offload::OnEviction;
    let mut worlds = (0..).map(|seed| (seed, World::new(&mut Random(seed), seed, &store)));
    let (seed, mut world) = worlds.find(|(_, world)| fits(world)).unwrap();
    let mut random = Random(seed);
    told(seed, || {
        trace(format!("{:?}", world.options));
        for _ in 0..MANY_STEPS {
            world.step(&mut random);
            world.compare();
        }
        let stats = world.cache.stats();
        assert!(stats.evicted_owners > 100 && stats.tokens_from_store > 1000, "{stats:?}: pages have moved");
    });
}

/// Prints the steps of a sequence that fails.
fn told(seed: u64, sequence: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(sequence)) {
        let did = TRACE.take();
        eprintln!("sequence {seed} failed; it did, last:\n{}", did[did.len().saturating_sub(100)..].join("\n"));
        std::panic::resume_unwind(panic);
    }
}

std::thread_local! {
    /// The steps of the current sequence.
    static TRACE: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

fn trace(what: String) {
    TRACE.with_borrow_mut(|trace| trace.push(what));
}

fn open(folder: &Folder) -> Arc<dyn Store> {
    Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap())
}

fn sequence(seed: u64, store: &Arc<dyn Store>) {
    let mut random = Random(seed);
    TRACE.take();
    let mut world = World::new(&mut random, seed, store);
    trace(format!("{:?}, store: {}", world.options, world.has_store));
    for _ in 0..STEPS {
        world.step(&mut random);
        world.compare();
    }
}

/// A user's history: where it begins, its items, and which user has appended each of them.
#[derive(Clone, Debug, Default, PartialEq)]
struct History {
    start: u64,
    items: Vec<u64>,
    authors: Vec<u64>,
}

impl History {
    fn end(&self) -> u64 {
        self.start + self.items.len() as u64
    }

    fn pages(&self) -> usize {
        self.items.len().div_ceil(SHAPE.page_size as usize)
    }

    fn truncate(&mut self, tokens: usize) {
        self.items.truncate(tokens);
        self.authors.truncate(tokens);
    }

    fn token(&self, position: u64) -> (u64, u64) {
        let at = (position - self.start) as usize;
        (self.authors[at], self.items[at])
    }

    fn drop_page(&mut self) {
        let leaving = self.items.len().min(SHAPE.page_size as usize);
        self.items.drain(..leaving);
        self.authors.drain(..leaving);
        self.start += leaving as u64;
    }
}

struct World {
    cache: KvCache,
    options: KvOptions,
    has_store: bool,
    pages: usize,
    resident: BTreeMap<u64, Resident>,
    stored: BTreeMap<u64, History>,
    /// The true history of the user.
    truth: Vec<Vec<u64>>,
    clock: u64,
    lease: Option<Held>,
    /// Pages that were dropped from a history, but are still read by that lease.
    lingering: Vec<PageNumber>,
    /// How many pages there were so far.
    numbered: PageNumber,
}

/// Tells pages apart; not the cache's number.
type PageNumber = u64;

#[derive(Clone, Debug)]
struct Resident {
    history: History,
    stamp: u64,
    pages: Vec<PageNumber>,
}

/// A lease that stays open over other steps, and what it will do.
struct Held {
    lease: KvLease,
    plans: Vec<Plan>,
    pages: usize,
}

#[derive(Clone, Debug)]
struct Plan {
    user: u64,
    /// What the model sees of the cache.
    seen: History,
    new: Vec<u64>,
    /// Whether there is anything to hold.
    holds: bool,
    changes: bool,
    /// Whether the stored part does not fit any more.
    cut: bool,
}

impl Plan {
    fn new_pages(&self) -> usize {
        (self.seen.items.len() + self.new.len()).div_ceil(SHAPE.page_size as usize) - self.seen.pages()
    }
}

impl World {
    fn new(random: &mut Random, seed: u64, store: &Arc<dyn Store>) -> Self {
        let pages = 4 + random.below(12);
        let options = KvOptions {
            device_id: device_id(),
            layers: SHAPE.layers,
            heads: 1,
            head_size: 1,
            page_size: SHAPE.page_size,
            element_type: ElementType::F32,
            size: KvSize::Pages(pages as u32),
            model_version: format!("sequence {seed}"),
            max_history: random.pick(&[0, 0, 20, 32]),
            overlap: random.pick(&[Overlap::Refuse, Overlap::Trim]),
            edited: random.pick(&[Edited::Unnoticed, Edited::Refuse, Edited::Invalidate]),
            offload: random.pick(&[Offload::OnEviction, Offload::AtCommit, Offload::ByHand]),
            onload_in_background: random.once_in(2),
            onload_threads: 1,
            // Eviction skips a user that is being copied in the background, which the naive map does not model.
            ahead_percent: 0,
            ..KvOptions::default()
        };
        let has_store = !random.once_in(4);
        Self {
            cache: KvCache::open(&options, has_store.then(|| Arc::clone(store))).unwrap(),
            options,
            has_store,
            pages,
            resident: BTreeMap::new(),
            stored: BTreeMap::new(),
            truth: vec![Vec::new(); USERS],
            clock: 0,
            lease: None,
            lingering: Vec::new(),
            numbered: 0,
        }
    }

    fn step(&mut self, random: &mut Random) {
        let user = random.below(USERS) as u64;
        match random.below(18) {
            0..=8 => self.prepare(random),
            9 => self.evict(random.pick(&[Tiers::ALL, Tiers::RESIDENT, Tiers::STORE]), user, random.once_in(4)),
            10 => self.offload(user, random.once_in(3)),
            11 => self.prefetch(user),
            12 | 13 => self.end_lease(random),
            14 => self.edit(random, user),
            15 | 16 => self.fork(user, random.below(USERS) as u64, random.pick(&[7, 8, 20, 100])),
            _ => self.lookup(),
        }
    }

    /// Every user's entry, as the map has it.
    fn compare(&self) {
        self.lookup();
        let stats = self.cache.stats();
        assert_eq!(stats.free_pages as usize, self.free(), "free pages");
        let mut references = BTreeMap::new();
        for page in self.resident.values().flat_map(|resident| &resident.pages).chain(&self.lingering) {
            *references.entry(page).or_insert(0) += 1;
        }
        let shared = references.values().filter(|&&owners| owners > 1).count();
        assert_eq!(stats.shared_pages as usize, shared, "shared pages");
        assert_eq!(stats.resident_owners as usize, self.resident.len());
        assert_eq!((stats.failed_offloads, stats.failed_onloads), (0, 0));
    }

    fn lookup(&self) {
        for user in 0..USERS as u64 {
            let mut expected = CachedOwner::default();
            let mut is = |history: &History, tier| {
                expected = CachedOwner { start: history.start, length: history.items.len() as u32, tier }
            };
            match (self.resident.get(&user), self.stored.get(&user)) {
                (Some(resident), _) => is(&resident.history, Tier::Resident),
                (None, Some(stored)) => is(stored, Tier::Store),
                (None, None) => {}
            }
            assert_eq!(self.cache.lookup(Owner::slice(&[user])), [expected], "user {user}");
        }
    }

    /// How many pages no user has, and no lease.
    fn free(&self) -> usize {
        let used: BTreeSet<_> =
            self.resident.values().flat_map(|resident| &resident.pages).chain(&self.lingering).collect();
        self.pages - used.len() - self.lease.as_ref().map_or(0, |held| held.pages)
    }

    fn number_pages(&mut self, count: usize) -> Vec<PageNumber> {
        self.numbered += count as PageNumber;
        (self.numbered - count as PageNumber..self.numbered).collect()
    }

    fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn leased(&self, user: u64) -> Option<&Plan> {
        self.lease.as_ref()?.plans.iter().find(|plan| plan.user == user && plan.holds)
    }

    /// The cached history of a user, in any tier.
    fn cached(&self, user: u64) -> History {
        let resident = self.resident.get(&user).map(|resident| &resident.history);
        resident.or(self.stored.get(&user)).cloned().unwrap_or_default()
    }

    /// Changes the history of a user.
    fn edit(&mut self, random: &mut Random, user: u64) {
        // The cache can not detect it: then the caller must not do it.
        if self.options.edited == Edited::Unnoticed || self.truth[user as usize].is_empty() {
            return;
        }
        let truth = &mut self.truth[user as usize];
        let at = random.below(truth.len());
        trace(format!("edit {user} at {at}"));
        if random.once_in(2) {
            truth[at] = random.bits();
        } else {
            truth.remove(at);
        }
    }

    fn prepare(&mut self, random: &mut Random) {
        let users: BTreeSet<u64> = (0..1 + random.below(3)).map(|_| random.below(USERS) as u64).collect();
        let mut users: Vec<u64> = users.into_iter().collect();
        random.shuffle(&mut users);
        let mut requests = Vec::new();
        for &user in &users {
            let cached = self.cached(user);
            let new = random.pick(&[0, 1, 3, 8, 13, 30, 45]);
            let mut start = cached.end();
            if random.once_in(8) {
                start += random.below(3) as u64;
            } else if random.once_in(4) {
                start = start.saturating_sub(random.below(20) as u64);
            }
            let truth = &mut self.truth[user as usize];
            if self.options.edited != Edited::Unnoticed && random.once_in(3) {
                // The whole history: shorter than the cached one if items were deleted.
                start = start.min(truth.len() as u64);
            }
            while truth.len() < (start + new) as usize {
                truth.push(random.bits());
            }
            let first = match self.options.edited {
                Edited::Unnoticed => (start + new) as usize,
                _ if random.once_in(3) => start as usize,
                _ => random.below(start as usize + 1),
            };
            requests.push((user, start, new as u32, truth[first..(start + new) as usize].to_vec()));
        }
        let batch: Vec<KvRequest<'_>> = requests
            .iter()
            .map(|(user, start, tokens, items)| KvRequest {
                owner: Owner(*user),
                start: *start,
                tokens: *tokens,
                candidates: 1,
                items,
                ..KvRequest::default()
            })
            .collect();
        trace(format!("prepare {batch:?}"));
        let plans = batch.iter().map(|request| self.plan(request)).collect::<Result<Vec<_>, _>>();
        let plans = plans.and_then(|plans| self.allocate(&plans).map(|()| plans));
        let lease = match (self.cache.prepare(&batch), plans) {
            (Ok(lease), Ok(plans)) => (lease, plans),
            (Err(error), Err(expected)) => {
                assert_eq!(error.status(), expected.0, "{error}");
                assert!(
                    error.message().contains(&expected.1),
                    "{error}, but expected: {}\n{batch:?}\n{:?}\n{:?} {:?}",
                    expected.1,
                    self.options,
                    self.resident,
                    self.stored
                );
                return;
            }
            (Ok(_), Err(expected)) => panic!("{batch:?} should have failed: {expected:?}"),
            (Err(error), Ok(plans)) => panic!("{batch:?} should have worked: {error}; {plans:?}"),
        };
        let (lease, plans) = lease;
        lease.wait(None).unwrap();
        for (user, plan) in lease.owners().zip(&plans) {
            assert_eq!(
                (user.owner.0, user.start, user.cached as usize),
                (plan.user, plan.seen.start, plan.seen.items.len())
            );
            assert_eq!(user.tokens as usize, plan.new.len());
        }
        let pages = plans.iter().map(Plan::new_pages).sum();
        let held = Held { lease, plans, pages };
        if self.lease.is_none() && random.once_in(3) {
            self.check_and_append(&held);
            self.lease = Some(held);
            return;
        }
        self.check_and_append(&held);
        self.finish(held, !random.once_in(4));
    }

    fn check_and_append(&self, held: &Held) {
        let plan = |user: u64| held.plans.iter().find(|plan| plan.user == user).unwrap();
        SHAPE.check_shared(&held.lease, |user, position| plan(user).seen.token(position));
        SHAPE.append(&held.lease, |user, position| plan(user).new[(position - plan(user).seen.end()) as usize]);
    }

    fn end_lease(&mut self, random: &mut Random) {
        if let Some(held) = self.lease.take() {
            self.lingering.clear();
            // The earlier history is unchanged.
            let plan = |user: u64| held.plans.iter().find(|plan| plan.user == user).unwrap();
            SHAPE.check_shared(&held.lease, |user, position| plan(user).seen.token(position));
            self.finish(held, random.once_in(2));
        }
    }

    fn finish(&mut self, held: Held, commit: bool) {
        trace(format!("commit: {commit} of {:?}", held.plans.iter().map(|plan| plan.user).collect::<Vec<_>>()));
        if !commit {
            held.lease.abort();
            return;
        }
        let written = held.lease.commit().unwrap();
        for plan in &held.plans {
            let now = self.now();
            if plan.changes {
                let mut history = plan.seen.clone();
                history.items.extend(&plan.new);
                history.authors.resize(history.items.len(), plan.user);
                let before = self
                    .resident
                    .get(&plan.user)
                    .map_or((0, Vec::new()), |resident| (resident.history.start, resident.pages.clone()));
                let mut pages = Vec::new();
                if !plan.seen.items.is_empty() {
                    let from = (plan.seen.start - before.0) as usize / SHAPE.page_size as usize;
                    pages.extend(&before.1[from..from + plan.seen.pages()]);
                }
                let new = self.number_pages(plan.new_pages());
                pages.extend(&new);
                while self.options.max_history > 0 && history.items.len() > self.options.max_history as usize {
                    history.drop_page();
                    pages.remove(0);
                }
                if self.leased(plan.user).is_some() {
                    let left = before.1.into_iter().chain(new).filter(|page| !pages.contains(page));
                    self.lingering.extend(left);
                }
                if history.items.is_empty() {
                    self.resident.remove(&plan.user);
                } else {
                    self.resident.insert(plan.user, Resident { history, stamp: now, pages });
                }
                if plan.cut {
                    self.cut_stored(plan);
                }
            } else if plan.holds
                // Unless another lease has left nothing of it.
                && let Some(resident) = self.resident.get_mut(&plan.user)
            {
                resident.stamp = now;
            }
        }
        if self.options.offload == Offload::AtCommit && self.has_store {
            for plan in held.plans.iter().filter(|plan| plan.changes) {
                if let Some(resident) = self.resident.get(&plan.user) {
                    self.stored.insert(plan.user, resident.history.clone());
                }
            }
            written.wait().unwrap();
        }
    }

    fn cut_stored(&mut self, plan: &Plan) {
        let Some(stored) = self.stored.get_mut(&plan.user) else { return };
        let end = if plan.seen.items.is_empty() { 0 } else { plan.seen.end() };
        let kept = end.saturating_sub(stored.start) as usize;
        if kept == 0 {
            self.stored.remove(&plan.user);
        } else {
            stored.truncate(kept);
        }
    }

    /// The effect of a request, in the simplest form.
    fn plan(&self, request: &KvRequest<'_>) -> Result<Plan, (Status, String)> {
        let user = request.owner.0;
        let cached = self.cached(user);
        let busy = (Status::Busy, "another lease".into());
        if self.leased(user).is_some_and(|plan| plan.changes)
            && (!self.resident.contains_key(&user) || request.start > cached.end())
        {
            return Err(busy);
        }
        let mut seen = cached.clone();
        let mut cut = false;
        if self.options.edited != Edited::Unnoticed {
            let items_start = request.start + u64::from(request.tokens) - request.items.len() as u64;
            for page in 0..seen.pages() {
                let from = seen.start + 8 * page as u64;
                let to = (from + 8).min(seen.end());
                if from < items_start || to > request.start + u64::from(request.tokens) {
                    continue;
                }
                let theirs = &request.items[(from - items_start) as usize..(to - items_start) as usize];
                let ours = &seen.items[(from - seen.start) as usize..(to - seen.start) as usize];
                if theirs != ours {
                    if self.options.edited == Edited::Refuse {
                        return Err((Status::InvalidArgument, format!("items from {from} to {}", to - 1)));
                    }
                    seen.truncate((from - seen.start) as usize);
                    cut = true;
                    break;
                }
            }
            let end = request.start + u64::from(request.tokens);
            if !cut && end < seen.end() {
                // Shorter than before: its last page is dropped too.
                let mut whole = 0;
                while whole + 8 <= end.saturating_sub(seen.start) {
                    whole += 8;
                }
                if self.options.edited == Edited::Refuse {
                    let text = format!("items from {} to {}", seen.start + whole, seen.end() - 1);
                    return Err((Status::InvalidArgument, text));
                }
                seen.truncate(whole as usize);
                cut = true;
            }
        }
        let window = self.options.max_history as usize;
        let end = seen.end();
        let mut new = self.truth[user as usize][request.start as usize..][..request.tokens as usize].to_vec();
        if request.start < end && seen.items.is_empty() {
            (cut, seen.start) = (true, request.start);
        } else if request.start > end {
            if window == 0 || new.len() < window {
                return Err((Status::InvalidArgument, format!("missing tokens from {end} to {}", request.start - 1)));
            }
            cut = !cached.items.is_empty();
            seen = History { start: request.start, ..History::default() };
        } else if request.start < end {
            if self.options.overlap == Overlap::Refuse {
                let text = format!("overlapping tokens from {} to {}", request.start, end - 1);
                return Err((Status::InvalidArgument, text));
            }
            new.drain(..new.len().min((end - request.start) as usize));
        }
        let before = seen.start;
        while window > 0 && seen.items.len() + new.len() > window && !seen.items.is_empty() {
            seen.drop_page();
        }
        let changes = cut || seen.start != before || !new.is_empty();
        if changes && self.leased(user).is_some_and(|plan| plan.changes) {
            return Err(busy);
        }
        Ok(Plan { user, seen, new, holds: changes || !cached.items.is_empty(), changes, cut })
    }

    /// Evicts for a batch, in exact least-recently-used order.
    fn allocate(&mut self, plans: &[Plan]) -> Result<(), (Status, String)> {
        // Those of whose stored history something is seen.
        let arriving: Vec<u64> = plans
            .iter()
            .filter(|plan| !plan.seen.items.is_empty())
            .map(|plan| plan.user)
            .filter(|user| !self.resident.contains_key(user) && self.stored.contains_key(user))
            .collect();
        let needed = plans.iter().map(Plan::new_pages).sum::<usize>()
            + arriving.iter().map(|user| self.stored[user].pages()).sum::<usize>();
        let own = plans.iter().filter_map(|plan| self.resident.get(&plan.user));
        let own = own.flat_map(|resident| &resident.pages).collect::<BTreeSet<_>>().len();
        if needed + own > self.pages {
            return Err((Status::Capacity, format!("needs {} pages and the cache has {}", needed + own, self.pages)));
        }
        let held = |user: &u64| self.leased(*user).is_some() || plans.iter().any(|plan| plan.user == *user);
        let mut idle: Vec<(u64, u64)> = self
            .resident
            .iter()
            .filter(|(user, _)| !held(user))
            .map(|(&user, resident)| (resident.stamp, user))
            .collect();
        idle.sort_unstable();
        let busy = self.resident.iter().filter(|(user, _)| held(user)).flat_map(|(_, resident)| &resident.pages);
        let busy = busy.chain(&self.lingering).collect::<BTreeSet<_>>().len();
        let available = self.pages - busy - self.lease.as_ref().map_or(0, |held| held.pages);
        if needed > available {
            let text = format!("{needed} more pages are needed and {available} are available");
            return Err((Status::Capacity, text));
        }
        for (_, user) in idle {
            if self.free() >= needed {
                break;
            }
            self.leave(user);
        }
        for user in arriving {
            let (stamp, history) = (self.now(), self.stored[&user].clone());
            let pages = self.number_pages(history.pages());
            self.resident.insert(user, Resident { history, stamp, pages });
        }
        Ok(())
    }

    fn leave(&mut self, user: u64) {
        let resident = self.resident.remove(&user).unwrap();
        if self.has_store && self.options.offload != Offload::ByHand {
            self.stored.insert(user, resident.history);
        }
    }

    fn evict(&mut self, tiers: Tiers, user: u64, all: bool) {
        trace(format!("evict {user}, all: {all}, {tiers:?}"));
        let users: Vec<u64> = if all { (0..USERS as u64).collect() } else { vec![user] };
        if !all && self.leased(user).is_some() {
            let error = self.cache.evict(Owners::These(Owner::slice(&users)), tiers).unwrap_err();
            assert_eq!(error.status(), Status::Busy);
            return;
        }
        let mut expected = 0;
        for user in users.iter().copied() {
            if self.leased(user).is_some() {
                continue;
            }
            let stored = tiers.store && self.stored.remove(&user).is_some();
            let resident = tiers.resident && self.resident.contains_key(&user);
            expected += usize::from(stored || resident);
            match (resident, tiers.store) {
                (true, true) => drop(self.resident.remove(&user)),
                (true, false) => self.leave(user),
                (false, _) => {}
            }
        }
        let whom = if all { Owners::All } else { Owners::These(Owner::slice(&users)) };
        assert_eq!(self.cache.evict(whom, tiers).unwrap(), expected);
    }

    fn offload(&mut self, user: u64, all: bool) {
        trace(format!("offload {user}, all: {all}"));
        let users: Vec<u64> = if all { (0..USERS as u64).collect() } else { vec![user] };
        let whom = if all { Owners::All } else { Owners::These(Owner::slice(&users)) };
        if !self.has_store {
            assert_eq!(self.cache.offload(whom).unwrap_err().status(), Status::Unsupported);
            return;
        }
        let mut expected = 0;
        for user in &users {
            let Some(resident) = self.resident.get(user) else { continue };
            let stored = self.stored.get(user);
            // Tokens outside the window are not written.
            let current = stored.is_some_and(|stored| stored.end() == resident.history.end());
            if !current {
                expected += 1;
                self.stored.insert(*user, resident.history.clone());
            }
        }
        assert_eq!(self.cache.offload(whom).unwrap(), expected);
    }

    fn prefetch(&mut self, user: u64) {
        trace(format!("prefetch {user}"));
        let arrives = !self.resident.contains_key(&user) && self.stored.contains_key(&user);
        // Held by a lease on an empty history, or appended to from an empty one.
        let known = self.leased(user).is_some_and(|plan| plan.changes);
        let plan = Plan { user, seen: self.cached(user), new: Vec::new(), holds: false, changes: false, cut: false };
        let expected = usize::from(arrives && !known && self.allocate(&[plan]).is_ok());
        assert_eq!(self.cache.prefetch(Owner::slice(&[user])).unwrap(), expected);
        // Until the onload ends it counts as stored.
        if expected == 1 {
            let request = KvRequest {
                owner: Owner(user),
                start: self.cached(user).end(),
                tokens: 0,
                candidates: 1,
                items: &[],
                ..KvRequest::default()
            };
            let lease = self.cache.prepare(&[request]).unwrap();
            lease.wait(None).unwrap();
            lease.abort();
        }
    }

    /// Another user begins as this one did.
    fn fork(&mut self, from: u64, to: u64, tokens: u32) {
        trace(format!("fork {to} from {tokens} tokens of {from}"));
        let forked = self.cache.fork(Owner(from), Owner(to), tokens);
        let begun = self.leased(to).is_some_and(|plan| plan.changes);
        if from == to || begun || self.resident.contains_key(&to) || self.stored.contains_key(&to) {
            assert_eq!(forked.unwrap_err().status(), Status::InvalidArgument);
            return;
        }
        if !self.resident.contains_key(&from) && self.leased(from).is_none_or(|plan| !plan.changes) {
            let seen = self.cached(from);
            let plan = Plan { user: from, seen, new: Vec::new(), holds: false, changes: false, cut: false };
            if let Err(expected) = self.allocate(&[plan]) {
                assert_eq!(forked.unwrap_err().status(), expected.0);
                return;
            }
        }
        let Some(resident) = self.resident.get(&from) else {
            assert_eq!(forked.unwrap(), 0);
            return;
        };
        let pages = resident.history.items.len().min(tokens as usize) / SHAPE.page_size as usize;
        assert_eq!(forked.unwrap() as usize, pages * SHAPE.page_size as usize);
        if pages == 0 {
            return;
        }
        let (mut history, pages) = (resident.history.clone(), resident.pages[..pages].to_vec());
        history.truncate(pages.len() * SHAPE.page_size as usize);
        let mut truth = self.truth[from as usize].clone();
        truth.resize(history.start as usize, 0);
        truth.extend(&history.items);
        self.truth[to as usize] = truth;
        let stamp = self.now();
        self.resident.get_mut(&from).unwrap().stamp = stamp;
        let stamp = self.now();
        self.resident.insert(to, Resident { history, stamp, pages });
    }
}
