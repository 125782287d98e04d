//! What no caller can bring about: who is woken when, and a store that fails where none should.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pagoda_test_support::Folder;

use super::super::batching::{Member, Pending, Runner, Scheduler};
use super::history;
use super::ranker::{self, Ranker};
use super::workspace::{self, Workspace};
use super::*;
use crate::config::{ModelOptions, Pages, Provider, StoreOptions};
use crate::kv::{KvStats, Tiers, Users};
use crate::store::{DiskStore, Found, History, Key, Record, Room, Store, Ticket};

/// Longer than anything takes, so that no test waits for ever for what is lost.
const LONG: Duration = Duration::from_secs(20);

/// A model of the tests, open.
pub(super) fn serving(options: &EngineOptions, store: Option<&Arc<dyn Store>>) -> Arc<OpenModel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/engine/gather");
    ranker::open(ModelFolder::open(folder).unwrap(), options, store).unwrap()
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
    EngineOptions { model, kv: Some(Pages::Count(64)), ..EngineOptions::default() }
}

/// A scheduler without worker threads.
type Core = Scheduler<Ranker>;

fn core(options: EngineOptions, store: Option<Arc<dyn Store>>) -> Core {
    let (model, limits) = (serving(&options, store.as_ref()), batch_limits(&options));
    Scheduler::new(Ranker::new(options, store, model), limits)
}

fn pending(core: &Core, request: &RankRequest) -> Arc<Pending<PreparedRequest>> {
    Pending::new(
        PreparedRequest::new(&core.runner.current(), request).unwrap(),
        Some(LONG),
        false,
        false,
        &core.counters,
    )
}

fn rank(core: &Core, request: &RankRequest) -> Result<RankResponse> {
    let pending = pending(core, request);
    core.run_or_queue(&pending)?;
    pending.wait()
}

/// What a thread of the engine puts together of the requests that are there.
fn gathered(core: &Core, waits: bool) -> Option<(Workspace, Vec<Member<Ranker>>)> {
    let mut workspace = {
        let mut queue = core.lock();
        queue.gathering = waits;
        queue.instance().unwrap()
    };
    let mut failed = Vec::new();
    let batch = core.gather(&mut workspace, None, waits, &mut failed);
    assert!(failed.is_empty());
    core.lock().give_back(Workspace::default(), true);
    batch.map(|batch| (workspace, batch))
}

fn kv_stats(core: &Core) -> KvStats {
    core.runner.current().kv.as_ref().unwrap().stats()
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_request_that_is_put_back_wakes_another_instance() {
    let core = core(EngineOptions { instances: 2, max_batch_rows: 8, ..options() }, None);
    let [first, second] = [1, 2].map(|user| pending(&core, &request(user, &[3, 4, 5])));
    std::thread::scope(|scope| {
        // Finds nothing to do, and sleeps.
        scope.spawn(|| core.work());
        std::thread::sleep(Duration::from_millis(200));
        // As if this were another one, which was woken for both.
        let mut workspace = {
            let mut queue = core.lock();
            [&first, &second].into_iter().for_each(|pending| assert!(queue.push(Arc::clone(pending)).unwrap()));
            queue.instance().unwrap()
        };
        let batch = core.gather(&mut workspace, None, false, &mut Vec::new()).unwrap();
        assert!(batch.len() < 2, "both have more rows than a batch may have");
        // On a busy machine the other may have come late, and taken the first itself.
        let outcome = match batch.first() {
            Some(held) if Arc::ptr_eq(&held.pending, &first) => second.wait().map(drop),
            _ => Ok(()),
        };
        core.stop();
        assert!(outcome.is_ok(), "it waits for a run that has nothing to do with it: {outcome:?}");
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_batch_that_waits_for_others_is_put_together_as_they_come() {
    let core = core(EngineOptions { max_batch: 3, max_delay: LONG, ..options() }, None);
    let all = [1, 2, 3].map(|user| pending(&core, &request(user, &[3, 4, 5])));
    all[..2].iter().for_each(|pending| core.queue(Arc::clone(pending)).unwrap());
    assert!(gathered(&core, true).is_none(), "the batch is not full, and no one else comes");
    let mut queue = core.lock();
    assert_eq!((queue.gathering, queue.in_vain, queue.waiting()), (false, Some(2), 2));
    let next: Vec<_> = (0..2).map(|_| queue.take(true).unwrap()).collect();
    assert!(next.iter().zip(&all).all(|(next, pending)| Arc::ptr_eq(next, pending)), "in the order that they had");
    next.into_iter().rev().for_each(|pending| queue.put_back(pending));
    drop(queue);
    let stats = kv_stats(&core);
    assert_eq!((stats.resident_users, stats.tokens_new, stats.free_pages), (0, 0, stats.pages), "no one is held");
    // One that can not be served is one of those who are waited for.
    let gap = pending(&core, &RankRequest { start: Some(9), user_keys: Vec::new(), ..request(4, &[3]) });
    core.queue(Arc::clone(&gap)).unwrap();
    assert!(gathered(&core, true).is_none() && !gap.has_ended());
    assert_eq!((core.waiting(), core.lock().in_vain), (3, Some(3)));
    gap.end(Err(crate::runtime::cancelled()));
    core.queue(Arc::clone(&all[2])).unwrap();
    let (workspace, batch) = gathered(&core, true).unwrap();
    assert!(batch.iter().zip(&all).all(|(member, pending)| Arc::ptr_eq(&member.pending, pending)));
    assert_eq!((batch.len(), workspace.sizes().sequences), (3, 3));
    let (stats, queue) = (kv_stats(&core), core.lock());
    assert!(stats.free_pages < stats.pages && !queue.gathering && queue.waiting() == 0);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn whoever_ends_while_a_batch_is_put_together_is_not_in_it() {
    let folder = Folder::new();
    let store = failing(&folder);
    let core = core(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, Some(store.clone()));
    let [first, second] = [1, 2].map(|user| {
        let work = PreparedRequest::new(&core.runner.current(), &request(user, &[3, 4, 5])).unwrap();
        Pending::new(work, None, true, false, &core.counters)
    });
    // Its store is asked for the second's history when the first is in the batch.
    let cancelled = Arc::clone(&first);
    let cancel = move || cancelled.end(Err(crate::runtime::cancelled()));
    *store.happens.lock() = Some((2, Box::new(cancel)));
    [&first, &second].into_iter().for_each(|pending| core.queue(Arc::clone(pending)).unwrap());
    assert!(gathered(&core, true).is_none(), "it is not full without the first");
    assert!(first.has_ended() && core.waiting() == 1 && core.lock().in_vain.is_none());
    let third = pending(&core, &request(1, &[3]));
    core.queue(Arc::clone(&third)).unwrap();
    let (workspace, batch) = gathered(&core, true).unwrap();
    assert!(batch.iter().zip([second, third]).all(|(member, pending)| Arc::ptr_eq(&member.pending, &pending)));
    assert_eq!((batch.len(), workspace.sizes().sequences), (2, 2));
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn whoever_comes_while_a_batch_takes_long_to_put_together_does_not_wait_for_it() {
    let folder = Folder::new();
    let store = failing(&folder);
    let max_delay = Duration::from_millis(200);
    let core = core(EngineOptions { instances: 2, max_batch: 3, max_delay, ..options() }, Some(store.clone()));
    // The first takes as long as the second waits, and is told when that was answered.
    let (told, answered) = std::sync::mpsc::channel();
    let (looked, looks) = std::sync::mpsc::channel();
    let wait = move || {
        looked.send(()).unwrap();
        answered.recv_timeout(LONG / 2).unwrap();
    };
    *store.happens.lock() = Some((1, Box::new(wait)));
    std::thread::scope(|scope| {
        let _workers = [(); 2].map(|()| scope.spawn(|| core.work()));
        // Both have nothing to do, and sleep.
        std::thread::sleep(Duration::from_millis(100));
        let ask = |user| {
            let asked = pending(&core, &request(user, &[3, 4, 5]));
            core.queue(Arc::clone(&asked)).unwrap();
            asked
        };
        let first = ask(1);
        looks.recv_timeout(LONG).unwrap();
        let second = ask(2);
        let answer = second.wait();
        let _ = told.send(());
        core.stop();
        assert_eq!(answer.unwrap().batched_with, 0);
        first.wait().unwrap();
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn what_comes_from_the_store_is_counted_once() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let core = core(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, Some(Arc::new(store)));
    let ran = |items: &[i64]| {
        core.queue(pending(&core, &request(1, items))).unwrap();
        assert!(gathered(&core, true).is_none());
        let (mut workspace, batch) = gathered(&core, false).unwrap();
        let mut outcomes = Vec::new();
        core.run(&mut workspace, batch, &mut outcomes);
        core.lock().done(1);
        outcomes.pop().unwrap().1.unwrap()
    };
    let computed = ran(&[3, 4, 5]).computed_rows;
    core.runner.current().kv.as_ref().unwrap().evict(Users::All, Tiers::RESIDENT).unwrap();
    let again = ran(&[3, 4, 5, 6, 7]);
    let stats = kv_stats(&core);
    assert_eq!((stats.tokens_from_store, stats.tokens_from_pool), (again.cached_rows, 0));
    assert!(again.cached_rows > 0 && stats.tokens_new == computed + again.computed_rows);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn whoever_waits_for_others_for_long_is_not_held() {
    let core = core(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, None);
    let [first, second] = [1, 2].map(|user| pending(&core, &request(user, &[3, 4, 5])));
    std::thread::scope(|scope| {
        scope.spawn(|| core.work());
        core.queue(Arc::clone(&first)).unwrap();
        let begun = Instant::now();
        while core.lock().in_vain.is_none() && begun.elapsed() < LONG / 2 {
            std::thread::yield_now();
        }
        let in_vain = core.lock().in_vain;
        let (waiting, forgotten) = (core.waiting(), core.runner.current().forget(1, &mut Vec::new()));
        core.queue(Arc::clone(&second)).unwrap();
        core.stop();
        assert_eq!(
            (in_vain, waiting),
            (Some(1), 1),
            "no one came, and it is not another's turn before the batch is full"
        );
        assert!(!forgotten.unwrap(), "there is nothing of it yet");
        assert_eq!(first.wait().unwrap().batched_with, 1);
    });
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn what_can_not_be_added_leaves_the_others_as_they_were() {
    let core = core(options(), None);
    let mut workspace = Workspace::default();
    let [(first, of_first), (mut second, of_second)] = [1, 2].map(|user| {
        let work = PreparedRequest::new(&core.runner.current(), &request(user, &[3, 4, 5])).unwrap();
        let ready = history::prepare(&work, &core.runner.events, &mut workspace.items).unwrap();
        (work, ready)
    });
    workspace.clear(first.serving.layout.features.len());
    core.runner.add(&mut workspace, &first, &of_first).unwrap();
    // As if another version had been told of it, whose table was larger.
    second.known_events = false;
    second.events[0] = 1 << 40;
    assert_eq!(core.runner.add(&mut workspace, &second, &of_second).unwrap_err().argument(), Some("events"));
    let alone = rank(&core, &request(3, &[3, 4, 5])).unwrap();
    assert_eq!(workspace::run(&mut workspace, &first.serving, None).unwrap().scores, alone.scores);
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn who_finds_no_room_beside_others_loses_nothing() {
    let folder = Folder::new();
    let store: Arc<dyn Store> = Arc::new(DiskStore::open(folder.path(), &StoreOptions::default()).unwrap());
    let core = core(EngineOptions { kv: Some(Pages::Count(10)), ..options() }, Some(store));
    let serving = core.runner.current();
    let page = u64::from(serving.folder.kv.page_size);
    // Of four full pages and of six, which is more than half of all.
    let events = [(1, 4), (2, 6)].map(|(user, pages)| {
        let count = (1..).find(|&events| serving.layout.row_of(events) >= pages * page).unwrap();
        assert_eq!(serving.layout.row_of(count), pages * page);
        rank(&core, &request(user, &vec![3; count as usize])).unwrap();
        count
    });
    let one_more = |user: u64| RankRequest { start: Some(events[user as usize - 1]), ..request(user, &[4]) };
    let prepare = |user: u64| {
        let work = PreparedRequest::new(&serving, &one_more(user)).unwrap();
        history::prepare(&work, &core.runner.events, &mut Vec::new())
    };
    let first = prepare(1).unwrap();
    assert_eq!(prepare(2).err().unwrap().status(), Status::Capacity);
    drop(first);
    assert_eq!(prepare(2).unwrap().cached, serving.layout.row_of(events[1]));
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn who_has_a_request_that_runs_is_not_forgotten() {
    // Without keys and values, which would say so too.
    let core = core(EngineOptions { kv: None, ..options() }, None);
    rank(&core, &request(7, &[3, 4, 5])).unwrap();
    let workspace = core.lock().at_once(7).unwrap();
    assert_eq!(forget_events(&core, 7).unwrap_err().status(), Status::Busy);
    assert!(!forget_events(&core, 8).unwrap());
    core.lock().done(7);
    core.lock().give_back(workspace, true);
    // One that waits has found nothing yet.
    core.queue(pending(&core, &request(7, &[3]))).unwrap();
    assert!(forget_events(&core, 7).unwrap() && !forget_events(&core, 7).unwrap());
}

type Happening = Box<dyn FnOnce() + Send>;

/// A store that panics when something is to be removed: in the middle of a commit that replaces events.
struct Failing {
    store: DiskStore,
    /// How often it is still going to.
    left: AtomicUsize,
    /// What happens when this user's history is first looked for.
    happens: Mutex<Option<(u64, Happening)>>,
}

fn failing(folder: &Folder) -> Arc<Failing> {
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    Arc::new(Failing { store, left: 0.into(), happens: Mutex::default() })
}

impl Store for Failing {
    fn claim(&self, space: u64) -> bool {
        self.store.claim(space)
    }

    fn release(&self, space: u64) {
        self.store.release(space);
    }

    fn find(&self, key: Key) -> Option<Found> {
        let happens = self.happens.lock().take_if(|(user, _)| *user == key.user);
        if let Some((_, happens)) = happens {
            happens();
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

    fn users(&self, space: u64) -> Vec<u64> {
        self.store.users(space)
    }

    fn flush(&self) -> Result<()> {
        self.store.flush()
    }
}

#[test]
#[cfg_attr(miri, ignore = "opens a model")]
fn a_commit_that_fails_leaves_nothing_that_is_out_of_date() {
    let folder = Folder::new();
    let store = failing(&folder);
    let core = core(options(), Some(store.clone()));
    let alone = self::core(EngineOptions { kv: None, remember_bytes: 0, ..options() }, None);
    let told: Vec<i64> = (1..=30).collect();
    let edited: Vec<i64> = told.iter().map(|&item| if item == 5 { 39 } else { item }).collect();
    let next = |from: usize| RankRequest { start: Some(from as u64), user_keys: vec![], ..request(7, &told[from..]) };

    rank(&core, &request(7, &told)).unwrap();
    core.runner.current().kv.as_ref().unwrap().offload(Users::All).unwrap();
    store.left.store(1, Ordering::Relaxed);
    let response = rank(&core, &request(7, &edited)).unwrap();
    assert_eq!(store.left.load(Ordering::Relaxed), 0, "the commit has failed");
    assert_eq!(response.scores, rank(&alone, &request(7, &edited)).unwrap().scores, "the answer is right all the same");
    // What was told before the edit must not be taken for what the user did.
    let error = rank(&core, &next(30)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("start")), "{error}");
    // The user is as good as any other from then on.
    let response = rank(&core, &request(7, &edited)).unwrap();
    assert_eq!(response.cached_rows, 0);
    assert_eq!(rank(&core, &request(7, &edited)).unwrap().computed_rows, 0);

    // Not even forgetting works: others are none the worse for it.
    store.left.store(2, Ordering::Relaxed);
    core.runner.current().kv.as_ref().unwrap().offload(Users::All).unwrap();
    rank(&core, &request(7, &told)).unwrap();
    assert_eq!(store.left.load(Ordering::Relaxed), 0, "both have failed");
    assert_eq!(rank(&core, &request(8, &told)).unwrap().scores, rank(&alone, &request(8, &told)).unwrap().scores);
    assert_eq!(rank(&core, &request(7, &told)).unwrap().scores, rank(&alone, &request(7, &told)).unwrap().scores);
}
