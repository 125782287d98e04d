//! The threads that run callbacks, and what a callback may do.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::Builder;
use std::time::{Duration, Instant};

use pagoda::engine::{EngineOptions, RankRequest};
use pagoda::{Cancel, Status};

use crate::cases::{cases, folder, open, options};

/// The coalescing window of a request without others.
const LONG: Duration = Duration::from_secs(60);
/// The limit for "at once" on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// What ends the request whose callback drops the engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Answer,
    TimeLimit,
    Cancel,
}

#[test]
fn an_engine_may_be_dropped_in_a_callback() {
    let users = cases("gather");
    for (swapped, end) in [false, true]
        .into_iter()
        .flat_map(|swapped| [End::Answer, End::TimeLimit, End::Cancel].map(|end| (swapped, end)))
    {
        let engine = Arc::new(open("gather", EngineOptions { max_batch: 2, max_delay: LONG, ..options() }));
        let (own, cancel) = (Arc::clone(&engine), Arc::new(Cancel::new()));
        let request = RankRequest {
            timeout: (end == End::TimeLimit).then_some(Duration::from_millis(10)),
            cancel: Some(Arc::clone(&cancel)),
            ..users[0].whole(23)
        };
        let ((told, outcome), (gone, go_on)) = (channel(), channel());
        let callback = move |response| {
            // The test has dropped its own reference: this one is the last.
            go_on.recv_timeout(SOON).unwrap();
            drop(own);
            told.send(response).unwrap();
        };
        engine.rank_async(&request, callback).unwrap();
        if swapped {
            engine.swap(folder("second")).unwrap();
        }
        if end == End::Answer {
            // This fills the batch.
            engine.rank_async(&users[1].whole(4), |_| ()).unwrap();
        }
        drop(engine);
        gone.send(()).unwrap();
        if end == End::Cancel {
            std::thread::spawn(move || cancel.trigger());
        }
        let response = outcome.recv_timeout(SOON).unwrap_or_else(|_| panic!("{end:?}, swapped {swapped}: it hangs"));
        match end {
            End::Answer => users[0].check(&response.unwrap(), 23),
            _ => assert_eq!(response.unwrap_err().status(), Status::Cancelled),
        }
    }
}

#[test]
fn time_limits_hold_when_an_engine_is_dropped_in_a_callback() {
    let users = cases("gather");
    let engine = Arc::new(open("gather", EngineOptions { instances: 1, ..options() }));
    let own = Arc::clone(&engine);
    let ((in_it, is_in_it), (gone, go_on)) = (channel(), channel());
    let ((told, outcome), (over, is_over)) = (channel(), channel());
    let first = move |_| {
        in_it.send(()).unwrap();
        go_on.recv_timeout(SOON).unwrap();
        drop(own);
        // This blocks the only worker.
        over.send(outcome.recv_timeout(SOON)).unwrap();
    };
    engine.rank_async(&users[0].whole(3), first).unwrap();
    is_in_it.recv_timeout(SOON).unwrap();
    let limited = RankRequest { timeout: Some(Duration::from_millis(300)), ..users[1].whole(4) };
    engine.rank_async(&limited, move |response| told.send(response.map(drop)).unwrap_or(())).unwrap();
    drop(engine);
    gone.send(()).unwrap();
    let error = is_over.recv().unwrap().expect("its time is over").unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::Cancelled, Some("timeout")));
}

#[test]
fn a_thread_that_waits_for_a_request_runs_no_callbacks() {
    let users = cases("gather");
    let engine = open("gather", options());
    let (seen, stop) = (Arc::new(Mutex::new(BTreeSet::new())), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for (name, case) in [("waits-0", &users[0]), ("waits-1", &users[4])] {
            let (engine, stop) = (&engine, &stop);
            let ask = move || {
                while !stop.load(Ordering::Relaxed) {
                    engine.rank(&case.whole(3)).unwrap();
                }
            };
            Builder::new().name(name.into()).spawn_scoped(scope, ask).unwrap();
        }
        for round in 0..2000 {
            let seen = Arc::clone(&seen);
            let request = RankRequest { user: 10_000 + round % 50, ..users[1].whole(4) };
            let note = move |outcome: Result<_, _>| {
                outcome.unwrap();
                seen.lock().unwrap().insert(std::thread::current().name().unwrap_or_default().to_owned());
            };
            engine.rank_async(&request, note).unwrap();
            std::thread::sleep(Duration::from_micros(300));
        }
        stop.store(true, Ordering::Relaxed);
    });
    drop(engine);
    assert_eq!(*seen.lock().unwrap(), BTreeSet::from(["pagoda-rank-0".to_owned()]));
}

#[test]
fn a_concurrent_cancel_is_reported_once_and_not_within_the_call() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { max_delay: LONG, ..options() });
    let (mut at_once, mut later) = (0, 0);
    for round in 0..2000_u64 {
        let cancel = Arc::new(Cancel::new());
        let request = RankRequest { cancel: Some(Arc::clone(&cancel)), ..users[2].whole(1) };
        let (told, outcome) = channel();
        let here = std::thread::current().id();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..round % 50 * 20).for_each(|_| std::hint::spin_loop());
                cancel.trigger();
            });
            let note = move |outcome: Result<_, pagoda::Error>| {
                assert_ne!(std::thread::current().id(), here);
                told.send(outcome.map(drop)).unwrap();
            };
            match engine.rank_async(&request, note) {
                Err(error) => {
                    assert_eq!(error.status(), Status::Cancelled);
                    at_once += 1;
                }
                Ok(()) => {
                    let error = outcome.recv_timeout(SOON).expect("the callback is called").unwrap_err();
                    assert_eq!(error.status(), Status::Cancelled);
                    later += 1;
                }
            }
        });
        assert!(outcome.try_recv().is_err(), "it is reported once");
    }
    assert_eq!((engine.stats().failed, engine.stats().answered), (at_once + later, 0));
}

#[test]
fn a_slow_callback_does_not_delay_the_timeouts_of_others() {
    let users = cases("gather");
    let engine = open("gather", EngineOptions { max_delay: LONG, ..options() });
    let ((in_it, is_in_it), (go, go_on)) = (channel(), channel::<()>());
    let request = RankRequest { timeout: Some(Duration::from_millis(10)), ..users[0].whole(3) };
    let slow = move |_| {
        in_it.send(()).unwrap();
        let _ = go_on.recv_timeout(SOON);
    };
    engine.rank_async(&request, slow).unwrap();
    is_in_it.recv_timeout(SOON).unwrap();
    let begun = Instant::now();
    let error = engine.rank(&RankRequest { user: 1, ..request }).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::Cancelled, Some("timeout")));
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    go.send(()).unwrap();
}
