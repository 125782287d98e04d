//! The guarantees of the cache, one at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pagoda::kv::{CachedOwner, KvRequest, Owner, Owners, Tier, Tiers};
use pagoda::store::{DiskStore, HostStore, Store};
use pagoda::{Edited, ElementType, Error, KvCache, KvOptions, KvSize, Offload, Overlap, Status, StoreOptions};
use pagoda_test_support::Folder;

use crate::pattern::{Shape, device_id};

const SHAPE: Shape = Shape { layers: 3, page_size: 8, row: 2 * 4 * 2 };

fn options() -> KvOptions {
    KvOptions {
        device_id: device_id(),
        layers: SHAPE.layers,
        heads: 2,
        head_size: 4,
        page_size: SHAPE.page_size,
        element_type: ElementType::Bf16,
        size: KvSize::Pages(16),
        model_version: "one".into(),
        ..KvOptions::default()
    }
}

fn alone(options: &KvOptions) -> KvCache {
    KvCache::open(options, None).unwrap()
}

fn store(folder: &Folder) -> Arc<dyn Store> {
    Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap())
}

fn request(user: u64, start: u64, tokens: u32) -> KvRequest<'static> {
    KvRequest { owner: Owner(user), start, tokens, candidates: 2, items: &[], ..KvRequest::default() }
}

fn item(user: u64, position: u64) -> u64 {
    user * 1000 + position
}

/// Checks the cached tokens of a user and appends more.
fn add(cache: &KvCache, user: u64, start: u64, tokens: u32) {
    let lease = cache.prepare(&[request(user, start, tokens)]).unwrap();
    SHAPE.check(&lease, item);
    SHAPE.append(&lease, item);
    let _ = lease.commit().unwrap();
}

fn cached(start: u64, tokens: u32, tier: Tier) -> CachedOwner {
    CachedOwner { start, length: tokens, tier }
}

fn refused(cache: &KvCache, requests: &[KvRequest<'_>]) -> Error {
    let before = (cache.stats().free_pages, cache.lookup(Owner::slice(&[1, 2, 3])));
    let error = cache.prepare(requests).err().expect("this is refused");
    assert_eq!((cache.stats().free_pages, cache.lookup(Owner::slice(&[1, 2, 3]))), before, "something changed");
    error
}

#[test]
fn a_lease_has_the_index_tensors() {
    let cache = alone(&options());
    add(&cache, 1, 0, 10);
    let batch = [
        KvRequest { owner: Owner(1), start: 10, tokens: 7, candidates: 3, items: &[], ..KvRequest::default() },
        KvRequest { owner: Owner(2), start: 0, tokens: 0, candidates: 4, items: &[], ..KvRequest::default() },
        KvRequest { owner: Owner(3), start: 0, tokens: 9, candidates: 0, items: &[], ..KvRequest::default() },
    ];
    let lease = cache.prepare(&batch).unwrap();
    let numbers = |tensor: &pagoda::Tensor| tensor.as_slice::<i32>().unwrap().to_vec();
    assert_eq!(numbers(lease.row_offsets()), [0, 10, 14, 23]);
    assert_eq!(numbers(lease.num_candidates()), [3, 4, 0]);
    assert_eq!(numbers(lease.cached_len()), [10, 0, 0]);
    assert_eq!(numbers(lease.page_indptr()), [0, 3, 3, 5]);
    let mut pages = numbers(lease.page_ids());
    assert!(pages.iter().all(|page| (0..16).contains(page)), "{pages:?}");
    pages.sort_unstable();
    pages.dedup();
    assert_eq!(pages.len(), 5, "no page is given out twice");
    assert_eq!(lease.pool(0).unwrap().dims(), [16, 2, 8, 2, 4]);
    assert!(lease.pool(3).is_err());
    assert!(lease.ready(2).unwrap());
}

#[test]
fn an_empty_batch_is_fine() {
    let lease = alone(&options()).prepare(&[]).unwrap();
    assert_eq!(lease.row_offsets().as_slice::<i32>().unwrap(), [0]);
    assert_eq!(lease.page_indptr().as_slice::<i32>().unwrap(), [0]);
    let _ = lease.commit().unwrap();
}

#[test]
fn tokens_are_there_after_commit_and_only_then() {
    let cache = alone(&options());
    let lease = cache.prepare(&[request(1, 0, 10)]).unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner::default()]);
    let _ = lease.commit().unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1])), [cached(0, 10, Tier::Resident)]);
    cache.prepare(&[request(1, 10, 20)]).unwrap().abort();
    drop(cache.prepare(&[request(2, 0, 20)]).unwrap());
    assert_eq!(cache.lookup(Owner::slice(&[1, 2])), [cached(0, 10, Tier::Resident), CachedOwner::default()]);
    assert_eq!(cache.stats().free_pages, 14);
}

#[test]
fn gaps_and_overlaps_are_rejected() {
    let cache = alone(&options());
    add(&cache, 1, 0, 10);
    let error = refused(&cache, &[request(1, 20, 1)]);
    assert_eq!(error.message(), "The input sequence has missing tokens from 10 to 19 (both inclusive).");
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("requests[0].start")));
    let error = refused(&cache, &[request(2, 0, 4), request(1, 5, 10)]);
    assert_eq!(error.message(), "The input sequence has overlapping tokens from 5 to 9 (both inclusive).");
    assert_eq!(error.argument(), Some("requests[1].start"));
    let error = refused(&cache, &[request(2, 0, 4), request(2, 4, 4)]);
    assert_eq!(error.argument(), Some("requests[1].owner"));
}

#[test]
fn an_overlap_can_be_trimmed() {
    let cache = alone(&KvOptions { overlap: Overlap::Trim, ..options() });
    add(&cache, 1, 0, 10);
    let lease = cache.prepare(&[request(1, 5, 12)]).unwrap();
    let user = lease.owners().next().unwrap();
    assert_eq!((user.cached, user.tokens, user.trimmed), (10, 7, 5));
    assert_eq!(lease.row_offsets().as_slice::<i32>().unwrap(), [0, 9]);
    SHAPE.append(&lease, item);
    let _ = lease.commit().unwrap();
    add(&cache, 1, 17, 1);
}

#[test]
fn a_batch_that_can_not_fit_is_rejected() {
    let cache = alone(&options());
    add(&cache, 1, 0, 10);
    let error = refused(&cache, &[request(2, 0, 16 * 8 + 1)]);
    assert_eq!((error.status(), error.argument()), (Status::Capacity, Some("requests")));
    assert!(error.message().contains("needs 17 pages and the cache has 16"), "{error}");
    let error = refused(&cache, &[request(1, 10, 7), request(2, 0, 14 * 8)]);
    assert!(error.message().contains("needs 17 pages and the cache has 16"), "{error}");
    // Pages of other leases are not available.
    let lease = cache.prepare(&[request(3, 0, 10 * 8)]).unwrap();
    let error = refused(&cache, &[request(2, 0, 7 * 8)]);
    assert_eq!((error.status(), error.argument()), (Status::Capacity, None));
    assert!(error.message().contains("7 more pages are needed and 6 are available"), "{error}");
    drop(lease);
    add(&cache, 2, 0, 7 * 8);
}

#[test]
fn the_least_recently_used_are_evicted_first() {
    let cache = alone(&options());
    for user in 1..=4 {
        add(&cache, user, 0, 4 * 8);
    }
    add(&cache, 1, 32, 0);
    // An aborted lease does not count as a use.
    cache.prepare(&[request(2, 32, 0)]).unwrap().abort();
    add(&cache, 5, 0, 5 * 8);
    let tiers = cache.lookup(Owner::slice(&[1, 2, 3, 4, 5])).iter().map(|user| user.tier).collect::<Vec<_>>();
    assert_eq!(tiers, [Tier::Resident, Tier::None, Tier::None, Tier::Resident, Tier::Resident]);
    assert_eq!(cache.stats().evicted_owners, 2);
}

#[test]
fn users_in_a_lease_stay() {
    let cache = alone(&options());
    add(&cache, 1, 0, 8 * 8);
    let lease = cache.prepare(&[request(1, 64, 0)]).unwrap();
    add(&cache, 2, 0, 8 * 8);
    add(&cache, 3, 0, 8 * 8);
    assert_eq!(cache.lookup(Owner::slice(&[1, 2, 3])).map_tiers(), [Tier::Resident, Tier::None, Tier::Resident]);
    SHAPE.check(&lease, item);
    let error = cache.evict(Owners::These(Owner::slice(&[3, 1])), Tiers::ALL).unwrap_err();
    assert_eq!(error.status(), Status::Busy);
    assert_eq!(cache.evict(Owners::All, Tiers::ALL).unwrap(), 1);
    assert_eq!(cache.lookup(Owner::slice(&[1, 3])).map_tiers(), [Tier::Resident, Tier::None]);
    drop(lease);
    assert_eq!(cache.evict(Owners::These(Owner::slice(&[3, 1])), Tiers::ALL).unwrap(), 1);
}

trait MapTiers {
    fn map_tiers(&self) -> Vec<Tier>;
}

impl MapTiers for Vec<CachedOwner> {
    fn map_tiers(&self) -> Vec<Tier> {
        self.iter().map(|user| user.tier).collect()
    }
}

#[test]
fn many_read_and_one_writes() {
    let cache = alone(&KvOptions { max_history: 24, ..options() });
    add(&cache, 1, 0, 24);
    let readers = [cache.prepare(&[request(1, 24, 0)]).unwrap(), cache.prepare(&[request(1, 24, 0)]).unwrap()];
    let writer = cache.prepare(&[request(1, 24, 5)]).unwrap();
    assert_eq!(cache.prepare(&[request(1, 24, 5)]).err().unwrap().status(), Status::Busy);
    SHAPE.append(&writer, item);
    let _ = writer.commit().unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1])), [cached(8, 21, Tier::Resident)]);
    // The page that left the window is still read: it must not be reused.
    assert_eq!(cache.stats().free_pages, 16 - 4);
    add(&cache, 2, 0, 12 * 8);
    for reader in readers {
        SHAPE.check(&reader, item);
    }
    // Three pages of each.
    assert_eq!(cache.stats().free_pages, 10);
    add(&cache, 1, 29, 1);
}

#[test]
fn a_window_moves() {
    let cache = alone(&KvOptions { max_history: 20, ..options() });
    for position in 0..100 {
        add(&cache, 1, position, 1);
        let user = cache.lookup(Owner::slice(&[1]))[0];
        assert_eq!(user.start + u64::from(user.length), position + 1);
        assert!(user.length <= 20 && (user.start == 0 || user.length > 12), "{user:?}");
        assert!(user.start.is_multiple_of(8));
    }
    // More at once than the window holds.
    add(&cache, 1, 100, 50);
    assert_eq!(cache.lookup(Owner::slice(&[1])), [cached(132, 18, Tier::Resident)]);
    // The last part of a long history.
    add(&cache, 2, 5000, 20);
    assert_eq!(cache.lookup(Owner::slice(&[2])), [cached(5000, 20, Tier::Resident)]);
    add(&cache, 2, 5020, 1);
    assert_eq!(cache.lookup(Owner::slice(&[2])), [cached(5008, 13, Tier::Resident)]);
}

#[test]
fn an_edited_history_is_detected() {
    let items: Vec<u64> = (0..40).map(|position| item(1, position)).collect();
    let with = |start: u64, tokens: u32, items| KvRequest {
        owner: Owner(1),
        start,
        tokens,
        candidates: 0,
        items,
        ..KvRequest::default()
    };
    let mut edited = items.clone();
    edited[17] = 3;
    for store_it in [false, true] {
        let folder = Folder::new();
        let refusing = KvCache::open(&KvOptions { edited: Edited::Refuse, ..options() }, Some(store(&folder))).unwrap();
        let lease = refusing.prepare(&[with(0, 30, &items[..30])]).unwrap();
        SHAPE.append(&lease, item);
        let _ = lease.commit().unwrap();
        if store_it {
            refusing.evict(Owners::All, Tiers::RESIDENT).unwrap();
        }
        let error = refused(&refusing, &[with(30, 10, &edited)]);
        assert!(error.message().contains("items from 16 to 23"), "{error}");
        let error = refused(&refusing, &[with(30, 10, &[])]);
        assert_eq!(error.argument(), Some("requests[0].items"));
        SHAPE.check(&refusing.prepare(&[with(30, 10, &items)]).unwrap(), item);

        let folder = Folder::new();
        let store = store(&folder);
        let invalidate = KvOptions { edited: Edited::Invalidate, ..options() };
        let cache = KvCache::open(&invalidate, Some(Arc::clone(&store))).unwrap();
        let lease = cache.prepare(&[with(0, 30, &items[..30])]).unwrap();
        SHAPE.append(&lease, item);
        let _ = lease.commit().unwrap();
        cache.offload(Owners::All).unwrap();
        if store_it {
            cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
        }
        let error = refused(&cache, &[with(30, 10, &edited)]);
        assert_eq!(error.message(), "The input sequence has missing tokens from 16 to 29 (both inclusive).");
        let of = |_: u64, position: u64| edited[position as usize];
        let lease = cache.prepare(&[with(16, 24, &edited)]).unwrap();
        SHAPE.check(&lease, of);
        SHAPE.append(&lease, of);
        let _ = lease.commit().unwrap();
        // The tokens of the old items are removed from the store too.
        assert!(store.owners(pagoda::store::Space(0)).is_empty());
        cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
        drop(cache);
        let cache = KvCache::open(&invalidate, Some(store)).unwrap();
        assert_eq!(cache.lookup(Owner::slice(&[1])), [cached(0, 40, Tier::Store)]);
        SHAPE.check(&cache.prepare(&[with(40, 0, &edited)]).unwrap(), of);
    }
}

#[test]
fn histories_come_back_from_the_store() {
    let folder = Folder::new();
    // Without storing ahead: a user that is being copied would stay, and another one would be evicted.
    let cache = KvCache::open(&KvOptions { ahead_percent: 0, ..options() }, Some(store(&folder))).unwrap();
    for user in 1..=5 {
        add(&cache, user, 0, 30);
    }
    // 16 pages hold 4 users of 4 pages.
    assert_eq!(cache.lookup(Owner::slice(&[1, 5])), [cached(0, 30, Tier::Store), cached(0, 30, Tier::Resident)]);
    for user in 1..=5 {
        add(&cache, user, 30, 3);
    }
    let stats = cache.stats();
    assert!(stats.tokens_from_store > 0 && stats.failed_offloads == 0, "{stats:?}");
    cache.offload(Owners::All).unwrap();
    assert_eq!(cache.offload(Owners::All).unwrap(), 0, "everything is stored");
    drop(cache);

    let reopened = KvCache::open(&options(), Some(store(&folder))).unwrap();
    for user in 1..=5 {
        assert_eq!(reopened.lookup(Owner::slice(&[user])), [cached(0, 33, Tier::Store)]);
        add(&reopened, user, 33, 1);
    }
}

#[test]
fn another_version_sees_nothing() {
    let folder = Folder::new();
    let store = store(&folder);
    let open = |options: &KvOptions| KvCache::open(options, Some(Arc::clone(&store))).unwrap();
    let first = open(&KvOptions { offload: Offload::AtCommit, ..options() });
    add(&first, 1, 0, 30);
    first.flush().unwrap();
    for other in [
        KvOptions { model_version: "two".into(), ..options() },
        KvOptions { page_size: 16, ..options() },
        KvOptions { element_type: ElementType::F16, ..options() },
        KvOptions { heads: 4, head_size: 2, ..options() },
        KvOptions { edited: Edited::Refuse, ..options() },
    ] {
        assert_eq!(open(&other).lookup(Owner::slice(&[1])), [CachedOwner::default()], "{other:?}");
    }
    let second = KvCache::open(&options(), Some(Arc::clone(&store))).err().unwrap();
    assert_eq!(second.status(), Status::Busy, "{second}");
    drop(first);
    assert_eq!(open(&options()).lookup(Owner::slice(&[1])), [cached(0, 30, Tier::Store)]);
}

#[test]
fn by_hand_means_by_hand() {
    let folder = Folder::new();
    let cache = KvCache::open(&KvOptions { offload: Offload::ByHand, ..options() }, Some(store(&folder))).unwrap();
    add(&cache, 1, 0, 30);
    add(&cache, 2, 0, 30);
    assert_eq!(cache.offload(Owners::These(Owner::slice(&[1, 99]))).unwrap(), 1);
    add(&cache, 1, 30, 5);
    assert_eq!(cache.evict(Owners::All, Tiers::RESIDENT).unwrap(), 2);
    assert_eq!(cache.lookup(Owner::slice(&[1, 2])), [cached(0, 30, Tier::Store), CachedOwner::default()]);
    add(&cache, 1, 30, 5);
    assert_eq!(cache.evict(Owners::These(Owner::slice(&[1])), Tiers::STORE).unwrap(), 1);
    assert_eq!(cache.lookup(Owner::slice(&[1])), [cached(0, 35, Tier::Resident)]);
    cache.evict(Owners::These(Owner::slice(&[1])), Tiers::RESIDENT).unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1])), [CachedOwner::default()]);
}

#[test]
fn a_history_that_can_not_be_stored_does_not_affect_others() {
    let host = Arc::new(HostStore::new(2 * 4096, None, None).unwrap());
    let cache = KvCache::open(&KvOptions { offload: Offload::ByHand, ..options() }, Some(host)).unwrap();
    // 9,600 bytes, and 1,920.
    add(&cache, 1, 0, 100);
    add(&cache, 2, 0, 20);
    let error = cache.offload(Owners::These(Owner::slice(&[1, 2]))).unwrap_err();
    assert!(error.status() == Status::Capacity && error.message().starts_with("1 of 2 owners"), "{error}");
    assert!(error.message().contains("9600 bytes of owner 1") && error.message().contains("8192 bytes"), "{error}");
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    assert_eq!(cache.lookup(Owner::slice(&[1, 2])), [CachedOwner::default(), cached(0, 20, Tier::Store)]);
}

#[test]
fn the_next_user_to_evict_is_stored_ahead() {
    let folder = Folder::new();
    let store = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let cache = KvCache::open(&KvOptions { ahead_percent: 50, ..options() }, Some(store.clone())).unwrap();
    let written = |count: u64| {
        for _ in 0..1000 {
            if store.stats().writes >= count {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(store.stats().writes, count);
    };
    for user in 1..=2 {
        add(&cache, user, 0, 32);
    }
    // Half of the 16 pages are free: nothing to do. The third user takes 4 of them, so one user has to be stored.
    assert_eq!(store.stats().writes, 0);
    add(&cache, 3, 0, 32);
    written(1);
    assert_eq!(cache.lookup(Owner::slice(&[1, 2, 3])).map_tiers(), [Tier::Resident; 3]);
    // A user that is used again is neither stored nor next to be evicted.
    add(&cache, 1, 32, 1);
    written(3);
    cache.evict(Owners::These(Owner::slice(&[2, 3])), Tiers::RESIDENT).unwrap();
    assert_eq!(store.stats().writes, 3, "they were stored already");
    drop(cache);
    assert_eq!(store.stats().writes, 4);
    let cache = KvCache::open(&options(), Some(store)).unwrap();
    for (user, end) in [(1, 33), (2, 32), (3, 32)] {
        SHAPE.check(&cache.prepare(&[request(user, end, 0)]).unwrap(), item);
    }
}

#[test]
fn prefetched_users_are_resident() {
    let folder = Folder::new();
    let cache = KvCache::open(&options(), Some(store(&folder))).unwrap();
    for user in 1..=3 {
        add(&cache, user, 0, 30);
    }
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    assert_eq!(cache.prefetch(Owner::slice(&[1, 2, 77])).unwrap(), 2);
    let lease = cache.prepare(&[request(1, 30, 0), request(2, 30, 0)]).unwrap();
    SHAPE.check(&lease, item);
    assert_eq!(cache.lookup(Owner::slice(&[1, 2, 3])).map_tiers(), [Tier::Resident, Tier::Resident, Tier::Store]);
}

#[test]
fn more_than_fits_is_prefetched_as_far_as_it_fits_at_once() {
    let folder = Folder::new();
    let cache = KvCache::open(&options(), Some(store(&folder))).unwrap();
    let users: Vec<u64> = (1..=30).collect();
    for &user in &users {
        add(&cache, user, 0, 30);
    }
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    let fit = 16 / 30_u64.div_ceil(SHAPE.page_size.into());
    let begun = Instant::now();
    assert_eq!(cache.prefetch(Owner::slice(&users)).unwrap() as u64, fit);
    // It would wait two seconds for users that it loads itself.
    assert!(begun.elapsed() < Duration::from_millis(1500), "{:?}", begun.elapsed());
    for &user in &users[..fit as usize] {
        SHAPE.check(&cache.prepare(&[request(user, 30, 0)]).unwrap(), item);
    }
}

#[test]
fn layers_arrive_one_by_one() {
    let folder = Folder::new();
    let options = KvOptions { onload_in_background: true, ..options() };
    let cache = KvCache::open(&options, Some(store(&folder))).unwrap();
    add(&cache, 1, 0, 30);
    cache.evict(Owners::All, Tiers::RESIDENT).unwrap();
    let lease = cache.prepare(&[request(1, 30, 4)]).unwrap();
    for layer in 0..SHAPE.layers {
        lease.wait(Some(layer)).unwrap();
        assert!(lease.ready(layer).unwrap());
        SHAPE.check_layer(&lease, layer, &mut item);
        SHAPE.append_layer(&lease, layer, &mut item);
    }
    let _ = lease.commit().unwrap();
    add(&cache, 1, 34, 1);
}

#[test]
fn without_a_store_there_is_nothing_to_offload_to() {
    let cache = alone(&options());
    assert_eq!(cache.offload(Owners::All).unwrap_err().status(), Status::Unsupported);
    assert_eq!(cache.prefetch(Owner::slice(&[1])).unwrap(), 0);
    cache.flush().unwrap();
}

#[test]
fn invalid_options_are_rejected() {
    let good = options();
    for (options, argument) in [
        (KvOptions { layers: 0, ..good.clone() }, "layers"),
        (KvOptions { heads: 0, ..good.clone() }, "heads"),
        (KvOptions { head_size: 1 << 20, ..good.clone() }, "head_size"),
        (KvOptions { page_size: 12, ..good.clone() }, "page_size"),
        (KvOptions { element_type: ElementType::F64, ..good.clone() }, "element_type"),
        (KvOptions { size: KvSize::Pages(0), ..good.clone() }, "size"),
        (KvOptions { size: KvSize::Bytes(100), ..good.clone() }, "size"),
        (KvOptions { onload_threads: 0, ..good.clone() }, "onload_threads"),
        (KvOptions { ahead_percent: 101, ..good.clone() }, "ahead_percent"),
        (KvOptions { max_history: 7, ..good.clone() }, "max_history"),
    ] {
        let error = KvCache::open(&options, None).err().expect(argument);
        assert_eq!(error.argument(), Some(argument), "{error}");
    }
    let bytes = 3 * 8 * 2 * 16 * 10 + 5;
    let cache = alone(&KvOptions { size: KvSize::Bytes(bytes), ..good });
    assert_eq!(cache.stats().pages, 10);
}
