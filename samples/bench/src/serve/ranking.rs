//! What HTTP adds to a request to rank, for one client and for 16.

use std::path::Path;
use std::sync::Barrier;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use pagoda::engine::{Columns, Events};
use pagoda::{Engine, EngineOptions, KvSize, Offload, RankRequest, Result};
use pagoda_test_support::Random;

use super::super::{Report, Row};
use super::client::Client;
use super::process::{NAME, Server};
use super::{added, options};

const ITEMS: usize = 10_000;
const CANDIDATES: usize = 64;
const EVENTS: usize = 256;
const CLIENTS: usize = 16;
/// Requests of all clients in a round.
const REQUESTS: usize = 320;
const ROUNDS: usize = 6;
/// The goals, in microseconds.
const MEDIAN: f64 = 250.0;
const P99: f64 = 1000.0;
/// Threads of the other side fall asleep.
const PAUSE: Duration = Duration::from_millis(20);

/// One client and 16, by HTTP and by calls, in turns.
pub fn measure(folder: &Path, threads: u32, report: &Report) -> Result<()> {
    let server = Server::start(folder, threads)?;
    // As `pagoda serve` opens it.
    let engine = EngineOptions {
        model: options(threads),
        kv_size: Some(KvSize::Bytes(1 << 30)),
        offload: Offload::AtCommit,
        max_batch: 64,
        queue: 256,
        ..EngineOptions::default()
    };
    let engine = Engine::open(folder, engine)?;
    for clients in [1, CLIENTS] {
        let (mut http, mut calls) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let by_http = together(clients, |number| by_http(&server, number, REQUESTS / clients))?;
            let by_calls = together(clients, |number| by_calls(&engine, number, REQUESTS / clients))?;
            // The first round computes the histories.
            if round > 0 {
                http.extend(by_http);
                calls.extend(by_calls);
            }
        }
        let plural = if clients == 1 { "" } else { "s" };
        for (name, part, goal) in [("median", 0.5, MEDIAN), ("p99", 0.99, P99)] {
            let (http, calls) = (percentile(&mut http, part), percentile(&mut calls, part));
            let case = format!("{name} added to a ranking, {clients} client{plural}");
            report.row(added(case, (http - calls) * 1e6, "us", goal))?;
            let case = format!("{name} of a ranking, {clients} client{plural}");
            let (value, baseline) = (http * 1e6, calls * 1e6);
            let ratio = baseline / value;
            let row = Row { bench: "serve", case, value, unit: "us", baseline, baseline_name: "rank_async", ratio };
            report.row(row)?;
        }
    }
    Ok(())
}

fn together(clients: usize, work: impl Fn(usize) -> Result<Vec<Duration>> + Sync) -> Result<Vec<Duration>> {
    std::thread::sleep(PAUSE);
    let barrier = Barrier::new(clients);
    let times = std::thread::scope(|scope| {
        let start = |number: usize| {
            let (work, barrier) = (&work, &barrier);
            scope.spawn(move || {
                barrier.wait();
                work(number)
            })
        };
        let threads: Vec<_> = (0..clients).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect::<Result<Vec<_>>>()
    })?;
    Ok(times.concat())
}

/// The events and the candidates of a user: the same in each round, so that all but the candidates are cached.
fn user(number: usize) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
    let mut random = Random(number as u64 + 1);
    let mut keys = |count: usize, most: usize| (0..count).map(|_| random.below(most) as i64).collect::<Vec<_>>();
    (keys(EVENTS, ITEMS), keys(EVENTS, 8), keys(CANDIDATES, ITEMS))
}

fn by_calls(engine: &Engine, number: usize, requests: usize) -> Result<Vec<Duration>> {
    let (items, actions, candidates) = user(number);
    let request = RankRequest {
        user: number as u64,
        events: Events { keys: Columns::new().with("item", items).with("action", actions), times: Vec::new() },
        candidates: Columns::new().with("item", candidates),
        ..RankRequest::default()
    };
    let once = || {
        let begun = Instant::now();
        // As the server asks: it can not wait inside of a call.
        let (sender, answer) = sync_channel(1);
        engine.rank_async(&request, move |outcome| {
            let _ = sender.send(outcome);
        })?;
        answer.recv().expect("every request is answered").map(|_| begun.elapsed())
    };
    (0..requests).map(|_| once()).collect()
}

fn by_http(server: &Server, number: usize, requests: usize) -> Result<Vec<Duration>> {
    let (items, actions, candidates) = user(number);
    let body = format!(
        r#"{{"model":"{NAME}","user":{number},"events":{{"item":{items:?},"action":{actions:?}}},"candidates":{candidates:?}}}"#
    );
    let mut client = Client::new(server)?;
    let mut once = || {
        let begun = Instant::now();
        client.send("/v1/rank", &body)?;
        client.body().map(|_| begun.elapsed())
    };
    (0..requests).map(|_| once()).collect()
}

fn percentile(times: &mut [Duration], part: f64) -> f64 {
    times.sort_unstable();
    times[((times.len() - 1) as f64 * part) as usize].as_secs_f64()
}
