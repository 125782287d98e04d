//! Histories that are evicted from the pages of an engine and onloaded again are bit-identical, on both providers.

use std::sync::atomic::{AtomicBool, Ordering};

use pagoda::engine::{EngineOptions, GraphShape};
use pagoda::{Engine, KvSize, ModelOptions, Provider, RankResponse, Status};

use crate::cases::{Case, cases, open, options};

/// Threads that evict users while others send requests for them.
const LEAVING: usize = 2;
/// Too few for all users, and enough for two of the longest histories. With less, a request may drop its cached history
/// and compute all of it again.
const PAGES: u32 = 16;
/// How often each history grows from its beginning, at least, and at most: until one was onloaded. Threads that hardly run beside
/// others, on a busy machine, evict little.
const ROUNDS: usize = 3;
const MOST_ROUNDS: usize = 500;

/// Options with host memory for evicted histories. Batches have one request, so that each run has the same shape, and
/// therefore the same bits.
fn above_host(provider: Provider, pages: u32, graphs: &[GraphShape]) -> EngineOptions {
    EngineOptions {
        model: ModelOptions { provider, ..options().model },
        kv_size: Some(KvSize::Pages(pages)),
        host_bytes: 64 << 20,
        instances: 4,
        max_batch: 1,
        cuda_graphs: graphs.to_vec(),
        ..options()
    }
}

/// What must be equal: the bits of the scores, and the numbers of rows.
fn told(response: &RankResponse) -> (Vec<u32>, u64, u64) {
    let bits = response.scores.iter().map(|score| score.to_bits()).collect();
    (bits, response.cached_rows, response.computed_rows)
}

/// Scores the candidates after a history that is known already.
fn again(engine: &Engine, case: &Case, events: usize) -> RankResponse {
    engine.rank(&case.request(events, events)).unwrap()
}

fn comes_back(options: &EngineOptions) {
    ["gather", "half"].into_iter().for_each(|model| check_back(model, options.clone()));
}

fn check_back(model: &str, options: EngineOptions) {
    let engine = open(model, options);
    for case in cases(model) {
        for step in case.steps().into_iter().filter(|&step| step > 0) {
            engine.rank(&case.whole(step)).unwrap();
            let resident = again(&engine, &case, step);
            assert_eq!(resident.computed_rows, 0, "all of it is cached");
            for _ in 0..3 {
                let before = engine.kv_stats().unwrap().tokens_from_store;
                assert_eq!(engine.unload(&[case.user]).unwrap(), 1);
                assert_eq!(told(&again(&engine, &case, step)), told(&resident), "after {step} events");
                let came = engine.kv_stats().unwrap().tokens_from_store - before;
                assert_eq!(came, resident.cached_rows, "it was onloaded, and not computed again");
            }
        }
    }
}

/// Sends a history event by event, and returns the responses.
fn grow(engine: &Engine, case: &Case) -> Vec<(Vec<u32>, u64, u64)> {
    (0..case.len()).map(|event| told(&engine.rank(&case.request(event, event + 1)).unwrap())).collect()
}

/// Evicts histories all the time while requests use them, in a pool that is too small for all users.
fn race(options: EngineOptions) {
    let all = cases("gather");
    let quiet = open("gather", EngineOptions { kv_size: Some(KvSize::Pages(256)), ..options.clone() });
    let expected: Vec<_> = all.iter().map(|case| grow(&quiet, case)).collect();
    let engine = open("gather", options);
    let (done, users) = (AtomicBool::new(false), all.iter().map(|case| case.user).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..LEAVING {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    for user in &users {
                        match engine.unload(&[*user]) {
                            Ok(_) => {}
                            Err(error) => assert_eq!(error.status(), Status::Busy, "{error}"),
                        }
                    }
                }
            });
        }
        let asking: Vec<_> = all
            .iter()
            .zip(&expected)
            .map(|(case, expected)| {
                let engine = &engine;
                scope.spawn(move || {
                    for round in 0..MOST_ROUNDS {
                        if round >= ROUNDS && engine.kv_stats().unwrap().tokens_from_store > 0 {
                            break;
                        }
                        for (event, (found, expected)) in grow(engine, case).iter().zip(expected).enumerate() {
                            assert_eq!(found, expected, "user {}, round {round}, event {event}", case.user);
                        }
                        forget(engine, case.user);
                    }
                })
            })
            .collect();
        let asked: Vec<_> = asking.into_iter().map(|thread| thread.join()).collect();
        // Before a panic continues: the other threads would never end.
        done.store(true, Ordering::Relaxed);
        asked.into_iter().for_each(|result| result.unwrap());
    });
    let stats = engine.kv_stats().unwrap();
    assert!(stats.evicted_owners > 0 && stats.tokens_from_store > 0, "{stats:?}: they were evicted and onloaded");
    assert_eq!((stats.failed_offloads, stats.failed_onloads), (0, 0), "{stats:?}");
}

/// Another thread may be evicting the user.
fn forget(engine: &Engine, user: u64) {
    while let Err(error) = engine.forget(&[user]) {
        assert_eq!(error.status(), Status::Busy, "{error}");
    }
}

pub fn come_back(provider: Provider) {
    comes_back(&above_host(provider, 256, &[]));
}

pub fn racing(provider: Provider) {
    race(above_host(provider, PAGES, &[]));
}

/// One user, and more rows than any request has.
const SHAPE: GraphShape = GraphShape { users: 1, rows: 64, candidates: 0, pages: 0 };

#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn histories_that_come_back_into_a_graph() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    comes_back(&above_host(Provider::Cuda, 256, &[SHAPE]));
}

#[test]
#[ignore = "needs a GPU and ONNX Runtime's CUDA provider"]
fn histories_that_leave_while_graphs_run() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    race(above_host(Provider::Cuda, PAGES, &[SHAPE]));
}
