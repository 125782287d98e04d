//! Swaps of the model version while requests run.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pagoda::engine::{Columns, Engine, EngineOptions, EngineStore, Events, ModelFolder, RankRequest};
use pagoda::{KvSize, Status};
use pagoda_test_support::{Folder, Random};

use crate::cases::{Case, cases, close, edited, folder, open, options};

fn version(model: &str) -> String {
    ModelFolder::open(folder(model)).unwrap().version.clone()
}

/// Swaps, and retries while the version is still being closed.
pub fn swap(engine: &Engine, model: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = engine.swap(folder(model)) {
        assert!(error.status() == Status::Busy && Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn under_load_no_request_fails_and_no_versions_are_mixed() {
    let here = Folder::new();
    for store in [None, Some(EngineStore::new(here.path()))] {
        let users: BTreeMap<String, Vec<Case>> =
            ["gather", "second"].map(|model| (version(model), cases(model))).into();
        let engine =
            open("gather", EngineOptions { instances: 2, kv_size: Some(KvSize::Pages(40)), store, ..options() });
        let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (engine, users, stop, answered) = (&engine, &users, &stop, &answered);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    while !stop.load(Ordering::Relaxed) {
                        let number = random.below(6);
                        let case = &users.values().next().unwrap()[number];
                        let user = case.user + 1000 * thread;
                        let half = case.len() / 2;
                        for (from, to) in [(0, half), (half, case.len())] {
                            let response = engine.rank(&RankRequest { user, ..case.request(from, to) }).unwrap();
                            users[&*response.version][number].check(&response, to);
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
            for model in ["second", "gather", "second"] {
                let before = answered.load(Ordering::Relaxed);
                let deadline = Instant::now() + Duration::from_secs(60);
                while answered.load(Ordering::Relaxed) < before + 100 && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                swap(&engine, model);
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(engine.folder().version, version("second"));
        assert_eq!(engine.stats().failed, 0);
    }
}

#[test]
fn nothing_of_the_old_version_is_used_and_events_are_remembered() {
    let (old, new) = (cases("gather"), cases("second"));
    let engine = open("gather", options());
    let last = old[0].len();
    old[0].check(&engine.rank(&old[0].whole(last - 1)).unwrap(), last - 1);
    engine.swap(folder("second")).unwrap();
    // Only the new events are sent: the rest is computed again from the event log.
    let response = engine.rank(&old[0].request(last - 1, last)).unwrap();
    new[0].check(&response, last);
    assert_eq!((response.cached_rows, &*response.version), (0, version("second").as_str()));
    assert_eq!(engine.rank(&old[0].request(last, last)).unwrap().computed_rows, 0);
}

#[test]
fn with_a_store_each_version_finds_its_own() {
    let (old, new) = (cases("gather"), cases("second"));
    let here = Folder::new();
    let engine = open("gather", EngineOptions { store: Some(EngineStore::new(here.path())), ..options() });
    let last = old[0].len();
    engine.rank(&old[0].whole(last)).unwrap();
    engine.swap(folder("second")).unwrap();
    assert_eq!(engine.rank(&old[0].whole(last)).unwrap().cached_rows, 0);
    swap(&engine, "gather");
    let back = engine.rank(&old[0].whole(last)).unwrap();
    old[0].check(&back, last);
    assert_eq!(back.computed_rows, 0);
    drop(engine);
    let engine = open("second", EngineOptions { store: Some(EngineStore::new(here.path())), ..options() });
    let again = engine.rank(&old[0].whole(last)).unwrap();
    new[0].check(&again, last);
    assert_eq!(again.computed_rows, 0);
}

#[test]
fn an_edit_sent_to_another_version_is_known_after_swapping_back() {
    let case = &cases("gather")[0];
    let plain = open("gather", EngineOptions { kv_size: None, ..options() });
    for late in [false, true] {
        let here = Folder::new();
        let engine = open("gather", EngineOptions { store: Some(EngineStore::new(here.path())), ..options() });
        engine.rank(&case.whole(22)).unwrap();
        swap(&engine, "second");
        let edit = |mut request: RankRequest| {
            request.events.keys = edited(&request.events.keys, "item", 9, 39);
            request
        };
        engine.rank(&edit(case.whole(22))).unwrap();
        swap(&engine, "gather");
        // A request without the edited events changes nothing.
        if late {
            engine.rank(&case.whole(2)).unwrap();
        }
        let got = engine.rank(&case.request(22, 23)).unwrap();
        close(&got.scores, &plain.rank(&edit(case.whole(23))).unwrap().scores, 1e-5);
        assert_eq!(engine.rank(&case.request(23, 23)).unwrap().computed_rows, 0);
    }
}

#[test]
fn a_swap_that_fails_changes_nothing() {
    let users = cases("gather");
    let engine = open("gather", options());
    let last = users[0].len();
    engine.rank(&users[0].whole(last)).unwrap();
    let error = engine.swap(folder("nowhere")).unwrap_err();
    assert_eq!(error.status(), Status::NotFound, "{error}");
    engine.swap(folder("gather")).unwrap();
    let response = engine.rank(&users[0].whole(last)).unwrap();
    users[0].check(&response, last);
    assert_eq!(response.computed_rows, 0);
}

#[test]
fn a_model_with_other_features_starts_without_events() {
    let (old, new) = (cases("gather"), cases("keyed"));
    let engine = open("gather", options());
    engine.rank(&old[0].whole(9)).unwrap();
    engine.swap(folder("keyed")).unwrap();
    assert_eq!(engine.stats().remembered_users, 0);
    assert_eq!(engine.rank(&new[0].request(9, 10)).unwrap_err().status(), Status::NotFound);
    new[0].check(&engine.rank(&new[0].whole(new[0].len())).unwrap(), new[0].len());
}

#[test]
fn the_old_model_is_freed() {
    let engine = open("gather", options());
    let old = Arc::downgrade(&engine.model());
    engine.swap(folder("second")).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while old.strong_count() > 0 {
        assert!(Instant::now() < deadline, "it is still open");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn remembered_events_that_the_new_tables_do_not_have_are_rejected() {
    let engine = open("guilty", options());
    let event = |user: u64, item: i64, start: Option<u64>, candidate: i64| RankRequest {
        user,
        start,
        events: Events {
            keys: Columns::new().with("item", [item]).with("genre", [1]).with("rating", [2]),
            times: vec![],
        },
        candidates: Columns::new().with("item", [candidate]).with("genre", [1]),
        ..RankRequest::default()
    };
    engine.rank(&event(7, 3, None, 4)).unwrap();
    swap(&engine, "keyed");
    // The events that the earlier version received are remembered, and have to be computed again.
    let known = 1_000_000_005_887;
    let error = engine.rank(&event(7, known, Some(1), known)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("events")), "{error}");
    assert!(error.message().contains("has the key 3, which table \"items\" does not have"), "{error}");
    engine.rank(&event(8, known, None, known)).unwrap();
}
