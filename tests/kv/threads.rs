//! Eight threads on one small cache. Every token is checked: each row contains its user and its position.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

use pagoda::kv::{KvRequest, Owner, Owners, Tiers};
use pagoda::store::DiskStore;
use pagoda::{ElementType, KvCache, KvOptions, KvSize, Offload, Overlap, Status, StoreOptions};
use pagoda_test_support::{Folder, Random, times};

use crate::pattern::{Shape, device_id};

const THREADS: u64 = 8;
const USERS: usize = 48;
/// Room for about half of the users.
const PAGES: u32 = 192;
const SHAPE: Shape = Shape { layers: 2, page_size: 8, row: 16 };

/// How often each user was removed from all tiers: the history after a removal differs from the one before. A thread
/// with a lease holds the read lock, so that it does not change meanwhile.
type Lives = [RwLock<u64>; USERS];

fn item(lives: &[RwLockReadGuard<'_, u64>], users: &[u64], user: u64, position: u64) -> u64 {
    let life = users.iter().position(|&other| other == user).map_or(0, |index| *lives[index]);
    life << 48 | user << 32 | position
}

#[test]
fn eight_threads_hammer_one_cache() {
    for (offload, ahead_percent) in [(Offload::OnEviction, 0), (Offload::OnEviction, 60), (Offload::AtCommit, 0)] {
        for max_history in [0, 40] {
            hammer(offload, ahead_percent, max_history);
        }
    }
}

fn hammer(offload: Offload, ahead_percent: u32, max_history: u32) {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let options = KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 2,
        head_size: 2,
        page_size: SHAPE.page_size,
        element_type: ElementType::F32,
        size: KvSize::Pages(PAGES),
        max_history,
        offload,
        ahead_percent,
        overlap: Overlap::Trim,
        ..KvOptions::default()
    };
    let cache = KvCache::open(&options, Some(Arc::new(store))).unwrap();
    let (committed, refused) = (AtomicU64::new(0), AtomicU64::new(0));
    let lives: Lives = std::array::from_fn(|_| RwLock::new(0));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, lives, committed, refused) = (&cache, &lives, &committed, &refused);
            scope.spawn(move || {
                let mut random = Random(thread);
                for _ in 0..times(400, 1500) {
                    step(cache, lives, &mut random, committed, refused);
                }
            });
        }
    });
    let (committed, refused) = (committed.into_inner(), refused.into_inner());
    assert!(committed > refused, "{committed} leases were committed and {refused} refused");

    // All histories are intact, and no page was lost.
    for user in 0..USERS as u64 {
        let cached = cache.lookup(Owner::slice(&[user]))[0];
        let request =
            KvRequest { owner: Owner(user), start: cached.start + u64::from(cached.length), ..KvRequest::default() };
        let life = [lives[user as usize].read().unwrap()];
        SHAPE.check(&cache.prepare(&[request]).unwrap(), |user, position| item(&life, &[user], user, position));
    }
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    let stats = cache.stats();
    assert_eq!((stats.free_pages, stats.resident_owners, stats.failed_onloads), (PAGES.into(), 0, 0), "{stats:?}");
}

fn step(cache: &KvCache, lives: &Lives, random: &mut Random, committed: &AtomicU64, refused: &AtomicU64) {
    let user = random.below(USERS) as u64;
    match random.below(40) {
        0 => match cache.evict(Owners::These(Owner::slice(&[user])), random.pick(&[Tiers::RESIDENT, Tiers::STORE])) {
            Err(error) if error.status() == Status::Busy => {}
            result => drop(result.unwrap()),
        },
        4 => end_life(cache, lives, user),
        1 => {
            if let Err(error) = cache.offload(Owners::These(Owner::slice(&[user]))) {
                // Another thread has removed it from there.
                assert!(error.message().contains("is in the store no more"), "{error}");
            }
        }
        2 => drop(cache.prefetch(Owner::slice(&[user])).unwrap()),
        3 => drop(cache.evict(Owners::All, Tiers::RESIDENT).unwrap()),
        _ => {
            let users = [user, (user + 1 + random.below(USERS - 1) as u64) % USERS as u64];
            // In order, so that two threads can not deadlock.
            let mut order = users;
            order.sort_unstable();
            let guards = order.map(|user| lives[user as usize].read().unwrap());
            let item = |user, position| item(&guards, &order, user, position);
            let cached = cache.lookup(Owner::slice(&users));
            let batch = [0, 1].map(|index| {
                let end = cached[index].start + u64::from(cached[index].length);
                // A long history starts again, so that pages keep moving.
                let tokens = if end > 100 { 0 } else { random.below(20) as u32 };
                KvRequest {
                    owner: Owner(users[index]),
                    start: end,
                    tokens,
                    candidates: 1,
                    items: &[],
                    ..KvRequest::default()
                }
            });
            match cache.prepare(&batch[..1 + random.below(2)]) {
                Ok(lease) => {
                    SHAPE.check(&lease, item);
                    SHAPE.append(&lease, item);
                    if random.once_in(5) {
                        lease.abort();
                    } else {
                        let _ = lease.commit().unwrap();
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Err(error) => {
                    // Another thread holds a user or the pages, or has changed a history since the lookup.
                    let expected = [Status::Busy, Status::Capacity, Status::InvalidArgument].contains(&error.status());
                    assert!(expected, "{error}");
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            let long = cached[0].start + u64::from(cached[0].length) > 100;
            drop(guards);
            if long {
                end_life(cache, lives, user);
            }
        }
    }
}

/// Removes a user from all tiers. What is appended afterwards belongs to the next life.
fn end_life(cache: &KvCache, lives: &Lives, user: u64) {
    if let Ok(mut life) = lives[user as usize].try_write() {
        cache.evict(Owners::These(Owner::slice(&[user])), Tiers::ALL).unwrap();
        *life += 1;
    }
}
