//! Requests that end early: cancelled, timed out, or rejected by a full queue.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use pagoda::engine::{Columns, Engine, EngineOptions, RankRequest};
use pagoda::{Cancel, Status};

use crate::cases::{Case, cases, open, options};

/// The coalescing window of a request without others.
const LONG: Duration = Duration::from_secs(60);
/// The limit for "at once" on a busy machine.
const SOON: Duration = Duration::from_secs(20);

fn slow() -> Engine {
    open("gather", EngineOptions { max_batch: 2, max_delay: LONG, ..options() })
}

/// The engine still answers.
fn goes_on(engine: &Engine, users: &[Case]) {
    std::thread::scope(|scope| {
        for case in &users[..2] {
            scope.spawn(|| case.check(&engine.rank(&case.whole(case.len())).unwrap(), case.len()));
        }
    });
}

#[test]
fn cancelled_before_and_while_it_waits() {
    let users = cases("gather");
    let engine = slow();
    let cancel = Arc::new(Cancel::new());
    let request = RankRequest { cancel: Some(Arc::clone(&cancel)), ..users[2].whole(3) };
    let (told, outcome) = channel();
    engine.rank_async(&request, move |outcome| told.send(outcome).unwrap()).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| engine.rank(&RankRequest { user: users[2].user, ..request.clone() }));
        let begun = Instant::now();
        while engine.stats().waiting < 2 && begun.elapsed() < SOON {
            std::thread::yield_now();
        }
        cancel.trigger();
        assert_eq!(waits.join().unwrap().unwrap_err().status(), Status::Cancelled);
    });
    assert_eq!(outcome.recv_timeout(SOON).unwrap().unwrap_err().status(), Status::Cancelled);
    assert_eq!(engine.rank(&request).unwrap_err().status(), Status::Cancelled);
    assert_eq!(engine.rank_async(&request, |_| panic!("is not called")).unwrap_err().status(), Status::Cancelled);
    goes_on(&engine, &users);
    assert_eq!((engine.stats().answered, engine.stats().failed), (2, 4));
}

#[test]
fn timed_out_while_it_waits() {
    let users = cases("gather");
    let engine = slow();
    let begun = Instant::now();
    let request = RankRequest { timeout: Some(Duration::from_millis(20)), ..users[2].whole(3) };
    let error = engine.rank(&request).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::Cancelled, Some("timeout")));
    assert!(error.message().contains("20ms"), "{error}");
    let (told, outcome) = channel();
    engine.rank_async(&request, move |outcome| told.send(outcome).unwrap()).unwrap();
    assert_eq!(outcome.recv_timeout(SOON).unwrap().unwrap_err().status(), Status::Cancelled);
    assert!(begun.elapsed() < SOON);
    goes_on(&engine, &users);
}

#[test]
fn a_timeout_of_zero_stops_a_run() {
    let users = cases("gather");
    let engine = open("gather", options());
    let mut ended = 0;
    for _ in 0..50 {
        let request = RankRequest { timeout: Some(Duration::ZERO), ..users[0].whole(23) };
        // The run may end before the deadline is checked.
        if let Err(error) = engine.rank(&request) {
            assert_eq!(error.status(), Status::Cancelled, "{error}");
            ended += 1;
        }
        let request = RankRequest { timeout: Some(LONG), cancel: Some(Arc::default()), ..users[0].whole(23) };
        users[0].check(&engine.rank(&request).unwrap(), 23);
        engine.forget(&[users[0].user]).unwrap();
    }
    assert!(ended > 40, "{ended} of 50 timed out");
}

#[test]
fn a_timeout_holds_while_its_batch_runs() {
    let users = cases("gather");
    let requests = 64;
    let candidates = Columns::new().with("item", [3; 50]).with("genre", [2; 50]);
    // If the last request times out before all are in one batch, the others wait this long for another one.
    let max_delay = SOON / 20;
    let engine = open("gather", EngineOptions { max_batch: requests, max_delay, kv_size: None, ..options() });
    let request =
        |user: u32| RankRequest { user: user.into(), candidates: candidates.clone(), ..users[0].whole(users[0].len()) };
    let send_others = || {
        let (told, outcomes) = channel();
        for user in 1..requests {
            let told = told.clone();
            engine.rank_async(&request(user), move |outcome| told.send(outcome).unwrap()).unwrap();
        }
        outcomes
    };
    // The fastest of five: each may have been disturbed.
    let whole = (0..5).map(|_| {
        let others = send_others();
        let full = engine.rank(&request(0)).unwrap();
        (1..requests).for_each(|_| drop(others.recv_timeout(SOON).unwrap().unwrap()));
        full
    });
    let all = whole.filter(|full| full.batched_with == requests as usize - 1);
    let full = all.min_by_key(|full| full.run_time).expect("one of the five had all in it");
    // The system decides when a waiting thread is woken: once is enough.
    let (mut left_early, mut tries) = (0, 0);
    while left_early < 3 && tries < 60 {
        tries += 1;
        let others = send_others();
        let ended = engine.rank(&RankRequest { timeout: Some(full.run_time / 3), ..request(0) });
        let early = others.try_recv().is_err();
        if let Err(error) = &ended {
            assert_eq!(error.status(), Status::Cancelled, "{error}");
        }
        let mut with_all = 0;
        for _ in if early { 1 } else { 2 }..requests {
            let other = others.recv_timeout(SOON).unwrap().unwrap();
            assert_eq!(other.scores.len(), full.scores.len());
            with_all += usize::from(other.batched_with == full.batched_with);
        }
        left_early += usize::from(early && ended.is_err() && with_all > 0);
    }
    assert!(left_early > 0, "a limit of a third of {:?} never ended before its batch", full.run_time);
}

#[test]
fn a_full_queue_rejects_requests() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { queue: 2, max_delay: LONG, ..options() });
    let (told, outcomes) = channel();
    for case in &users[..2] {
        let told = told.clone();
        engine.rank_async(&case.whole(case.len()), move |outcome| told.send(outcome).unwrap()).unwrap();
    }
    let error = engine.rank(&users[2].whole(3)).unwrap_err();
    assert_eq!(error.status(), Status::Capacity, "{error}");
    let error = engine.rank_async(&users[2].whole(3), |_| panic!("is not called")).unwrap_err();
    assert!(error.message().contains("2 requests are waiting"), "{error}");
    assert_eq!(engine.stats().waiting, 2);
    drop(engine);
    for _ in 0..2 {
        outcomes.recv_timeout(SOON).unwrap().unwrap();
    }
}

#[test]
fn a_request_that_timed_out_makes_room_in_the_queue() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { queue: 1, max_delay: LONG, ..options() });
    for case in &users {
        let request = RankRequest { timeout: Some(Duration::from_millis(5)), ..case.whole(case.len()) };
        assert_eq!(engine.rank(&request).unwrap_err().status(), Status::Cancelled);
    }
    assert!(engine.stats().waiting <= 1, "at most the last one");
}

#[test]
fn a_request_that_timed_out_takes_no_place_in_a_batch() {
    let users = cases("gather");
    let engine = slow();
    let request = RankRequest { timeout: Some(Duration::from_millis(5)), ..users[4].whole(3) };
    assert!(engine.rank(&request).is_err());
    goes_on(&engine, &users);
    assert_eq!(engine.stats().batches, 1, "two requests filled one");
}
