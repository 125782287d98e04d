//! Requests in one batch.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pagoda::engine::{Columns, Engine, EngineOptions, Events, RankRequest, RankResponse};
use pagoda::{Error, KvSize, ModelOptions, Status};
use pagoda_test_support::Random;

use crate::cases::{cases, close, open, options};

/// A coalescing window longer than any test: a batch runs when it is full.
const LONG: Duration = Duration::from_secs(60);

/// An engine that runs a batch when it has this many requests.
fn full(model: &str, max_batch: u32) -> Engine {
    open(model, EngineOptions { max_batch, max_delay: LONG, ..options() })
}

/// Sends requests, and returns a channel for each outcome.
fn send(engine: &Engine, requests: &[RankRequest]) -> Vec<Receiver<Result<RankResponse, Error>>> {
    let one = |request: &RankRequest| {
        let (told, outcome) = channel();
        engine.rank_async(request, move |outcome| told.send(outcome).unwrap()).unwrap();
        outcome
    };
    requests.iter().map(one).collect()
}

fn wait(outcome: &Receiver<Result<RankResponse, Error>>) -> Result<RankResponse, Error> {
    outcome.recv_timeout(LONG).expect("every request ends")
}

#[test]
fn scores_do_not_depend_on_the_other_requests_of_a_batch() {
    for model in ["gather", "bag", "keyed", "uncached"] {
        let users = cases(model);
        let engine = full(model, users.len() as u32);
        let alone = open(model, options());
        for steps in [1, 2] {
            let requests: Vec<_> = users.iter().map(|case| case.whole(case.len() * steps / 2)).collect();
            for (request, outcome) in requests.iter().zip(send(&engine, &requests)) {
                let response = wait(&outcome).unwrap();
                assert_eq!(response.batched_with, users.len() - 1);
                close(&response.scores, &alone.rank(request).unwrap().scores, 1e-5);
            }
        }
        let stats = engine.stats();
        assert_eq!((stats.answered, stats.failed, stats.batches), (2 * users.len() as u64, 0, 2));
    }
    let text = pagoda::metrics::text();
    for name in
        ["requests_total{status=\"OK\"}", "rows_total{kind=\"cached\"}", "batch_requests_count", "queue_seconds_sum"]
    {
        assert!(text.contains(&format!("pagoda_engine_{name}")), "{name} is not in {text}");
    }
}

#[test]
fn many_threads_and_users() {
    let (model, threads, rounds) = ("bag", 8, 60);
    let users = cases(model);
    for (instances, max_delay) in [(1, 0), (2, 0), (2, 1)] {
        let max_delay = Duration::from_millis(max_delay);
        let kv_size = Some(KvSize::Pages(64));
        let engine = open(model, EngineOptions { instances, max_delay, kv_size, max_batch: 5, ..options() });
        let batched = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (engine, users, batched) = (&engine, &users, &batched);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    for _ in 0..rounds {
                        let case = &users[random.below(users.len())];
                        let step = random.pick(&case.steps());
                        let mut request = case.whole(step);
                        request.user += 1000 * random.below_u64(4);
                        let response = engine.rank(&request).unwrap();
                        case.check(&response, step);
                        batched.fetch_add(response.batched_with, Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(batched.into_inner() > 0, "no batch had two requests");
        let stats = engine.stats();
        assert_eq!((stats.answered, stats.failed, stats.waiting), (threads * rounds, 0, 0));
        assert!(engine.kv_stats().unwrap().evicted_owners > 0);
    }
}

#[test]
fn requests_of_one_user_run_in_order() {
    let case = &cases("gather")[0];
    // Two instances, each of which could take one.
    let engine = open("gather", EngineOptions { instances: 2, ..options() });
    let requests: Vec<_> = (0..case.len()).map(|event| case.request(event, event + 1)).collect();
    for (event, outcome) in send(&engine, &requests).iter().enumerate() {
        let response = wait(outcome).unwrap();
        assert_eq!(response.computed_rows, if event == 0 { 4 } else { 2 });
        if case.steps().contains(&(event + 1)) {
            case.check(&response, event + 1);
        }
    }
}

#[test]
fn requests_that_arrive_one_by_one_run_in_one_batch() {
    let users = cases("gather");
    // The other instances are idle, and do not start a batch of their own.
    let engine = open("gather", EngineOptions { instances: 3, max_batch: 4, max_delay: LONG, ..options() });
    for _ in 0..40 {
        let mut outcomes = Vec::new();
        for case in &users[..4] {
            outcomes.extend(send(&engine, &[case.whole(case.len())]));
        }
        for (case, outcome) in users.iter().zip(&outcomes) {
            let response = wait(outcome).unwrap();
            assert_eq!(response.batched_with, 3);
            case.check(&response, case.len());
        }
    }
    assert_eq!(engine.stats().batches, 40);
}

#[test]
fn a_request_that_arrives_while_a_worker_spins_or_sleeps_is_answered() {
    let users = cases("gather");
    let model = ModelOptions { sleep_when_idle: false, ..options().model };
    for instances in [1, 3] {
        let engine = open("gather", EngineOptions { model: model.clone(), instances, ..options() });
        for pause in [0, 50, 190, 210, 1000].repeat(8) {
            std::thread::sleep(Duration::from_micros(pause));
            let outcomes = send(&engine, &[users[0].whole(users[0].len()), users[1].whole(users[1].len())]);
            for (case, outcome) in users.iter().zip(&outcomes) {
                case.check(&wait(outcome).unwrap(), case.len());
            }
        }
        assert_eq!(engine.stats().failed, 0);
    }
}

#[test]
fn two_requests_of_one_user_are_not_in_one_batch() {
    let users = cases("gather");
    let engine = full("gather", 2);
    let (one, other) = (&users[0], &users[1]);
    let half = one.len() / 2;
    let outcomes = send(&engine, &[one.whole(half), one.request(half, one.len()), other.whole(4), other.whole(4)]);
    let responses: Vec<_> = outcomes.iter().map(|outcome| wait(outcome).unwrap()).collect();
    assert!(responses.iter().all(|response| response.batched_with == 1));
    one.check(&responses[0], half);
    one.check(&responses[1], one.len());
}

#[test]
fn a_user_with_many_requests_does_not_delay_others() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { max_batch: 1, ..options() });
    let ended = Arc::new(Mutex::new(Vec::new()));
    let note = |user: u64| {
        let ended = Arc::clone(&ended);
        move |outcome: Result<RankResponse, Error>| {
            outcome.unwrap();
            ended.lock().unwrap().push(user);
        }
    };
    // The first callback blocks the only worker until all requests have arrived.
    let (all_are_there, go_on) = channel();
    let first = note(0);
    let waits = move |outcome| {
        first(outcome);
        go_on.recv_timeout(LONG).unwrap();
    };
    engine.rank_async(&users[0].whole(20), waits).unwrap();
    for _ in 1..20 {
        engine.rank_async(&users[0].whole(20), note(0)).unwrap();
    }
    engine.rank_async(&users[1].whole(4), note(1)).unwrap();
    engine.rank_async(&users[2].whole(3), note(2)).unwrap();
    all_are_there.send(()).unwrap();
    drop(engine);
    let ended = ended.lock().unwrap();
    assert_eq!(ended.len(), 22, "closing an engine answers the waiting requests");
    // Of the user with many requests, one had run and one may have been next.
    let mut first = ended[..4].to_vec();
    first.sort_unstable();
    assert_eq!(first, [0, 0, 1, 2]);
}

#[test]
fn a_request_that_can_not_run_fails_alone() {
    let users = cases("gather");
    let engine = full("gather", 4);
    let gap = RankRequest { user: 9, ..users[0].request(5, 6) };
    let requests = [users[0].whole(11), gap, users[1].whole(9), users[2].whole(3)];
    let outcomes: Vec<_> = send(&engine, &requests).iter().map(wait).collect();
    assert_eq!(outcomes[1].as_ref().unwrap_err().status(), Status::NotFound);
    for (case, outcome, events) in [(0, 0, 11), (1, 2, 9), (2, 3, 3)] {
        let response = outcomes[outcome].as_ref().unwrap();
        users[case].check(response, events);
        assert_eq!(response.batched_with, 2);
    }
}

/// A request of a model that looks up the rating of an event without a check.
fn with_rating(user: u64, rating: i64) -> RankRequest {
    RankRequest {
        user,
        events: Events {
            keys: Columns::new().with("item", [3]).with("genre", [1]).with("rating", [rating]),
            times: vec![],
        },
        candidates: Columns::new().with("item", [4, 5]).with("genre", [0, 2]),
        ..RankRequest::default()
    }
}

#[test]
fn a_failed_run_fails_only_the_request_that_caused_it() {
    let engine = full("guilty", 3);
    let expected: Vec<_> = {
        let alone = open("guilty", options());
        [1, 2].map(|rating| alone.rank(&with_rating(1, rating)).unwrap().scores).into()
    };
    for round in 0..2 {
        let requests = [with_rating(1, 1), with_rating(2, 900), with_rating(3, 2)];
        let outcomes: Vec<_> = send(&engine, &requests).iter().map(wait).collect();
        let error = outcomes[1].as_ref().unwrap_err();
        assert!(error.message().contains("idx=900"), "{error}");
        for (outcome, expected) in [&outcomes[0], &outcomes[2]].into_iter().zip(&expected) {
            let response = outcome.as_ref().unwrap();
            close(&response.scores, expected, 1e-5);
            assert_eq!(response.cached_rows, round, "the rows of the other requests are cached");
        }
        let stats = engine.kv_stats().unwrap();
        assert_eq!(stats.resident_tokens, 2);
    }
}

#[test]
fn a_history_that_is_larger_than_the_cache_fails_alone() {
    let users = cases("gather");
    let engine =
        open("gather", EngineOptions { kv_size: Some(KvSize::Pages(4)), max_batch: 3, max_delay: LONG, ..options() });
    let (long, short) = (&users[0], &users[2]);
    let requests = [long.whole(long.len()), short.whole(3), RankRequest { user: 1, ..short.whole(3) }];
    let outcomes: Vec<_> = send(&engine, &requests).iter().map(wait).collect();
    let error = outcomes[0].as_ref().unwrap_err();
    assert_eq!(error.status(), Status::Capacity, "{error}");
    outcomes[1..].iter().for_each(|outcome| short.check(outcome.as_ref().unwrap(), 3));
}

#[test]
fn a_request_that_finds_no_room_waits_for_others_to_end() {
    let users = cases("gather");
    let kv_size = Some(KvSize::Pages(9));
    for instances in [1, 3] {
        let engine = open("gather", EngineOptions { kv_size, instances, ..options() });
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let (engine, case) = (&engine, &users[[0, 4, 5][thread % 3]]);
                scope.spawn(move || {
                    for round in 0..20 {
                        let request = RankRequest { user: (thread * 100 + round) as u64, ..case.whole(case.len()) };
                        case.check(&engine.rank(&request).unwrap(), case.len());
                    }
                });
            }
        });
        assert_eq!(engine.stats().failed, 0);
    }
}

#[test]
fn a_batch_has_at_most_max_batch_rows() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { max_batch: 6, max_batch_rows: 60, max_delay: LONG, ..options() });
    let requests: Vec<_> = users.iter().map(|case| case.whole(case.len())).collect();
    let outcomes = send(&engine, &requests);
    drop(engine);
    let responses: Vec<_> = outcomes.iter().map(|outcome| wait(outcome).unwrap()).collect();
    for (case, response) in users.iter().zip(&responses) {
        case.check(response, case.len());
    }
    assert!(responses.iter().all(|response| response.batched_with < 5));
    assert!(responses.iter().any(|response| response.batched_with > 0));
}
