//! What a caller can not cause: the order of wake-ups, and a store that fails where none should.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pagoda_test_support::Folder;

use super::super::batching::{Member, Pending, Runner, Scheduler, Start};
use super::history;
use super::ranker::{self, Ranker};
use super::served_model::ServedModel;
use super::workspace::{self, Workspace};
use super::*;
use crate::kv::{KvSize, KvStats, Owners, Tiers};
use crate::runtime::{ModelOptions, Provider};
use crate::store::{DiskStore, Found, History, Key, Owner, Record, Room, Space, Store, StoreOptions, Ticket};

/// A time limit for every wait, so that a lost wake-up fails the test instead of blocking it.
const LONG: Duration = Duration::from_secs(20);

/// A model of the tests, open.
pub(super) fn serving(options: &EngineOptions, store: Option<&Arc<dyn Store>>) -> Arc<ServedModel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/engine/gather");
    ranker::open_and_warm_up(ModelFolder::open(folder).unwrap(), options, store).unwrap()
}

/// A user's whole history: the items of its events.
pub(super) fn request(user: u64, items: &[i64]) -> RankRequest {
    let ones = vec![1; items.len()];
    let keys = Columns::new().with("item", items).with("genre", ones.clone()).with("rating", ones.clone());
    RankRequest {
        user,
        user_keys: vec![("age".into(), 1), ("town".into(), 1)],
        events: Events { keys, times: ones },
        candidates: Columns::new().with("item", [1]).with("genre", [1]),
        time: Some(1),
        ..RankRequest::default()
    }
}

/// Options for tests: the CPU, one thread, a few pages.
pub(super) fn options() -> EngineOptions {
    let model =
        ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, sleep_when_idle: true, ..ModelOptions::default() };
    EngineOptions { model, kv_size: Some(KvSize::Pages(64)), ..EngineOptions::default() }
}

/// A scheduler without worker threads.
type RankScheduler = Scheduler<Ranker>;

fn scheduler(options: EngineOptions, store: Option<Arc<dyn Store>>) -> RankScheduler {
    let (model, limits) = (serving(&options, store.as_ref()), batch_limits(&options));
    Scheduler::new(Ranker::new(options, store, model), limits)
}

fn pending(scheduler: &RankScheduler, request: &RankRequest) -> Arc<Pending<PreparedRequest>> {
    Pending::new(
        PreparedRequest::new(&scheduler.runner.current(), request).unwrap(),
        Some(LONG),
        false,
        false,
        &scheduler.counters,
    )
}

fn rank(scheduler: &RankScheduler, request: &RankRequest) -> Result<RankResponse> {
    let pending = pending(scheduler, request);
    scheduler.run_or_queue(&pending)?;
    pending.wait()
}

/// The batch that a worker forms from the waiting requests.
fn batch_from(scheduler: &RankScheduler, waits: bool) -> Option<(Workspace, Vec<Member<Ranker>>)> {
    let mut workspace = {
        let mut queue = scheduler.lock();
        queue.coalescing = waits;
        queue.take_instance().unwrap()
    };
    let mut failed = Vec::new();
    let batch = scheduler.form_batch(&mut workspace, if waits { Start::Coalesce } else { Start::Queue }, &mut failed);
    assert!(failed.is_empty());
    scheduler.lock().return_instance(Workspace::default(), true);
    batch.map(|batch| (workspace, batch))
}

/// Waits until so many workers have found nothing to do, and sleep.
fn until_asleep(scheduler: &RankScheduler, workers: usize) {
    let begun = Instant::now();
    while scheduler.lock().sleepers < workers && begun.elapsed() < LONG {
        std::thread::yield_now();
    }
}

fn kv_stats(scheduler: &RankScheduler) -> KvStats {
    scheduler.runner.current().kv.as_ref().unwrap().stats()
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_is_put_back_wakes_another_instance() {
    let scheduler = scheduler(EngineOptions { instances: 2, max_batch_rows: 8, ..options() }, None);
    let [first, second] = [1, 2].map(|user| pending(&scheduler, &request(user, &[3, 4, 5])));
    std::thread::scope(|scope| {
        scope.spawn(|| scheduler.work());
        until_asleep(&scheduler, 1);
        // This thread acts as another worker, which was woken for both.
        let mut workspace = {
            let mut queue = scheduler.lock();
            [&first, &second].into_iter().for_each(|pending| assert!(queue.push(Arc::clone(pending)).unwrap()));
            queue.take_instance().unwrap()
        };
        let batch = scheduler.form_batch(&mut workspace, Start::Queue, &mut Vec::new()).unwrap();
        assert!(batch.len() < 2, "both have more rows than a batch may have");
        // On a busy machine the other worker may be late, and take the first request itself.
        let outcome = match batch.first() {
            Some(held) if Arc::ptr_eq(&held.pending, &first) => second.wait().map(drop),
            _ => Ok(()),
        };
        scheduler.stop();
        assert!(outcome.is_ok(), "it waits for an unrelated run: {outcome:?}");
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn requests_that_arrive_while_the_workers_sleep_run_in_one_batch() {
    let scheduler = scheduler(EngineOptions { instances: 3, max_batch: 4, max_delay: LONG, ..options() }, None);
    std::thread::scope(|scope| {
        (0..3).for_each(|_| drop(scope.spawn(|| scheduler.work())));
        until_asleep(&scheduler, 3);
        let all = [1, 2, 3, 4].map(|user| pending(&scheduler, &request(user, &[3, 4, 5])));
        for pending in &all {
            scheduler.queue(Arc::clone(pending)).unwrap();
            // The worker has given up spinning and sleeps in the window; the last request fills the batch.
            let begun = Instant::now();
            while scheduler.lock().timed_sleepers == 0 && !pending.has_ended() && begun.elapsed() < LONG {
                std::thread::yield_now();
            }
        }
        let batched: Vec<_> = all.iter().map(|pending| pending.wait().map(|response| response.batched_with)).collect();
        scheduler.stop();
        assert_eq!(batched, [Ok(3), Ok(3), Ok(3), Ok(3)]);
    });
    assert_eq!(scheduler.counters.totals().2, 1);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_batch_is_formed_as_requests_arrive_during_the_coalescing_window() {
    let scheduler = scheduler(EngineOptions { max_batch: 3, max_delay: LONG, ..options() }, None);
    let all = [1, 2, 3].map(|user| pending(&scheduler, &request(user, &[3, 4, 5])));
    all[..2].iter().for_each(|pending| scheduler.queue(Arc::clone(pending)).unwrap());
    assert!(batch_from(&scheduler, true).is_none(), "the batch is not full, and no other job arrives");
    let mut queue = scheduler.lock();
    assert_eq!((queue.coalescing, queue.no_arrivals_since, queue.waiting()), (false, Some(2), 2));
    let next: Vec<_> = (0..2).map(|_| queue.take(true).unwrap()).collect();
    assert!(next.iter().zip(&all).all(|(next, pending)| Arc::ptr_eq(next, pending)), "in their original order");
    next.into_iter().rev().for_each(|pending| queue.put_back(pending));
    drop(queue);
    let stats = kv_stats(&scheduler);
    assert_eq!((stats.resident_owners, stats.tokens_new, stats.free_pages), (0, 0, stats.pages), "no history is held");
    // A request that can not run still counts as a job of the window.
    let gap = pending(&scheduler, &RankRequest { start: Some(9), user_keys: Vec::new(), ..request(4, &[3]) });
    scheduler.queue(Arc::clone(&gap)).unwrap();
    assert!(batch_from(&scheduler, true).is_none() && !gap.has_ended());
    assert_eq!((scheduler.waiting(), scheduler.lock().no_arrivals_since), (3, Some(3)));
    gap.end(Err(crate::runtime::cancelled()));
    scheduler.queue(Arc::clone(&all[2])).unwrap();
    let (workspace, batch) = batch_from(&scheduler, true).unwrap();
    assert!(batch.iter().zip(&all).all(|(member, pending)| Arc::ptr_eq(&member.pending, pending)));
    assert_eq!((batch.len(), workspace.sizes().sequences), (3, 3));
    let (stats, queue) = (kv_stats(&scheduler), scheduler.lock());
    assert!(stats.free_pages < stats.pages && !queue.coalescing && queue.waiting() == 0);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_ends_while_its_batch_is_formed_is_not_in_it() {
    let folder = Folder::new();
    let store = failing_store(&folder);
    let scheduler = scheduler(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, Some(store.clone()));
    let [first, second] = [1, 2].map(|user| {
        let work = PreparedRequest::new(&scheduler.runner.current(), &request(user, &[3, 4, 5])).unwrap();
        Pending::new(work, None, true, false, &scheduler.counters)
    });
    // The store is asked for the history of the second user when the first request is in the batch.
    let cancelled = Arc::clone(&first);
    let cancel = move || cancelled.end(Err(crate::runtime::cancelled()));
    *store.on_find.lock() = Some((Owner(2), Box::new(cancel)));
    [&first, &second].into_iter().for_each(|pending| scheduler.queue(Arc::clone(pending)).unwrap());
    assert!(batch_from(&scheduler, true).is_none(), "it is not full without the first");
    assert!(first.has_ended() && scheduler.waiting() == 1 && scheduler.lock().no_arrivals_since.is_none());
    let third = pending(&scheduler, &request(1, &[3]));
    scheduler.queue(Arc::clone(&third)).unwrap();
    let (workspace, batch) = batch_from(&scheduler, true).unwrap();
    assert!(batch.iter().zip([second, third]).all(|(member, pending)| Arc::ptr_eq(&member.pending, &pending)));
    assert_eq!((batch.len(), workspace.sizes().sequences), (2, 2));
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_arrives_while_a_batch_is_slow_to_form_does_not_wait_for_it() {
    let folder = Folder::new();
    let store = failing_store(&folder);
    let max_delay = Duration::from_millis(200);
    let scheduler =
        scheduler(EngineOptions { instances: 2, max_batch: 3, max_delay, ..options() }, Some(store.clone()));
    // The lookup of the first request takes until the second one is answered.
    let (told, answered) = std::sync::mpsc::channel();
    let (looked, looks) = std::sync::mpsc::channel();
    let wait = move || {
        looked.send(()).unwrap();
        answered.recv_timeout(LONG / 2).unwrap();
    };
    *store.on_find.lock() = Some((Owner(1), Box::new(wait)));
    std::thread::scope(|scope| {
        let _workers = [(); 2].map(|()| scope.spawn(|| scheduler.work()));
        until_asleep(&scheduler, 2);
        let ask = |user| {
            let asked = pending(&scheduler, &request(user, &[3, 4, 5]));
            scheduler.queue(Arc::clone(&asked)).unwrap();
            asked
        };
        let first = ask(1);
        looks.recv_timeout(LONG).unwrap();
        let second = ask(2);
        let answer = second.wait();
        let _ = told.send(());
        scheduler.stop();
        assert_eq!(answer.unwrap().batched_with, 0);
        first.wait().unwrap();
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn rows_from_the_store_are_counted_once() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let scheduler = scheduler(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, Some(Arc::new(store)));
    let ran = |items: &[i64]| {
        scheduler.queue(pending(&scheduler, &request(1, items))).unwrap();
        assert!(batch_from(&scheduler, true).is_none());
        let (mut workspace, batch) = batch_from(&scheduler, false).unwrap();
        let mut outcomes = Vec::new();
        scheduler.run_batch(&mut workspace, batch, &mut outcomes);
        scheduler.lock().release_key(1);
        outcomes.pop().unwrap().1.unwrap()
    };
    let computed = ran(&[3, 4, 5]).computed_rows;
    scheduler.runner.current().kv.as_ref().unwrap().evict(Owners::All, Tiers::RESIDENT).unwrap();
    let again = ran(&[3, 4, 5, 6, 7]);
    let stats = kv_stats(&scheduler);
    assert_eq!((stats.tokens_from_store, stats.tokens_from_pool), (again.cached_rows, 0));
    assert!(again.cached_rows > 0 && stats.tokens_new == computed + again.computed_rows);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_waits_in_the_coalescing_window_holds_no_history() {
    let scheduler = scheduler(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, None);
    let [first, second] = [1, 2].map(|user| pending(&scheduler, &request(user, &[3, 4, 5])));
    std::thread::scope(|scope| {
        scope.spawn(|| scheduler.work());
        scheduler.queue(Arc::clone(&first)).unwrap();
        let begun = Instant::now();
        while scheduler.lock().no_arrivals_since.is_none() && begun.elapsed() < LONG / 2 {
            std::thread::yield_now();
        }
        let no_arrivals_since = scheduler.lock().no_arrivals_since;
        let (waiting, forgotten) = (scheduler.waiting(), scheduler.runner.current().forget(1, &mut Vec::new()));
        scheduler.queue(Arc::clone(&second)).unwrap();
        scheduler.stop();
        assert_eq!((no_arrivals_since, waiting), (Some(1), 1), "no job arrived, and the batch is not full");
        assert!(!forgotten.unwrap(), "the user is not known yet");
        assert_eq!(first.wait().unwrap().batched_with, 1);
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_can_not_be_added_leaves_the_batch_unchanged() {
    let scheduler = scheduler(options(), None);
    let mut workspace = Workspace::default();
    let [(first, of_first), (mut second, of_second)] = [1, 2].map(|user| {
        let work = PreparedRequest::new(&scheduler.runner.current(), &request(user, &[3, 4, 5])).unwrap();
        let ready = history::prepare(&work, &scheduler.runner.events, &mut workspace.fingerprints).unwrap();
        (work, ready)
    });
    workspace.clear(first.serving.layout.features.len());
    scheduler.runner.add(&mut workspace, &first, &of_first).unwrap();
    // As if the events had been sent to another version with a larger table.
    second.known_events = false;
    second.events[0] = 1 << 40;
    assert_eq!(scheduler.runner.add(&mut workspace, &second, &of_second).unwrap_err().argument(), Some("events"));
    let alone = rank(&scheduler, &request(3, &[3, 4, 5])).unwrap();
    assert_eq!(workspace::run(&mut workspace, &first.serving, None).unwrap().scores, alone.scores);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_finds_no_room_beside_others_loses_nothing() {
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let scheduler = scheduler(EngineOptions { kv_size: Some(KvSize::Pages(10)), ..options() }, Some(store));
    let serving = scheduler.runner.current();
    let page = u64::from(serving.folder.kv.page_size);
    // Histories of four and of six full pages, the latter more than half of the pool.
    let events = [(1, 4), (2, 6)].map(|(user, pages)| {
        let count = (1..).find(|&events| serving.layout.row_of(events) >= pages * page).unwrap();
        assert_eq!(serving.layout.row_of(count), pages * page);
        rank(&scheduler, &request(user, &vec![3; count as usize])).unwrap();
        count
    });
    let one_more = |user: u64| RankRequest { start: Some(events[user as usize - 1]), ..request(user, &[4]) };
    let prepare = |user: u64| {
        let work = PreparedRequest::new(&serving, &one_more(user)).unwrap();
        history::prepare(&work, &scheduler.runner.events, &mut Vec::new())
    };
    let first = prepare(1).unwrap();
    assert_eq!(prepare(2).err().unwrap().status(), Status::Capacity);
    drop(first);
    assert_eq!(prepare(2).unwrap().cached, serving.layout.row_of(events[1]));
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_user_with_a_running_request_is_not_forgotten() {
    // Without a KV cache, which would reject it too.
    let scheduler = scheduler(EngineOptions { kv_size: None, ..options() }, None);
    rank(&scheduler, &request(7, &[3, 4, 5])).unwrap();
    let workspace = scheduler.lock().take_instance_for(7).unwrap();
    assert_eq!(forget_events(&scheduler, 7).unwrap_err().status(), Status::Busy);
    assert!(!forget_events(&scheduler, 8).unwrap());
    scheduler.lock().release_key(7);
    scheduler.lock().return_instance(workspace, true);
    // A waiting request has read nothing yet.
    scheduler.queue(pending(&scheduler, &request(7, &[3]))).unwrap();
    assert!(forget_events(&scheduler, 7).unwrap() && !forget_events(&scheduler, 7).unwrap());
}

type Hook = Box<dyn FnOnce() + Send>;

/// A store that panics in `cut`: in the middle of a commit that replaces events.
struct FailingStore {
    store: DiskStore,
    /// How many more times it panics.
    left: AtomicUsize,
    /// Called when this owner's history is first looked up.
    on_find: Mutex<Option<(Owner, Hook)>>,
}

fn failing_store(folder: &Folder) -> Arc<FailingStore> {
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    Arc::new(FailingStore { store, left: 0.into(), on_find: Mutex::default() })
}

impl Store for FailingStore {
    fn claim(&self, space: Space) -> bool {
        self.store.claim(space)
    }

    fn release(&self, space: Space) {
        self.store.release(space);
    }

    fn find(&self, key: Key) -> Option<Found> {
        let on_find = self.on_find.lock().take_if(|(owner, _)| *owner == key.owner);
        if let Some((_, on_find)) = on_find {
            on_find();
        }
        self.store.find(key)
    }

    fn history(&self, key: Key) -> Option<Box<dyn History>> {
        self.store.history(key)
    }

    fn write(&self, record: Record, room: Room) -> Result<Ticket> {
        self.store.write(record, room)
    }

    fn cut(&self, key: Key, from: u64) -> Result<Ticket> {
        let fails = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        assert!(fails.is_err(), "this store fails");
        self.store.cut(key, from)
    }

    fn owners(&self, space: Space) -> Vec<Owner> {
        self.store.owners(space)
    }

    fn flush(&self) -> Result<()> {
        self.store.flush()
    }
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_failed_commit_leaves_no_stale_history() {
    let folder = Folder::new();
    let store = failing_store(&folder);
    let scheduler = scheduler(options(), Some(store.clone()));
    let alone = self::scheduler(EngineOptions { kv_size: None, remember_bytes: 0, ..options() }, None);
    let told: Vec<i64> = (1..=30).collect();
    let edited: Vec<i64> = told.iter().map(|&item| if item == 5 { 39 } else { item }).collect();
    let next = |from: usize| RankRequest { start: Some(from as u64), user_keys: vec![], ..request(7, &told[from..]) };

    rank(&scheduler, &request(7, &told)).unwrap();
    scheduler.runner.current().kv.as_ref().unwrap().offload(Owners::All).unwrap();
    store.left.store(1, Ordering::Relaxed);
    let response = rank(&scheduler, &request(7, &edited)).unwrap();
    assert_eq!(store.left.load(Ordering::Relaxed), 0, "the commit has failed");
    assert_eq!(response.scores, rank(&alone, &request(7, &edited)).unwrap().scores, "the answer is still right");
    // The events before the edit must not be used.
    let error = rank(&scheduler, &next(30)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("start")), "{error}");
    // From then on the user works as any other.
    let response = rank(&scheduler, &request(7, &edited)).unwrap();
    assert_eq!(response.cached_rows, 0);
    assert_eq!(rank(&scheduler, &request(7, &edited)).unwrap().computed_rows, 0);

    // Forgetting fails too: other users are not affected.
    store.left.store(2, Ordering::Relaxed);
    scheduler.runner.current().kv.as_ref().unwrap().offload(Owners::All).unwrap();
    rank(&scheduler, &request(7, &told)).unwrap();
    assert_eq!(store.left.load(Ordering::Relaxed), 0, "both have failed");
    assert_eq!(rank(&scheduler, &request(8, &told)).unwrap().scores, rank(&alone, &request(8, &told)).unwrap().scores);
    assert_eq!(rank(&scheduler, &request(7, &told)).unwrap().scores, rank(&alone, &request(7, &told)).unwrap().scores);
}
