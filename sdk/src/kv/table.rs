//! Which owners are resident: their pages, and the order in which they are evicted.
//!
//! Owners are spread over shards, each with a lock. A thread holds one shard lock at a time. Inside it the thread may take the
//! allocator's lock and call the store, never the other way round.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::eviction_policy::{EvictionPolicy, Usage};
use super::onload::Onload;
use super::pages::{PageAllocator, PageList};
use super::plan::Cached;
use crate::store::Owner;
use crate::sync::{Condvar, Mutex, MutexGuard};

const SHARDS: usize = 64;
/// The eviction key of a shard in which no owner can be evicted.
const NEVER: u64 = u64::MAX;

/// One resident owner.
#[derive(Default)]
pub(super) struct Entry {
    /// The position of the first token.
    pub(super) start: u64,
    pub(super) tokens: u32,
    /// The pages in order of position.
    pub(super) pages: PageList,
    /// The hash of the history before each page, if histories are hashed.
    pub(super) hashes: Vec<u64>,
    /// The hash of the whole history.
    pub(super) end_hash: u64,
    /// The place in the order of eviction: the lowest leaves first.
    pub(super) key: u64,
    /// How many times a part of the history was removed since it is resident.
    pub(super) edits: u32,
    /// How many times the owner was used since it is resident.
    pub(super) uses: u32,
    /// Leases that only read.
    pub(super) readers: u32,
    /// Whether a lease is going to change the history.
    pub(super) writer: bool,
    /// Whether the tokens are being copied to the store. They stay in the pool, and no second copy begins.
    pub(super) copying: bool,
    /// Whether the owner is being evicted. Other threads wait until it is gone.
    pub(super) leaving: bool,
    /// Set while tokens arrive from the store.
    pub(super) loading: Option<Arc<Onload>>,
    /// Whether all of it was handed to the store. The store may have lost it since: ask it before relying on this.
    pub(super) saved: bool,
    /// Whether the tokens could not be read from the store. The entry is removed when the last lease lets go of it.
    pub(super) failed: bool,
    /// Pages that have left the history but that a lease may still read.
    pub(super) dropped: Vec<u32>,
}

impl Entry {
    pub(super) fn cached(&self) -> Cached<'_> {
        Cached { start: self.start, tokens: self.tokens, hashes: &self.hashes, end_hash: self.end_hash }
    }

    /// Whether a lease holds the owner.
    pub(super) fn leased(&self) -> bool {
        self.readers > 0 || self.writer
    }

    /// Whether the tokens are being moved from or to the store.
    fn moving(&self) -> bool {
        self.copying || self.leaving || self.loading.is_some()
    }

    /// How many of its pages count as moving: those of an owner with a lease do not.
    fn moving_pages(&self) -> usize {
        if self.moving() && !self.leased() { self.pages.len() } else { 0 }
    }

    /// Whether the owner can not be evicted now.
    fn busy(&self) -> bool {
        self.leased() || self.moving()
    }
}

/// Every resident owner and every page.
pub(super) struct Table {
    shards: Box<[Shard]>,
    pages: PageAllocator,
    policy: Arc<dyn EvictionPolicy>,
    /// How many pages are to be free, or of owners that are saved and idle.
    ahead: usize,
    /// Pages of idle owners that are not saved, without those that may be shared.
    unsaved: AtomicUsize,
    clock: AtomicU64,
}

struct Shard {
    owners: Mutex<Owners>,
    /// An owner stopped copying or leaving.
    changed: Condvar,
    /// The lowest eviction key of an idle owner, to be read without the lock.
    first: AtomicU64,
    /// The same of idle owners that are not saved.
    first_unsaved: AtomicU64,
}

/// The owners of one shard.
#[derive(Default)]
pub(super) struct Owners {
    map: HashMap<Owner, Entry>,
    /// Those that can be evicted, in the order of eviction.
    idle: BTreeSet<(u64, Owner)>,
    /// Those of them that are not saved, if owners are saved ahead of their eviction.
    unsaved: BTreeSet<(u64, Owner)>,
    /// How many threads wait for a change: none is woken where none waits, which would be a system call.
    waiting: usize,
}

/// One shard, locked.
pub(super) struct Locked<'a> {
    table: &'a Table,
    shard: &'a Shard,
    owners: MutexGuard<'a, Owners>,
}

impl Table {
    /// A table in which `ahead` of the pages can be had without saving an owner first.
    pub(super) fn new(pages: u32, ahead: u32, policy: Arc<dyn EvictionPolicy>) -> Self {
        let shard = |_| Shard {
            owners: Mutex::default(),
            changed: Condvar::new(),
            first: AtomicU64::new(NEVER),
            first_unsaved: AtomicU64::new(NEVER),
        };
        Self {
            shards: (0..SHARDS).map(shard).collect(),
            pages: PageAllocator::new(pages),
            policy,
            ahead: ahead as usize,
            unsaved: AtomicUsize::new(0),
            clock: AtomicU64::new(1),
        }
    }

    pub(super) fn pages(&self) -> &PageAllocator {
        &self.pages
    }

    /// Whether an owner should be saved, so that enough pages can be had without.
    pub(super) fn wants_saving(&self) -> bool {
        let unsaved = self.unsaved.load(Ordering::Relaxed);
        unsaved > 0 && self.pages.available() < self.ahead + unsaved
    }

    pub(super) fn lock(&self, owner: Owner) -> Locked<'_> {
        self.lock_shard(&self.shards[shard_of(owner)])
    }

    /// Every resident owner, in no order.
    pub(super) fn owners(&self) -> Vec<Owner> {
        self.shards
            .iter()
            .flat_map(|shard| self.lock_shard(shard).owners.map.keys().copied().collect::<Vec<_>>())
            .collect()
    }

    /// How many owners are resident, and how many tokens they have.
    pub(super) fn count(&self) -> (usize, u64) {
        self.shards.iter().fold((0, 0), |(owners, tokens), shard| {
            let locked = self.lock_shard(shard);
            let entries = locked.owners.map.values().filter(|entry| entry.tokens > 0);
            entries.fold((owners, tokens), |(owners, tokens), entry| (owners + 1, tokens + u64::from(entry.tokens)))
        })
    }

    /// The owner to be evicted next; it is marked as leaving.
    pub(super) fn next_victim(&self) -> Option<Owner> {
        let victim = self.first(|shard| &shard.first, |owners| &owners.idle, |entry| entry.leaving = true);
        victim.map(|(key, owner)| {
            self.policy.evicted(key);
            owner
        })
    }

    /// The owner to be evicted next of those that are not saved; it is marked as copying.
    pub(super) fn next_unsaved(&self) -> Option<Owner> {
        self.first(|shard| &shard.first_unsaved, |owners| &owners.unsaved, |entry| entry.copying = true)
            .map(|(_, owner)| owner)
    }

    fn first(
        &self,
        first: impl Fn(&Shard) -> &AtomicU64,
        order: impl Fn(&Owners) -> &BTreeSet<(u64, Owner)>,
        mark: impl Fn(&mut Entry),
    ) -> Option<(u64, Owner)> {
        loop {
            let first = |shard: &&Shard| first(shard).load(Ordering::Acquire);
            let shard = self.shards.iter().min_by_key(first).filter(|shard| first(shard) != NEVER)?;
            let mut locked = self.lock_shard(shard);
            // Another thread may have taken it since.
            if let Some(&found) = order(&locked.owners).first() {
                locked.change(found.1, &mark);
                return Some(found);
            }
        }
    }

    /// The eviction key of an owner that is used now.
    fn key(&self, owner: Owner, entry: &Entry) -> u64 {
        let time = self.clock.fetch_add(1, Ordering::Relaxed);
        let usage = Usage { owner, time, uses: entry.uses, tokens: entry.tokens };
        self.policy.key(&usage).min(NEVER - 1)
    }

    fn lock_shard<'a>(&'a self, shard: &'a Shard) -> Locked<'a> {
        let owners = shard.owners.lock();
        Locked { table: self, shard, owners }
    }
}

impl Locked<'_> {
    pub(super) fn get(&self, owner: Owner) -> Option<&Entry> {
        self.owners.map.get(&owner)
    }

    /// Waits as long as the owner is there and `busy`.
    pub(super) fn wait_while(self, owner: Owner, busy: impl Fn(&Entry) -> bool) -> Self {
        let Self { table, shard, mut owners } = self;
        let waiting = |owners: &mut Owners| owners.map.get(&owner).is_some_and(&busy);
        owners.waiting += 1;
        shard.changed.wait_while(&mut owners, waiting);
        owners.waiting -= 1;
        Self { table, shard, owners }
    }

    /// Adds an owner that is not there, which counts as a use of it.
    pub(super) fn insert(&mut self, owner: Owner, entry: Entry) {
        if entry.leased() && entry.tokens == 0 {
            // Nothing is counted of it. The commit that gives it tokens is a use, too, and gives it an eviction key.
            let before = self.owners.map.insert(owner, Entry { uses: 1, ..entry });
            debug_assert!(before.is_none(), "owner {owner} is there already");
            return;
        }
        // Nothing is counted of a busy entry without pages, so `change` finds the counters right.
        let empty = Entry { leaving: true, ..Entry::default() };
        let before = self.owners.map.insert(owner, empty);
        debug_assert!(before.is_none(), "owner {owner} is there already");
        self.change_used(owner, |empty| *empty = entry);
    }

    /// As [`change`](Self::change); the change is a use of the owner, which decides when it is evicted.
    pub(super) fn change_used<T>(&mut self, owner: Owner, change: impl FnOnce(&mut Entry) -> T) -> T {
        let table = self.table;
        self.change(owner, |entry| {
            let result = change(entry);
            entry.uses = entry.uses.saturating_add(1);
            entry.key = table.key(owner, entry);
            result
        })
    }

    /// Changes an owner, and with it whether it can be evicted. An owner that is idle and of which nothing is left is
    /// removed, and its pages are freed.
    ///
    /// # Panics
    /// If the owner is not there: a thread that changes one holds it.
    pub(super) fn change<T>(&mut self, owner: Owner, change: impl FnOnce(&mut Entry) -> T) -> T {
        self.change_counted(owner, true, change)
    }

    /// As [`change`](Self::change); after the change a lease holds the owner.
    pub(super) fn lease<T>(&mut self, owner: Owner, change: impl FnOnce(&mut Entry) -> T) -> T {
        self.change_counted(owner, false, change)
    }

    /// As [`change`](Self::change). Without `counted`, the pages of an idle owner are in no counter from the beginning of the
    /// change on, as those of an owner with a lease are.
    fn change_counted<T>(&mut self, owner: Owner, counted: bool, change: impl FnOnce(&mut Entry) -> T) -> T {
        let Table { pages, unsaved: unsaved_pages, ahead, .. } = self.table;
        let Owners { map, idle, unsaved, waiting } = &mut *self.owners;
        let entry = map.get_mut(&owner).expect("an owner that is held is in the table");
        let place = (entry.key, owner);
        // Counted as moving all through the change: an allocation must not find the pages in no counter and give up. Pages of
        // an owner with a lease are in no counter before it either.
        let mut moving = entry.moving_pages();
        if !entry.busy() && idle.remove(&place) {
            if counted {
                moving = entry.pages.len();
                pages.begin_moving(moving);
            }
            pages.busy(&entry.pages);
            if unsaved.remove(&place) {
                unsaved_pages.fetch_sub(entry.pages.own().len(), Ordering::Relaxed);
            }
        }
        let result = change(entry);
        debug_assert!(counted || entry.leased(), "owner {owner} has no lease");
        let place = (entry.key, owner);
        let still_moving = entry.moving_pages();
        if entry.readers == 0 && !entry.moving() {
            // A lease that adds never reads what left before it began.
            pages.give(&mut entry.dropped);
        }
        if still_moving > moving {
            pages.begin_moving(still_moving - moving);
        }
        if !entry.busy() {
            if entry.tokens == 0 || entry.failed {
                pages.give_list(&mut entry.pages);
                map.remove(&owner);
            } else {
                pages.idle(&entry.pages);
                idle.insert(place);
                if *ahead > 0 && !entry.saved {
                    unsaved_pages.fetch_add(entry.pages.own().len(), Ordering::Relaxed);
                    unsaved.insert(place);
                }
            }
        }
        if moving > still_moving {
            pages.end_moving(moving - still_moving);
        }
        for (order, first) in [(&*idle, &self.shard.first), (&*unsaved, &self.shard.first_unsaved)] {
            first.store(order.first().map_or(NEVER, |&(key, _)| key), Ordering::Release);
        }
        if *waiting > 0 {
            self.shard.changed.notify_all();
        }
        result
    }
}

fn shard_of(owner: Owner) -> usize {
    // The high bits of a product depend on every bit of the owner.
    (owner.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use super::super::eviction_policy::LeastRecentlyUsed;
    use super::*;

    fn table(pages: u32, ahead: u32) -> Table {
        Table::new(pages, ahead, Arc::new(LeastRecentlyUsed))
    }

    fn resident(table: &Table, owner: Owner, pages: usize) {
        let mut taken = Vec::new();
        assert!(table.pages().take(&mut taken, pages));
        let entry = Entry { tokens: 8 * pages as u32, pages: taken.into(), ..Entry::default() };
        table.lock(owner).insert(owner, entry);
    }

    fn leave(table: &Table, owner: Owner) {
        table.lock(owner).change(owner, |entry| (entry.leaving, entry.tokens) = (false, 0));
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let table = table(100, 0);
        for owner in 0..50 {
            resident(&table, Owner(owner), 2);
        }
        assert_eq!((table.pages().free(), table.pages().available()), (0, 100));
        // Every owner with an even number is used again.
        for owner in (0..50).step_by(2).map(Owner) {
            table.lock(owner).change_used(owner, |_| ());
        }
        for expected in (1..50).step_by(2).chain((0..50).step_by(2)).map(Owner) {
            assert_eq!(table.next_victim(), Some(expected));
            leave(&table, expected);
        }
        assert_eq!(table.next_victim(), None);
        assert_eq!((table.pages().free(), table.pages().available(), table.count()), (100, 100, (0, 0)));
    }

    /// The largest history leaves first.
    #[derive(Debug, Default)]
    struct LargestFirst(Mutex<Vec<u64>>);

    impl EvictionPolicy for LargestFirst {
        fn key(&self, usage: &Usage) -> u64 {
            u64::from(u32::MAX - usage.tokens)
        }

        fn evicted(&self, key: u64) {
            self.0.lock().push(key);
        }
    }

    #[test]
    fn another_policy_decides_who_leaves_first() {
        let policy = Arc::new(LargestFirst::default());
        let table = Table::new(100, 0, policy.clone());
        for (owner, pages) in [(1, 2), (2, 5), (3, 1), (4, 4)] {
            resident(&table, Owner(owner), pages);
        }
        for expected in [2, 4, 1, 3].map(Owner) {
            assert_eq!(table.next_victim(), Some(expected));
            leave(&table, expected);
        }
        assert_eq!(policy.0.lock().len(), 4);
    }

    #[test]
    fn an_owner_that_is_held_stays() {
        let (table, owner) = (table(10, 0), Owner(1));
        resident(&table, owner, 5);
        table.lock(owner).change(owner, |entry| entry.readers += 1);
        assert_eq!((table.next_victim(), table.pages().available()), (None, 5));
        table.lock(owner).change(owner, |entry| entry.pages.truncate(2, &mut entry.dropped));
        assert_eq!(table.pages().available(), 5, "a lease may still read what was dropped");
        table.lock(owner).change(owner, |entry| entry.readers -= 1);
        assert_eq!((table.pages().free(), table.pages().available()), (8, 10));
    }

    #[test]
    fn enough_are_saved_and_the_least_recently_used_first() {
        let table = table(100, 30);
        for owner in 0..40 {
            resident(&table, Owner(owner), 2);
        }
        // 20 pages are free: 10 more are wanted.
        for expected in (0..5).map(Owner) {
            assert!(table.wants_saving());
            assert_eq!(table.next_unsaved(), Some(expected));
            table.lock(expected).change(expected, |entry| (entry.copying, entry.saved) = (false, true));
        }
        assert!(!table.wants_saving());
        assert_eq!(table.next_victim(), Some(Owner(0)));
        leave(&table, Owner(0));
        assert!(!table.wants_saving(), "free pages count as much as those of saved owners");
        table.lock(Owner(1)).change(Owner(1), |entry| entry.saved = false);
        assert!(table.wants_saving());
        assert_eq!(table.next_unsaved(), Some(Owner(1)));
    }
}
