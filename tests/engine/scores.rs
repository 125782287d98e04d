//! The same scores for any state of the cache.

use pagoda::engine::{EngineOptions, EngineStore};
use pagoda::{KvSize, Offload, Status};
use pagoda_test_support::Folder;

use crate::cases::{Case, cases, close, open, options};

const MODELS: [&str; 4] = ["gather", "bag", "keyed", "uncached"];

/// The rows of a history: first those of the user, then those of each event.
fn rows(engine: &pagoda::Engine, events: usize) -> u64 {
    engine.folder().history_rows(events as u64)
}

#[test]
fn whole_histories_cold_and_warm() {
    for model in MODELS {
        let engine = open(model, options());
        for case in cases(model) {
            let request = case.whole(case.len());
            let cold = engine.rank(&request).unwrap();
            case.check(&cold, case.len());
            assert_eq!((cold.cached_rows, cold.computed_rows), (0, rows(&engine, case.len())), "{model}");
            assert_eq!((cold.tasks, cold.batched_with), (2, 0));
            let warm = engine.rank(&request).unwrap();
            case.check(&warm, case.len());
            let cached = if model == "uncached" { 0 } else { rows(&engine, case.len()) };
            assert_eq!(warm.cached_rows, cached, "{model}");
        }
    }
}

#[test]
fn without_a_cache() {
    for model in MODELS {
        for none in [None, Some(KvSize::Pages(0)), Some(KvSize::Bytes(0))] {
            let engine = open(model, EngineOptions { kv_size: none, ..options() });
            assert!(!engine.is_caching() && engine.kv_stats().is_none());
            for case in cases(model) {
                for _ in 0..2 {
                    let response = engine.rank(&case.whole(case.len())).unwrap();
                    case.check(&response, case.len());
                    assert_eq!(response.cached_rows, 0);
                }
            }
        }
    }
}

/// Sends a request at each step, with all events or with the new ones.
fn in_steps(engine: &pagoda::Engine, case: &Case, whole: bool) {
    let mut before = 0;
    for (index, step) in case.steps().into_iter().enumerate() {
        let request = if whole { case.whole(step) } else { case.request(before, step) };
        let response = engine.rank(&request).unwrap();
        case.check(&response, step);
        if engine.is_caching() {
            let cached = if index == 0 { 0 } else { rows(engine, before) };
            assert_eq!(response.cached_rows, cached, "user {} step {step}", case.user);
        }
        before = step;
    }
}

#[test]
fn histories_that_grow() {
    for model in MODELS {
        for whole in [true, false] {
            let engine = open(model, options());
            cases(model).iter().for_each(|case| in_steps(&engine, case, whole));
            // Without a cache the engine uses the event log.
            let off = open(model, EngineOptions { kv_size: None, ..options() });
            cases(model).iter().for_each(|case| in_steps(&off, case, whole));
        }
    }
}

#[test]
fn tables_in_files_and_in_the_graph_agree() {
    let (gather, bag) = (open("gather", options()), open("bag", options()));
    for case in cases("gather") {
        let (a, b) = (gather.rank(&case.whole(case.len())).unwrap(), bag.rank(&case.whole(case.len())).unwrap());
        close(&a.scores, &b.scores, 1e-6);
    }
    let tables = bag.tables();
    assert_eq!(tables.len(), 5);
    for name in tables {
        let stats = bag.table_stats(&name).unwrap();
        assert!(stats.keys > 0, "{name}");
        assert_eq!(stats.defaults, 0, "{name}: rows without a key are no misses");
    }
    assert!(gather.tables().is_empty());
    for (engine, words) in [(&gather, "in the graph"), (&bag, "ages")] {
        let error = engine.table_stats("nothing").unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::NotFound, Some("table")), "{error}");
        assert!(error.message().contains(words), "{error}");
    }
}

#[test]
fn evicted_users_come_back() {
    for model in ["gather", "bag", "keyed"] {
        let users = cases(model);
        // Room for the largest user and not much more.
        let pages = Some(KvSize::Pages(9));
        for whole in [true, false] {
            let engine = open(model, EngineOptions { kv_size: pages, ..options() });
            for round in 0..3 {
                for case in &users {
                    let last = case.len();
                    let from = if whole || round == 0 { 0 } else { last };
                    let response = engine.rank(&case.request(from, last)).unwrap();
                    case.check(&response, last);
                }
            }
            assert!(engine.kv_stats().unwrap().evicted_owners > 0);
        }
    }
}

#[test]
fn from_a_store_when_evicted_and_after_a_restart() {
    for model in ["gather", "bag"] {
        let users = cases(model);
        for offload in [Offload::OnEviction, Offload::AtCommit] {
            let folder = Folder::new();
            let store = Some(EngineStore::new(folder.path()));
            let with_store =
                || EngineOptions { kv_size: Some(KvSize::Pages(9)), store: store.clone(), offload, ..options() };
            let engine = open(model, with_store());
            for case in &users {
                let before = case.len() / 2;
                case.check(&engine.rank(&case.whole(before)).unwrap(), before);
            }
            for case in &users {
                let response = engine.rank(&case.request(case.len() / 2, case.len() - case.len() % 2)).unwrap();
                assert_eq!(response.cached_rows, rows(&engine, case.len() / 2), "user {}", case.user);
            }
            assert!(engine.kv_stats().unwrap().tokens_from_store > 0);
            drop(engine);
            let engine = open(model, with_store());
            for case in &users {
                let before = case.len() - case.len() % 2;
                // Nothing is remembered, and nothing need be.
                let mut request = case.request(before, case.len());
                if request.start.is_some() {
                    request.user_keys.clear();
                }
                let response = engine.rank(&request).unwrap();
                case.check(&response, case.len());
                assert_eq!(response.cached_rows, rows(&engine, before));
            }
        }
    }
}
