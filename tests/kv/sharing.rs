//! Owners that share pages: what is shared, what counts, and when a page is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pagoda::kv::{KvRequest, Owner, Owners, Tier, Tiers};
use pagoda::store::{DiskStore, Store};
use pagoda::{Edited, ElementType, KvCache, KvOptions, KvSize, Status, StoreOptions};
use pagoda_test_support::{Folder, Random};

use crate::pattern::{Shape, device_id};

const SHAPE: Shape = Shape { layers: 2, page_size: 8, row: 4 };
/// The owner whose tokens the others begin with, and how many these are: five whole pages and a part of a sixth.
const PROMPT: u64 = 1000;
const TOKENS: u32 = 43;
const SHARED: u32 = 40;

fn open(pages: u32, store: Option<Arc<dyn Store>>) -> KvCache {
    let options = KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 1,
        head_size: 1,
        page_size: SHAPE.page_size,
        element_type: ElementType::F32,
        size: KvSize::Pages(pages),
        ..KvOptions::default()
    };
    KvCache::open(&options, store).unwrap()
}

fn request(owner: u64, start: u32, tokens: u32) -> KvRequest<'static> {
    KvRequest { owner: Owner(owner), start: start.into(), tokens, candidates: 1, items: &[], ..KvRequest::default() }
}

/// Which owner has appended a token, and what it is: the first ones are the prompt's.
fn token(owner: u64, position: u64) -> (u64, u64) {
    (if position < SHARED.into() { PROMPT } else { owner }, position)
}

fn add(cache: &KvCache, owner: u64, start: u32, tokens: u32) {
    let lease = cache.prepare(&[request(owner, start, tokens)]).unwrap();
    SHAPE.check_shared(&lease, token);
    SHAPE.append(&lease, |_, position| position);
    let _ = lease.commit().unwrap();
}

fn pages(cache: &KvCache) -> (u64, u64) {
    let stats = cache.stats();
    (stats.pages - stats.free_pages, stats.shared_pages)
}

#[test]
fn many_owners_begin_with_one_prompt() {
    let cache = open(20, None);
    add(&cache, PROMPT, 0, TOKENS);
    assert_eq!(pages(&cache), (6, 0));
    for owner in 1..=6 {
        assert_eq!(cache.fork(Owner(PROMPT), Owner(owner), TOKENS).unwrap(), SHARED, "whole pages alone");
        add(&cache, owner, SHARED, 10);
    }
    assert_eq!(pages(&cache), (5 + 1 + 6 * 2, 5), "five pages are shared by seven");
    // All of them at once: each shared page counts once.
    let batch: Vec<_> =
        (1..=6).map(|owner| request(owner, SHARED + 10, 0)).chain([request(PROMPT, TOKENS, 0)]).collect();
    let lease = cache.prepare(&batch).unwrap();
    SHAPE.check_shared(&lease, token);
    lease.abort();
    // The prompt leaves first; the others go on.
    cache.evict(Owners::These(&[Owner(PROMPT)]), Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (5 + 6 * 2, 5));
    for owner in 1..=5 {
        add(&cache, owner, SHARED + 10, 3);
        cache.evict(Owners::These(&[Owner(owner)]), Tiers::ALL).unwrap();
    }
    assert_eq!(pages(&cache), (5 + 2, 0), "the last one has them to itself");
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (0, 0));
}

#[test]
fn branches_go_on_inside_a_page_and_have_a_copy_of_it() {
    let cache = open(20, None);
    assert_eq!(cache.branch(Owner(PROMPT), Owner(1)).unwrap(), 0, "nothing is cached");
    add(&cache, PROMPT, 0, TOKENS);
    // All tokens of a branch are those of the owner that it came from.
    let of_branch = |owner: u64, position: u64| (if position < TOKENS.into() { PROMPT } else { owner }, position);
    let add = |owner: u64, start: u32, tokens: u32| {
        let lease = cache.prepare(&[request(owner, start, tokens)]).unwrap();
        SHAPE.check_shared(&lease, of_branch);
        SHAPE.append(&lease, |_, position| position);
        let _ = lease.commit().unwrap();
    };
    for owner in 1..=4 {
        assert_eq!(cache.branch(Owner(PROMPT), Owner(owner)).unwrap(), TOKENS);
    }
    assert_eq!(pages(&cache), (5 + 5, 5));
    // They go on in their own pages, and the source in its own.
    for owner in [PROMPT, 1, 2, 3, 4] {
        add(owner, TOKENS, 3);
    }
    for owner in [1, 2, 3, 4, PROMPT] {
        add(owner, TOKENS + 3, 2);
    }
    assert_eq!(pages(&cache), (5 + 5, 5), "48 tokens are six pages");
    // At the end of a page there is nothing to copy.
    assert_eq!(cache.branch(Owner(1), Owner(5)).unwrap(), TOKENS + 5);
    assert_eq!(pages(&cache), (5 + 5, 6));
    let error = cache.branch(Owner(1), Owner(2)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("to")), "{error}");
    cache.evict(Owners::These(&[1, 2, 3, 4, PROMPT].map(Owner)), Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (6, 0));
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (0, 0));
}

#[test]
fn a_branch_without_room_for_a_copy_has_the_whole_pages() {
    let cache = open(6, None);
    add(&cache, PROMPT, 0, TOKENS);
    assert_eq!(cache.branch(Owner(PROMPT), Owner(1)).unwrap(), SHARED);
    assert_eq!((pages(&cache), cache.lookup(&[Owner(1)])[0].length), ((6, 5), SHARED));
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (0, 0));
}

#[test]
fn less_than_a_page_is_not_shared() {
    let cache = open(20, None);
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), 100).unwrap(), 0, "nothing is cached");
    add(&cache, PROMPT, 0, 7);
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), 100).unwrap(), 0);
    add(&cache, PROMPT, 7, 10);
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), 7).unwrap(), 0);
    assert_eq!(cache.lookup(&[Owner(1)])[0].tier, Tier::None);
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), 15).unwrap(), 8);
    assert_eq!(cache.lookup(&[Owner(1)])[0].length, 8);
}

#[test]
fn an_owner_with_a_history_can_not_begin_anew() {
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let cache = open(20, Some(store));
    add(&cache, PROMPT, 0, TOKENS);
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), TOKENS).unwrap(), SHARED);
    for to in [PROMPT, 1] {
        let error = cache.fork(Owner(PROMPT), Owner(to), TOKENS).unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("to")), "{error}");
    }
    cache.evict(Owners::These(&[Owner(1)]), Tiers::RESIDENT).unwrap();
    let error = cache.fork(Owner(PROMPT), Owner(1), TOKENS).unwrap_err();
    assert!(error.message().contains("evict it first"), "it is in the store: {error}");
    cache.evict(Owners::These(&[Owner(1)]), Tiers::ALL).unwrap();
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), TOKENS).unwrap(), SHARED);
}

#[test]
fn a_prompt_that_was_evicted_comes_back_for_its_fork() {
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    {
        let cache = open(20, Some(Arc::clone(&store)));
        add(&cache, PROMPT, 0, TOKENS);
        assert_eq!(cache.fork(Owner(PROMPT), Owner(1), TOKENS).unwrap(), SHARED);
        add(&cache, 1, SHARED, 9);
    }
    // After a restart each has a history of its own, with the same tokens.
    let cache = open(20, Some(store));
    assert_eq!(cache.fork(Owner(PROMPT), Owner(2), TOKENS).unwrap(), SHARED);
    add(&cache, 2, SHARED, 1);
    add(&cache, 1, SHARED + 9, 1);
    assert_eq!(pages(&cache), (6 + 1 + 7, 5));
}

#[test]
fn an_edited_owner_leaves_the_others_as_they_are() {
    let options = KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 1,
        head_size: 1,
        page_size: SHAPE.page_size,
        size: KvSize::Pages(20),
        edited: Edited::Invalidate,
        ..KvOptions::default()
    };
    let cache = KvCache::open(&options, None).unwrap();
    let items: Vec<u64> = (0..60).collect();
    let with = |owner, start: usize, end: usize, items| {
        let tokens = (end - start) as u32;
        KvRequest { owner: Owner(owner), start: start as u64, tokens, candidates: 0, items, ..KvRequest::default() }
    };
    let lease = cache.prepare(&[with(PROMPT, 0, 43, &items[..43])]).unwrap();
    SHAPE.append(&lease, |_, position| position);
    let _ = lease.commit().unwrap();
    assert_eq!(cache.fork(Owner(PROMPT), Owner(1), TOKENS).unwrap(), SHARED);
    // The fork's hashes are those of the shared pages: the same items are accepted.
    let lease = cache.prepare(&[with(1, 40, 45, &items[..45])]).unwrap();
    assert_eq!(lease.owners().next().unwrap().cached, SHARED);
    SHAPE.append(&lease, |_, position| position);
    let _ = lease.commit().unwrap();
    // Item 20 of the fork changes: its pages from there on are new ones.
    let mut edited = items.clone();
    edited[20] = 77;
    let lease = cache.prepare(&[with(1, 16, 45, &edited[..45])]).unwrap();
    assert_eq!(lease.owners().next().unwrap().cached, 16);
    SHAPE.append(&lease, |_, position| edited[position as usize]);
    let _ = lease.commit().unwrap();
    assert_eq!(pages(&cache), (6 + 4, 2));
    let lease = cache.prepare(&[with(PROMPT, 43, 43, &items[..43])]).unwrap();
    SHAPE.check_shared(&lease, |owner, position| (owner, position));
}

/// Threads fork one prompt, add to their forks and evict them, in a pool that is too small for all of them.
#[test]
fn forks_by_many_threads() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 150;
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let cache = open(24, Some(store));
    add(&cache, PROMPT, 0, TOKENS);
    let shared = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (cache, shared) = (&cache, &shared);
            scope.spawn(move || {
                let mut random = Random(thread);
                for round in 0..ROUNDS {
                    let owner = thread * ROUNDS + round;
                    match cache.fork(Owner(PROMPT), Owner(owner), TOKENS) {
                        Ok(tokens) => assert_eq!(tokens, SHARED),
                        Err(error) => {
                            assert!(matches!(error.status(), Status::Capacity | Status::Busy), "{error}");
                            continue;
                        }
                    }
                    let mut end = SHARED;
                    for _ in 0..3 {
                        let tokens = random.below(12) as u32;
                        match cache.prepare(&[request(owner, end, tokens)]) {
                            Ok(lease) => {
                                lease.wait(None).unwrap();
                                SHAPE.check_shared(&lease, token);
                                SHAPE.append(&lease, |_, position| position);
                                let _ = lease.commit().unwrap();
                                end += tokens;
                            }
                            Err(error) => assert_eq!(error.status(), Status::Capacity, "{error}"),
                        }
                    }
                    shared.fetch_add(1, Ordering::Relaxed);
                    if random.once_in(2) {
                        cache.evict(Owners::These(&[Owner(owner)]), Tiers::ALL).unwrap();
                    }
                }
            });
        }
    });
    assert!(shared.into_inner() > THREADS * ROUNDS / 2, "most forks have worked");
    cache.evict(Owners::All, Tiers::ALL).unwrap();
    assert_eq!(pages(&cache), (0, 0), "every page is free again");
    let lease = cache.prepare(&[request(1, 0, 24 * 8)]).unwrap();
    lease.abort();
}
