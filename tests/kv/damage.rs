//! Damage in the store, and concurrent changes.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use pagoda::kv::{CachedOwner, KvRequest, Owner, Owners, Tier, Tiers};
use pagoda::store::{DiskStore, Found, History, Key, Record, Room, Space, Store, Ticket};
use pagoda::{Edited, ElementType, Error, KvCache, KvOptions, KvSize, Offload, Result, Status, StoreOptions};
use pagoda_test_support::{Folder, spawn_until_blocked};

use crate::pattern::{Shape, device_id};

const SHAPE: Shape = Shape { layers: 3, page_size: 8, row: 64 };

fn options() -> KvOptions {
    KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 4,
        head_size: 4,
        page_size: SHAPE.page_size,
        element_type: ElementType::F32,
        size: KvSize::Pages(16),
        ..KvOptions::default()
    }
}

fn item(user: u64, position: u64) -> u64 {
    user * 1000 + position
}

fn request(user: u64, start: u64, tokens: u32) -> KvRequest<'static> {
    KvRequest { owner: Owner(user), start, tokens, candidates: 1, items: &[], ..KvRequest::default() }
}

fn add(cache: &KvCache, request: KvRequest<'_>, item: impl Fn(u64, u64) -> u64) {
    let lease = cache.prepare(&[request]).unwrap();
    SHAPE.check(&lease, &item);
    SHAPE.append(&lease, &item);
    let _ = lease.commit().unwrap();
}

/// A cache whose user 1 is in the store, 0..30 in one piece and 30..40 in another, of which a byte is wrong.
fn damaged(folder: &Folder, options: &KvOptions) -> KvCache {
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let cache = KvCache::open(options, Some(Arc::new(store))).unwrap();
    for (start, tokens) in [(0, 30), (30, 10)] {
        let request = request(1, start, tokens);
        let lease = cache.prepare(&[request]).unwrap();
        SHAPE.append(&lease, item);
        let _ = lease.commit().unwrap();
        cache.offload(Owners::All).unwrap();
    }
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    let path = folder.path().join("segment-0000000001.pgd");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    // The last layer of the last record: padding is at most 63 bytes, and a row more.
    let at = file.metadata().unwrap().len() - 200;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    cache
}

#[test]
fn tokens_that_can_not_be_read_count_as_not_cached() {
    let folder = Folder::new();
    let cache = damaged(&folder, &options());
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 40, tier: Tier::Store }]);
    let error = cache.prepare(&[request(2, 0, 5), request(1, 40, 1)]).err().unwrap();
    assert_eq!(error.message(), "The input sequence has missing tokens from 30 to 39 (both inclusive).");
    assert_eq!(cache.stats().failed_onloads, 1);
    assert_eq!(cache.lookup(Owner::slice(&[1, 2]))[1], CachedOwner::default());
    add(&cache, request(1, 30, 12), item);
    add(&cache, request(1, 42, 1), item);
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    assert_eq!(cache.stats().free_pages, 16);
}

#[test]
fn in_the_background_the_lease_reports_damage() {
    let folder = Folder::new();
    let cache = damaged(&folder, &KvOptions { onload_in_background: true, ..options() });
    let lease = cache.prepare(&[request(1, 40, 4)]).unwrap();
    // Rejected if the damage was found by now.
    let other = cache.prepare(&[request(1, 40, 0)]).ok();
    let error = lease.wait(None).unwrap_err();
    assert_eq!(error.status(), Status::Io);
    assert!(error.message().contains("owner 1"), "{error}");
    assert!(lease.wait(Some(2)).is_err() && lease.ready(0).is_err());
    // While a lease holds the damaged history, other leases are rejected.
    assert_eq!(cache.prepare(&[request(1, 40, 0)]).err().unwrap().status(), Status::Busy);
    assert_eq!(lease.commit().err().unwrap().status(), Status::Io);
    drop(other);
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 30, tier: Tier::Store }]);
    let lease = cache.prepare(&[request(1, 30, 0)]).unwrap();
    lease.wait(None).unwrap();
    SHAPE.check(&lease, item);
}

/// A store that signals the test at a call, and waits.
struct Watched {
    store: DiskStore,
    find: Gate,
    history: Gate,
    write: Gate,
    cut: Gate,
    /// The key of the last record written.
    last: Mutex<Option<Key>>,
    /// Whether removals fail.
    cuts_fail: AtomicBool,
    /// Whether the next write panics.
    write_panics: AtomicBool,
}

/// Blocks one caller until the test opens it.
#[derive(Default)]
struct Gate {
    closed: AtomicBool,
    channels: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

impl Gate {
    /// Closes it. The receiver signals a blocked caller; the sender opens it.
    fn close(&self) -> (Receiver<()>, Sender<()>) {
        let (here, arrived) = channel();
        let (open, opened) = channel();
        *self.channels.lock().unwrap() = Some((here, opened));
        self.closed.store(true, Ordering::Release);
        (arrived, open)
    }

    fn pass(&self) {
        if self.closed.swap(false, Ordering::AcqRel) {
            let (here, opened) = self.channels.lock().unwrap().take().unwrap();
            here.send(()).unwrap();
            opened.recv().unwrap();
        }
    }
}

impl Store for Watched {
    fn claim(&self, space: Space) -> bool {
        self.store.claim(space)
    }

    fn release(&self, space: Space) {
        self.store.release(space);
    }

    fn find(&self, key: Key) -> Option<Found> {
        self.find.pass();
        self.store.find(key)
    }

    fn history(&self, key: Key) -> Option<Box<dyn History>> {
        let history = self.store.history(key);
        self.history.pass();
        history
    }

    fn write(&self, record: Record, room: Room) -> Result<Ticket> {
        *self.last.lock().unwrap() = Some(record.key);
        self.write.pass();
        assert!(!self.write_panics.swap(false, Ordering::Relaxed), "a bug in the store");
        self.store.write(record, room)
    }

    fn cut(&self, key: Key, from: u64) -> Result<Ticket> {
        self.cut.pass();
        let ticket = self.store.cut(key, from)?;
        let failed = Error::new(Status::Io, "the disk is full");
        Ok(if self.cuts_fail.load(Ordering::Relaxed) { Ticket::ready(Err(failed)) } else { ticket })
    }

    fn owners(&self, space: Space) -> Vec<Owner> {
        self.store.owners(space)
    }

    fn flush(&self) -> Result<()> {
        self.store.flush()
    }
}

fn watched(folder: &Folder, options: &KvOptions) -> (Arc<Watched>, KvCache) {
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let store = Arc::new(Watched {
        store,
        find: Gate::default(),
        history: Gate::default(),
        write: Gate::default(),
        cut: Gate::default(),
        last: Mutex::new(None),
        cuts_fail: AtomicBool::new(false),
        write_panics: AtomicBool::new(false),
    });
    let cache = KvCache::open(options, Some(store.clone())).unwrap();
    (store, cache)
}

#[test]
fn a_history_that_is_edited_while_it_is_stored_is_not_lost() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &KvOptions { edited: Edited::Invalidate, ..options() });
    let whole: Vec<u64> = (0..40).collect();
    let edited: Vec<u64> = (0..20).map(|item| if item < 16 { item } else { item + 1000 }).collect();
    let with = |start, tokens, items| KvRequest { items, ..request(1, start, tokens) };
    add(&cache, with(0, 40, &whole), item);
    let owners = || Owners::These(Owner::slice(&[1]));
    assert_eq!(cache.offload(owners()).unwrap(), 1);
    std::thread::scope(|scope| {
        // Stopped where all is handed to the store, and before the store is asked whether it has it.
        let (cuts, cut) = store.cut.close();
        let stored = scope.spawn(|| cache.offload(owners()));
        cuts.recv().unwrap();
        let (finds, find) = store.find.close();
        cut.send(()).unwrap();
        finds.recv().unwrap();
        add(&cache, with(16, 4, &edited), item);
        find.send(()).unwrap();
        assert_eq!(stored.join().unwrap().unwrap(), 0);
    });
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 20, tier: Tier::Resident }]);
}

#[test]
fn a_removal_is_reported_only_when_it_is_durable() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 20), item);
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    store.cuts_fail.store(true, Ordering::Relaxed);
    // The first call finds it; the others do not, and it is still on the disk.
    for _ in 0..3 {
        for users in [Owners::These(Owner::slice(&[1])), Owners::All] {
            assert_eq!(cache.evict(users, Tiers::ALL).unwrap_err().status(), Status::Io);
        }
    }
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner::default()]);
    store.cuts_fail.store(false, Ordering::Relaxed);
    assert_eq!(cache.evict(Owners::These(Owner::slice(&[1])), Tiers::ALL).unwrap(), 0);
}

#[test]
fn a_store_that_panics_during_a_commit_leaves_every_owner_evictable() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &KvOptions { offload: Offload::AtCommit, ..options() });
    let lease = cache.prepare(&[request(1, 0, 32), request(2, 0, 32), request(3, 0, 32)]).unwrap();
    SHAPE.append(&lease, item);
    store.write_panics.store(true, Ordering::Relaxed);
    let committed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lease.commit().map(drop)));
    assert!(committed.is_err(), "the first write panics");
    SHAPE.check(&cache.prepare(&[request(1, 32, 0), request(2, 32, 0), request(3, 32, 0)]).unwrap(), item);
    // The 16 pages are those of all three: none of them may be left as one that is being copied.
    drop(cache.prepare(&[request(4, 0, 128)]).unwrap());
    assert_eq!(cache.stats().free_pages, 16);
    SHAPE.check(&cache.prepare(&[request(1, 32, 0), request(2, 32, 0), request(3, 32, 0)]).unwrap(), item);
}

#[test]
fn a_history_that_changes_while_it_is_fetched_is_fetched_again() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 20), item);
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    let (arrived, open) = store.history.close();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| cache.prepare(&[request(1, 20, 1)]).err());
        arrived.recv().unwrap();
        // The history was found, but now the user is removed and gets another history.
        cache.evict(Owners::These(Owner::slice(&[1])), Tiers::ALL).unwrap();
        let other = |user, position| item(user, position) + 500;
        add(&cache, request(1, 0, 20), other);
        cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
        open.send(()).unwrap();
        assert_eq!(late.join().unwrap().map(|error| error.to_string()), None);
        SHAPE.check(&cache.prepare(&[request(1, 20, 0)]).unwrap(), other);
    });
}

#[test]
fn a_slow_fetch_does_not_bring_back_a_removed_history() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 20), item);
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    let (arrived, open) = store.history.close();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| cache.prepare(&[request(1, 20, 1)]).err().unwrap());
        arrived.recv().unwrap();
        cache.evict(Owners::These(Owner::slice(&[1])), Tiers::ALL).unwrap();
        open.send(()).unwrap();
        assert!(late.join().unwrap().message().contains("missing tokens from 0 to 19"));
    });
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner::default()]);
}

#[test]
fn an_edit_waits_for_the_copy_of_the_tokens_that_it_replaces() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &KvOptions { edited: Edited::Invalidate, ..options() });
    let old: Vec<u64> = (0..24).collect();
    let mut new = old.clone();
    new[9] = 99;
    let with = |start: u64, items| KvRequest {
        owner: Owner(1),
        start,
        tokens: 24 - start as u32,
        candidates: 1,
        items,
        ..KvRequest::default()
    };
    let of = |items: &[u64]| {
        let items = items.to_vec();
        move |_: u64, position: u64| items[position as usize]
    };
    add(&cache, with(0, &old), of(&old));
    let (arrived, open) = store.write.close();
    std::thread::scope(|scope| {
        let copying = scope.spawn(|| cache.offload(Owners::All).unwrap());
        arrived.recv().unwrap();
        let editing = spawn_until_blocked(scope, || add(&cache, with(8, &new), of(&new)));
        let early = editing.is_finished();
        open.send(()).unwrap();
        assert!(!early, "the old tokens would be stored as current ones");
        assert_eq!(copying.join().unwrap(), 1);
        editing.join().unwrap();
    });
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    SHAPE.check(&cache.prepare(&[with(24, &new)]).unwrap(), of(&new));
}

#[test]
fn a_user_that_is_being_evicted_is_waited_for() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 20), item);
    let (arrived, open) = store.write.close();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| cache.evict(Owners::These(Owner::slice(&[1])), Tiers::RESIDENT).unwrap());
        arrived.recv().unwrap();
        let back = spawn_until_blocked(scope, || add(&cache, request(1, 20, 1), item));
        let gone = scope.spawn(|| add(&cache, request(2, 0, 20), item));
        gone.join().unwrap();
        let early = back.is_finished();
        open.send(()).unwrap();
        assert!(!early, "it is neither in the pool nor in the store");
        assert_eq!(leaving.join().unwrap(), 1);
        back.join().unwrap();
    });
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 21, tier: Tier::Resident }]);
}

#[test]
fn a_history_that_is_removed_from_the_store_during_an_append_is_written_whole() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 40), item);
    cache.offload(Owners::All).unwrap();
    add(&cache, request(1, 40, 5), item);
    let (arrived, open) = store.write.close();
    std::thread::scope(|scope| {
        let leaving = scope.spawn(|| cache.evict(Owners::All, Tiers::RESIDENT));
        arrived.recv().unwrap();
        // As the store does itself when its files are too large.
        let key = store.last.lock().unwrap().unwrap();
        let _ = store.store.cut(key, 0).unwrap();
        open.send(()).unwrap();
        assert_eq!(leaving.join().unwrap().unwrap(), 1);
    });
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 45, tier: Tier::Store }]);
    SHAPE.check(&cache.prepare(&[request(1, 45, 0)]).unwrap(), item);
}

#[test]
fn a_commit_waits_for_its_own_tokens_whichever_thread_writes_them() {
    let folder = Folder::new();
    let options = KvOptions { offload: Offload::AtCommit, ..options() };
    let (store, cache) = watched(&folder, &options);
    let lease = cache.prepare(&[request(1, 0, 20)]).unwrap();
    SHAPE.append(&lease, item);
    let (arrived, open) = store.write.close();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || lease.commit().unwrap().wait().unwrap());
        arrived.recv().unwrap();
        // Committed, but not stored: the wait must not end yet, and the next append waits too.
        let next = spawn_until_blocked(scope, || {
            let lease = cache.prepare(&[request(1, 20, 5)]).unwrap();
            SHAPE.append(&lease, item);
            lease.commit().unwrap().wait().unwrap();
        });
        let early = (first.is_finished(), next.is_finished());
        open.send(()).unwrap();
        assert_eq!(early, (false, false));
        first.join().unwrap();
        next.join().unwrap();
    });
    assert_eq!(cache.offload(Owners::All).unwrap(), 0, "all of it is stored");
}

#[test]
fn closing_a_cache_stores_its_histories() {
    let folder = Folder::new();
    let (store, cache) = watched(&folder, &options());
    add(&cache, request(1, 0, 20), item);
    drop(cache);
    let cache = KvCache::open(&options(), Some(store)).unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner { start: 0, length: 20, tier: Tier::Store }]);
    SHAPE.check(&cache.prepare(&[request(1, 20, 0)]).unwrap(), item);
}
