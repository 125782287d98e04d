//! Who is resident: users, their pages, and who was used least recently.
//!
//! Users are spread over shards with a lock each, held for a few instructions at a time and never two at once. The pages
//! that no one has are under a lock of their own.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::onload::Onload;
use super::plan::Cached;
use crate::sync::{Condvar, Mutex, MutexGuard};

const SHARDS: usize = 64;
/// The stamp of a shard in which no one can be evicted.
const NEVER: u64 = u64::MAX;

/// One resident user.
#[derive(Default)]
pub(super) struct Entry {
    /// The position of the first token.
    pub(super) start: u64,
    pub(super) tokens: u32,
    /// The pages in order of position.
    pub(super) pages: Vec<u32>,
    /// The hash of the history before each page, if histories are hashed.
    pub(super) hashes: Vec<u64>,
    /// The hash of the whole history.
    pub(super) end_hash: u64,
    /// When the user was last used.
    pub(super) stamp: u64,
    /// Leases that only read.
    pub(super) readers: u32,
    /// Whether a lease is going to change the history.
    pub(super) writer: bool,
    /// Whether the tokens are being copied to the store: they stay, but no one else copies.
    pub(super) copying: bool,
    /// Whether the user is about to leave: everyone else waits until it is gone.
    pub(super) leaving: bool,
    /// Set while tokens arrive from the store.
    pub(super) loading: Option<Arc<Onload>>,
    /// Whether all of it has been handed to the store, as far as is known: whoever counts on it asks the store.
    pub(super) saved: bool,
    /// Whether they could not be read: the user leaves as soon as no one holds it.
    pub(super) failed: bool,
    /// Pages that have left the history but may still be read by a lease.
    pub(super) dropped: Vec<u32>,
}

impl Entry {
    pub(super) fn cached(&self) -> Cached<'_> {
        Cached { start: self.start, tokens: self.tokens, hashes: &self.hashes, end_hash: self.end_hash }
    }

    /// Whether a lease holds the user.
    pub(super) fn leased(&self) -> bool {
        self.readers > 0 || self.writer
    }

    /// Whether the tokens are on their way from or to somewhere.
    fn moving(&self) -> bool {
        self.copying || self.leaving || self.loading.is_some()
    }

    fn held(&self) -> bool {
        self.leased() || self.moving()
    }
}

/// Every resident user and every page.
pub(super) struct Table {
    shards: Box<[Shard]>,
    free: Mutex<Free>,
    /// Pages were given back.
    given: Condvar,
    pages: usize,
    /// How many pages are to be free, or of users that are saved and could be evicted.
    ahead: usize,
    /// Pages of users that could be evicted now.
    evictable: AtomicUsize,
    /// Those of them whose users are not saved.
    unsaved: AtomicUsize,
    /// Pages of users that could be evicted in a moment: no lease holds them, but they are being moved.
    moving: AtomicUsize,
    /// Pages that someone has taken who needs more.
    collecting: AtomicUsize,
    clock: AtomicU64,
}

/// The pages that no one has.
struct Free {
    pages: Vec<u32>,
    /// Who waits for some: no one is woken where no one does, which would be a call of the system.
    waiting: usize,
}

struct Shard {
    users: Mutex<Users>,
    /// Someone stopped copying or leaving.
    changed: Condvar,
    /// The stamp of the least recently used user who can be evicted, to be looked at without the lock.
    oldest: AtomicU64,
    /// The same of those who are not saved.
    oldest_unsaved: AtomicU64,
}

/// The users of one shard.
#[derive(Default)]
pub(super) struct Users {
    map: HashMap<u64, Entry>,
    /// Those who can be evicted, by when they were used.
    idle: BTreeMap<u64, u64>,
    /// Those of them who are not saved, if anyone saves them ahead.
    unsaved: BTreeMap<u64, u64>,
    /// Who waits for a change; see [`Free::waiting`].
    waiting: usize,
}

/// One shard, locked.
pub(super) struct Locked<'a> {
    table: &'a Table,
    shard: &'a Shard,
    users: MutexGuard<'a, Users>,
}

impl Table {
    /// A table in which `ahead` of the pages are to be had without saving anyone first.
    pub(super) fn new(pages: u32, ahead: u32) -> Self {
        let shard = |_| Shard {
            users: Mutex::default(),
            changed: Condvar::new(),
            oldest: AtomicU64::new(NEVER),
            oldest_unsaved: AtomicU64::new(NEVER),
        };
        Self {
            shards: (0..SHARDS).map(shard).collect(),
            // The last is taken first.
            free: Mutex::new(Free { pages: (0..pages).rev().collect(), waiting: 0 }),
            given: Condvar::new(),
            pages: pages as usize,
            ahead: ahead as usize,
            evictable: AtomicUsize::new(0),
            unsaved: AtomicUsize::new(0),
            moving: AtomicUsize::new(0),
            collecting: AtomicUsize::new(0),
            clock: AtomicU64::new(1),
        }
    }

    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    pub(super) fn free_pages(&self) -> usize {
        self.free_list().pages.len()
    }

    /// Pages that are free or could be made so.
    pub(super) fn available(&self) -> usize {
        self.free_pages() + self.evictable.load(Ordering::Relaxed)
    }

    /// Whether someone should be saved, so that enough pages can be had without.
    pub(super) fn wants_saving(&self) -> bool {
        let unsaved = self.unsaved.load(Ordering::Relaxed);
        unsaved > 0 && self.available() < self.ahead + unsaved
    }

    /// A stamp later than every one before.
    pub(super) fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    /// Moves free pages to `to` until it has `count`, which is true, or there are none left.
    pub(super) fn take_pages(&self, to: &mut Vec<u32>, count: usize) -> bool {
        let mut free = self.free_list();
        let had = to.len();
        let left = free.pages.len().saturating_sub(count - had);
        to.extend(free.pages.drain(left..).rev());
        // Counted while the list is locked: a page is never neither free nor counted.
        if to.len() == count {
            self.collecting.fetch_sub(had, Ordering::Relaxed);
            return true;
        }
        self.collecting.fetch_add(to.len() - had, Ordering::Relaxed);
        false
    }

    /// Gives back what [`Self::take_pages`] took and was not enough. Waits for a moment if all that is needed could come
    /// back from others who are at it; otherwise says no.
    pub(super) fn wait_for_pages(&self, taken: &mut Vec<u32>, count: usize, moment: Duration) -> bool {
        let mut free = self.free_list();
        self.collecting.fetch_sub(taken.len(), Ordering::Relaxed);
        free.give(taken, &self.given);
        let [evictable, moving, collecting] =
            [&self.evictable, &self.moving, &self.collecting].map(|pages| pages.load(Ordering::Relaxed));
        if free.pages.len() + evictable + moving + collecting < count {
            return false;
        }
        free.waiting += 1;
        let _ = self.given.wait_for(&mut free, moment);
        free.waiting -= 1;
        true
    }

    pub(super) fn give_pages(&self, pages: &mut Vec<u32>) {
        if !pages.is_empty() {
            self.free_list().give(pages, &self.given);
        }
    }

    pub(super) fn lock(&self, user: u64) -> Locked<'_> {
        self.lock_shard(&self.shards[shard_of(user)])
    }

    /// Everyone who is resident, in no order.
    pub(super) fn users(&self) -> Vec<u64> {
        self.shards
            .iter()
            .flat_map(|shard| self.lock_shard(shard).users.map.keys().copied().collect::<Vec<_>>())
            .collect()
    }

    /// How many users are resident, and how many tokens they have.
    pub(super) fn count(&self) -> (usize, u64) {
        self.shards.iter().fold((0, 0), |(users, tokens), shard| {
            let locked = self.lock_shard(shard);
            let entries = locked.users.map.values().filter(|entry| entry.tokens > 0);
            entries.fold((users, tokens), |(users, tokens), entry| (users + 1, tokens + u64::from(entry.tokens)))
        })
    }

    /// The least recently used user who can be evicted; it is marked as leaving.
    pub(super) fn least_recent(&self) -> Option<u64> {
        self.first(|shard| &shard.oldest, |users| &users.idle, |entry| entry.leaving = true)
    }

    /// The least recently used user who can be evicted and is not saved; it is marked as copying.
    pub(super) fn least_recent_unsaved(&self) -> Option<u64> {
        self.first(|shard| &shard.oldest_unsaved, |users| &users.unsaved, |entry| entry.copying = true)
    }

    fn first(
        &self,
        oldest: impl Fn(&Shard) -> &AtomicU64,
        order: impl Fn(&Users) -> &BTreeMap<u64, u64>,
        mark: impl Fn(&mut Entry),
    ) -> Option<u64> {
        loop {
            let oldest = |shard: &&Shard| oldest(shard).load(Ordering::Acquire);
            let shard = self.shards.iter().min_by_key(oldest).filter(|shard| oldest(shard) != NEVER)?;
            let mut locked = self.lock_shard(shard);
            // Someone may have been faster.
            let first = order(&locked.users).first_key_value().map(|(_, &user)| user);
            if let Some(user) = first {
                locked.change(user, &mark);
                return Some(user);
            }
        }
    }

    fn lock_shard<'a>(&'a self, shard: &'a Shard) -> Locked<'a> {
        let users = shard.users.lock();
        Locked { table: self, shard, users }
    }

    fn free_list(&self) -> MutexGuard<'_, Free> {
        self.free.lock()
    }
}

impl Free {
    fn give(&mut self, pages: &mut Vec<u32>, given: &Condvar) {
        self.pages.append(pages);
        if self.waiting > 0 {
            given.notify_all();
        }
    }
}

impl Locked<'_> {
    pub(super) fn get(&self, user: u64) -> Option<&Entry> {
        self.users.map.get(&user)
    }

    /// Waits as long as the user is there and `busy`.
    pub(super) fn wait_while(self, user: u64, busy: impl Fn(&Entry) -> bool) -> Self {
        let Self { table, shard, mut users } = self;
        let waiting = |users: &mut Users| users.map.get(&user).is_some_and(&busy);
        users.waiting += 1;
        shard.changed.wait_while(&mut users, waiting);
        users.waiting -= 1;
        Self { table, shard, users }
    }

    /// Adds a user who is not there.
    pub(super) fn insert(&mut self, user: u64, entry: Entry) {
        // Nothing is counted of an entry without pages that someone holds, so that `change` finds the books right.
        let empty = Entry { stamp: entry.stamp, leaving: true, ..Entry::default() };
        let before = self.users.map.insert(user, empty);
        debug_assert!(before.is_none(), "user {user} is there already");
        self.change(user, |empty| *empty = entry);
    }

    /// Changes a user, and with it whether it can be evicted. A user whom no one holds and of whom nothing is left goes,
    /// and its pages with it.
    ///
    /// # Panics
    /// If the user is not there: whoever changes one holds it.
    pub(super) fn change<T>(&mut self, user: u64, change: impl FnOnce(&mut Entry) -> T) -> T {
        let Users { map, idle, unsaved, waiting } = &mut *self.users;
        let entry = map.get_mut(&user).expect("a user that is held is in the table");
        if idle.get(&entry.stamp) == Some(&user) {
            idle.remove(&entry.stamp);
            self.table.evictable.fetch_sub(entry.pages.len(), Ordering::Relaxed);
            if unsaved.remove(&entry.stamp).is_some() {
                self.table.unsaved.fetch_sub(entry.pages.len(), Ordering::Relaxed);
            }
        }
        if entry.moving() && !entry.leased() {
            self.table.moving.fetch_sub(entry.pages.len(), Ordering::Relaxed);
        }
        let result = change(entry);
        if entry.readers == 0 && !entry.moving() {
            // A lease that adds never reads what left before it began.
            self.table.give_pages(&mut entry.dropped);
        }
        if entry.moving() && !entry.leased() {
            self.table.moving.fetch_add(entry.pages.len(), Ordering::Relaxed);
        }
        if !entry.held() {
            if entry.tokens == 0 || entry.failed {
                self.table.give_pages(&mut entry.pages);
                map.remove(&user);
            } else {
                self.table.evictable.fetch_add(entry.pages.len(), Ordering::Relaxed);
                idle.insert(entry.stamp, user);
                if self.table.ahead > 0 && !entry.saved {
                    self.table.unsaved.fetch_add(entry.pages.len(), Ordering::Relaxed);
                    unsaved.insert(entry.stamp, user);
                }
            }
        }
        for (order, oldest) in [(&*idle, &self.shard.oldest), (&*unsaved, &self.shard.oldest_unsaved)] {
            oldest.store(order.first_key_value().map_or(NEVER, |(&stamp, _)| stamp), Ordering::Release);
        }
        if *waiting > 0 {
            self.shard.changed.notify_all();
        }
        result
    }
}

fn shard_of(user: u64) -> usize {
    // The high bits of a product depend on every bit of the user.
    (user.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as usize % SHARDS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident(table: &Table, user: u64, pages: usize) {
        let mut entry = Entry { tokens: 8 * pages as u32, stamp: table.now(), ..Entry::default() };
        table.take_pages(&mut entry.pages, pages);
        table.lock(user).insert(user, entry);
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let table = Table::new(100, 0);
        for user in 0..50 {
            resident(&table, user, 2);
        }
        assert_eq!((table.free_pages(), table.available()), (0, 100));
        // Everyone with an even number is used again.
        for user in (0..50).step_by(2) {
            let now = table.now();
            table.lock(user).change(user, |entry| entry.stamp = now);
        }
        for expected in (1..50).step_by(2).chain((0..50).step_by(2)) {
            assert_eq!(table.least_recent(), Some(expected));
            table.lock(expected).change(expected, |entry| (entry.leaving, entry.tokens) = (false, 0));
        }
        assert_eq!(table.least_recent(), None);
        assert_eq!((table.free_pages(), table.available(), table.count()), (100, 100, (0, 0)));
    }

    #[test]
    fn whoever_is_held_stays() {
        let table = Table::new(10, 0);
        resident(&table, 1, 5);
        table.lock(1).change(1, |entry| entry.readers += 1);
        assert_eq!((table.least_recent(), table.available()), (None, 5));
        table.lock(1).change(1, |entry| entry.dropped = entry.pages.split_off(2));
        assert_eq!(table.available(), 5, "a lease may still read what was dropped");
        table.lock(1).change(1, |entry| entry.readers -= 1);
        assert_eq!((table.free_pages(), table.available()), (8, 10));
    }

    #[test]
    fn enough_are_saved_and_the_least_recently_used_first() {
        let table = Table::new(100, 30);
        for user in 0..40 {
            resident(&table, user, 2);
        }
        // 20 pages are free: 10 more are wanted.
        for expected in 0..5 {
            assert!(table.wants_saving());
            assert_eq!(table.least_recent_unsaved(), Some(expected));
            table.lock(expected).change(expected, |entry| (entry.copying, entry.saved) = (false, true));
        }
        assert!(!table.wants_saving());
        assert_eq!(table.least_recent(), Some(0));
        table.lock(0).change(0, |entry| (entry.leaving, entry.tokens) = (false, 0));
        assert!(!table.wants_saving(), "free pages count as much as those of saved users");
        table.lock(1).change(1, |entry| entry.saved = false);
        assert!(table.wants_saving());
        assert_eq!(table.least_recent_unsaved(), Some(1));
    }
}
