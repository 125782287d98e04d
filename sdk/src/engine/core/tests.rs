//! What no caller can bring about: who is woken when, and a store that fails where none should.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use pagoda_test_support::Folder;

use super::*;
use crate::config::{ModelOptions, Pages, Provider, StoreOptions};
use crate::engine::{Columns, Events, ModelFolder, RankRequest};
use crate::store::{DiskStore, Found, History, Key, Record, Room, Ticket};

/// Longer than anything takes, so that no test waits for ever for what is lost.
const LONG: Duration = Duration::from_secs(20);

/// A model of the tests, open.
pub(in crate::engine) fn serving(options: &EngineOptions, store: Option<&Arc<dyn Store>>) -> Arc<Serving> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/engine/gather");
    Serving::open(ModelFolder::open(folder).unwrap(), options, store).unwrap()
}

/// A user's whole history: the items of its events.
pub(in crate::engine) fn request(user: u64, items: &[i64]) -> RankRequest {
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
pub(in crate::engine) fn options() -> EngineOptions {
    let model =
        ModelOptions { provider: Provider::Cpu, intra_op_threads: 1, sleep_when_idle: true, ..ModelOptions::default() };
    EngineOptions { model, kv: Some(Pages::Count(64)), ..EngineOptions::default() }
}

/// What the threads of an engine share, without threads.
fn core(options: EngineOptions, store: Option<Arc<dyn Store>>) -> Core {
    let serving = serving(&options, store.as_ref());
    Core::new(options, store, serving)
}

fn pending(core: &Core, request: &RankRequest) -> Arc<Pending> {
    Pending::new(Work::new(&core.current(), request).unwrap(), Some(LONG), false, false, &core.counters)
}

fn rank(core: &Core, request: &RankRequest) -> Result<RankResponse> {
    let pending = pending(core, request);
    core.run_or_queue(&pending)?;
    pending.wait()
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
            [&first, &second].into_iter().for_each(|pending| queue.push(Arc::clone(pending)).unwrap());
            queue.instance().unwrap()
        };
        let batch = core.gather(&mut workspace, None, &mut Vec::new());
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
fn rows_are_made_while_a_request_waits_for_others() {
    let core = core(EngineOptions { max_batch: 2, max_delay: LONG, ..options() }, None);
    let [first, second] = [1, 2].map(|user| pending(&core, &request(user, &[3, 4, 5])));
    std::thread::scope(|scope| {
        scope.spawn(|| core.work());
        core.queue(Arc::clone(&first)).unwrap();
        let begun = Instant::now();
        while first.work.own.get().is_none() && begun.elapsed() < LONG / 2 {
            std::thread::yield_now();
        }
        let (made, waiting) = (first.work.own.get().is_some(), core.waiting());
        core.queue(Arc::clone(&second)).unwrap();
        core.stop();
        assert!(made, "it waits, and nothing is done about it");
        assert_eq!(waiting, 1, "it is not another's turn before the batch is full");
        assert_eq!(first.wait().unwrap().batched_with, 1);
    });
}

/// A store that panics when something is to be removed: in the middle of a commit that replaces events.
struct Failing {
    store: DiskStore,
    /// How often it is still going to.
    left: AtomicUsize,
}

impl Store for Failing {
    fn claim(&self, space: u64) -> bool {
        self.store.claim(space)
    }

    fn release(&self, space: u64) {
        self.store.release(space);
    }

    fn find(&self, key: Key) -> Option<Found> {
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
    let store = DiskStore::open(folder.path(), &StoreOptions::default()).unwrap();
    let store = Arc::new(Failing { store, left: 0.into() });
    let core = core(options(), Some(store.clone()));
    let alone = self::core(EngineOptions { kv: None, remember_events: 0, ..options() }, None);
    let told: Vec<i64> = (1..=30).collect();
    let edited: Vec<i64> = told.iter().map(|&item| if item == 5 { 39 } else { item }).collect();
    let next = |from: usize| RankRequest { start: Some(from as u64), user_keys: vec![], ..request(7, &told[from..]) };

    rank(&core, &request(7, &told)).unwrap();
    core.current().kv.as_ref().unwrap().offload(crate::kv::Users::All).unwrap();
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
    core.current().kv.as_ref().unwrap().offload(crate::kv::Users::All).unwrap();
    rank(&core, &request(7, &told)).unwrap();
    assert_eq!(store.left.load(Ordering::Relaxed), 0, "both have failed");
    assert_eq!(rank(&core, &request(8, &told)).unwrap().scores, rank(&alone, &request(8, &told)).unwrap().scores);
    assert_eq!(rank(&core, &request(7, &told)).unwrap().scores, rank(&alone, &request(7, &told)).unwrap().scores);
}
