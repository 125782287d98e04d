//! The engine, with a model of a realistic size: the gain of its cache, the gain of batching, and its overhead.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use pagoda::engine::{Columns, Events};
use pagoda::{Engine, EngineOptions, Error, KvFormat, KvSize, ModelFolder, RankRequest, RankResponse, Result, Status};
use pagoda_cli::bench::MODEL;
use pagoda_test_support::Random;

use super::{Report, Row, median, options, side_by_side};

const ITEMS: usize = 10_000;
const ACTIONS: usize = 8;
const CALLERS: usize = 16;
/// Requests of each caller in one measurement.
const VISITS: usize = 8;
/// Concurrent batches. Each has its share of the threads, so that none waits for threads of another.
const INSTANCES: u32 = 2;
/// The coalescing window.
const DELAY: Duration = Duration::from_millis(2);
/// The goal for the engine overhead, in microseconds.
const GOAL: f64 = 30.0;

/// Everything with a goal.
pub fn measure(threads: u32, folder: &Path, report: &Report) -> Result<()> {
    check(folder)?;
    report.doing("measuring rank: cached against recompute");
    report.row(cached_against_recompute(folder, threads)?)?;
    report.doing(format!("measuring rank: {CALLERS} callers against one"));
    report.row(callers_against_one(folder, threads)?)?;
    report.doing("measuring rank: engine overhead");
    report.row(overhead(folder, threads)?)?;
    for format in [KvFormat::Int8, KvFormat::Fp8] {
        report.doing(format!("measuring rank: {} pages against native ones", name(format)));
        against_native(folder, threads, format, report)?;
    }
    Ok(())
}

/// Checks that the model is the one of the cases.
fn check(folder: &Path) -> Result<()> {
    if !folder.join("pagoda.json").is_file() {
        let message = format!("{} is not a model folder: `make bench-model` makes {MODEL}", folder.display());
        return Err(Error::new(Status::NotFound, message).about("--model"));
    }
    let found = ModelFolder::open(folder)?;
    let names: Vec<&str> = found.features.iter().map(|feature| feature.name.as_str()).collect();
    if names == ["item", "action"] && found.sequence.event.len() == 1 && found.kv.cache {
        return Ok(());
    }
    let message = format!("{}: a model with the features item and action in one row is measured", folder.display());
    Err(Error::new(Status::Unsupported, format!("{message}; `make bench-model` makes one")).about("--model"))
}

fn open(folder: &Path, threads: u32, kv_size: Option<KvSize>) -> Result<Engine> {
    Engine::open(folder, EngineOptions { model: options(threads), kv_size, ..EngineOptions::default() })
}

/// A user whose history grows by one event with every request: the same for the same seed.
struct User {
    id: u64,
    random: Random,
    items: Vec<i64>,
    actions: Vec<i64>,
}

impl User {
    fn new(id: u64, seed: u64, events: usize) -> Self {
        let mut user = Self { id, random: Random(seed), items: Vec::new(), actions: Vec::new() };
        (0..events).for_each(|_| user.act());
        user
    }

    /// Adds an event.
    fn act(&mut self) {
        self.items.push(self.random.below(ITEMS) as i64);
        self.actions.push(self.random.below(ACTIONS) as i64);
    }

    /// A request with the events from `start` on. The candidates depend only on the number of events.
    fn request(&self, start: usize, candidates: usize) -> RankRequest {
        let mut random = Random(self.items.len() as u64);
        let items: Vec<i64> = (0..candidates).map(|_| random.below(ITEMS) as i64).collect();
        let keys = Columns::new().with("item", &self.items[start..]).with("action", &self.actions[start..]);
        RankRequest {
            user: self.id,
            start: (start > 0).then_some(start as u64),
            events: Events { keys, times: Vec::new() },
            candidates: Columns::new().with("item", items),
            ..RankRequest::default()
        }
    }

    /// Lets the engine compute the whole history.
    fn warm(&self, engine: &Engine) -> Result<()> {
        engine.rank(&self.request(0, 1)).map(drop)
    }

    /// A request with one new event.
    fn next(&mut self, candidates: usize) -> RankRequest {
        self.act();
        self.request(self.items.len() - 1, candidates)
    }
}

/// One new event after 2,048 cached ones, compared with computing the same history in full. The history grows by an
/// event in each run, by a hundredth in all, on both sides.
fn cached_against_recompute(folder: &Path, threads: u32) -> Result<Row> {
    const EVENTS: usize = 2048;
    const CANDIDATES: usize = 64;
    let cached = open(folder, threads, Some(KvSize::Bytes(256 << 20)))?;
    let recomputing = open(folder, threads, None)?;
    let (mut user, mut other) = (User::new(1, 1, EVENTS), User::new(1, 1, EVENTS));
    user.warm(&cached)?;
    let (mut from_cache, mut anew) = (Vec::new(), Vec::new());
    let (value, baseline) = side_by_side(
        4,
        || {
            let response = cached.rank(&user.next(CANDIDATES))?;
            computed(&response, 1)?;
            from_cache.push(response.scores);
            Ok(())
        },
        || {
            other.act();
            let response = recomputing.rank(&other.request(0, CANDIDATES))?;
            computed(&response, other.items.len() as u64)?;
            anew.push(response.scores);
            Ok(())
        },
    )?;
    from_cache.iter().zip(&anew).try_for_each(|(ours, theirs)| alike(ours, theirs, 1e-4))?;
    Ok(Row {
        bench: "rank",
        case: format!("cached against recompute, {EVENTS}+1+{CANDIDATES}"),
        value: value * 1e3,
        unit: "ms",
        baseline: baseline * 1e3,
        baseline_name: "without the cache",
        ratio: baseline / value,
    })
}

/// The word of a quantised format.
fn name(format: KvFormat) -> &'static str {
    if format == KvFormat::Int8 { "int8" } else { "fp8" }
}

/// Quantised pages, compared with native ones: one new event after 2,048 cached ones, with few candidates and with many, and
/// such a history in full.
fn against_native(folder: &Path, threads: u32, format: KvFormat, report: &Report) -> Result<()> {
    const EVENTS: usize = 2048;
    let opened = |kv_format, kv_size| {
        Engine::open(folder, EngineOptions { model: options(threads), kv_size, kv_format, ..EngineOptions::default() })
    };
    for (cached, candidates) in [(true, 8), (true, 256), (false, 64)] {
        let kv_size = cached.then_some(KvSize::Bytes(256 << 20));
        let (quantised, native) = (opened(Some(format), kv_size)?, opened(None, kv_size)?);
        let (mut user, mut other) = (User::new(1, 1, EVENTS), User::new(1, 1, EVENTS));
        if cached {
            user.warm(&quantised)?;
            other.warm(&native)?;
        }
        let ask = |engine: &Engine, user: &mut User, scores: &mut Vec<Vec<f32>>| {
            user.act();
            let response = engine.rank(&user.request(if cached { user.items.len() - 1 } else { 0 }, candidates))?;
            scores.push(response.scores);
            Ok(())
        };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let rounds = if cached { 30 } else { 4 };
        let (value, baseline) =
            side_by_side(rounds, || ask(&quantised, &mut user, &mut ours), || ask(&native, &mut other, &mut theirs))?;
        ours.iter().zip(&theirs).try_for_each(|(ours, theirs)| alike(ours, theirs, 5e-2))?;
        let history = if cached { format!("{EVENTS}+1") } else { format!("0+{EVENTS}") };
        report.row(Row {
            bench: "rank",
            case: format!("{} pages, {history}+{candidates}", name(format)),
            value: value * 1e3,
            unit: "ms",
            baseline: baseline * 1e3,
            baseline_name: "native pages",
            ratio: baseline / value,
        })?;
    }
    Ok(())
}

/// All callers at once, each with a new event and candidates after 512 cached events, compared with one caller after
/// another. Both sides have users with the same histories, and the same scores. Each side has an engine with its own
/// options, because a coalescing window would only delay a single caller.
fn callers_against_one(folder: &Path, threads: u32) -> Result<Row> {
    const EVENTS: usize = 512;
    const CANDIDATES: usize = 8;
    const ROUNDS: usize = 15;
    let kv_size = Some(KvSize::Bytes(512 << 20));
    let lone = open(folder, threads, kv_size)?;
    let cores = if threads > 0 { threads } else { std::thread::available_parallelism().map_or(1, |n| n.get() as u32) };
    let gathering = EngineOptions {
        model: options((cores / INSTANCES).max(1)),
        kv_size,
        instances: INSTANCES,
        max_batch: CALLERS as u32 / INSTANCES,
        max_delay: DELAY,
        ..EngineOptions::default()
    };
    let engine = Engine::open(folder, gathering)?;
    let users = |first: u64| (0..CALLERS as u64).map(move |at| User::new(first + at, at, EVENTS));
    let (mut together, mut alone) = (users(0).collect::<Vec<_>>(), users(1000).collect::<Vec<_>>());
    together.iter().try_for_each(|user| user.warm(&engine))?;
    alone.iter().try_for_each(|user| user.warm(&lone))?;
    let mut times = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let (took, ours) = all_at_once(&engine, &mut together, CANDIDATES)?;
        let start = Instant::now();
        let mut theirs = Vec::new();
        for _ in 0..VISITS {
            for user in &mut alone {
                theirs.push(lone.rank(&user.next(CANDIDATES))?);
            }
        }
        // The first round wakes threads and fills caches.
        if round > 0 {
            times.0.push(took);
            times.1.push(start.elapsed());
        }
        for (at, ours) in ours.iter().enumerate() {
            computed(ours, 1)?;
            // One side is ordered by caller, the other by visit.
            alike(&ours.scores, &theirs[at % VISITS * CALLERS + at / VISITS].scores, 1e-5)?;
        }
    }
    let requests = (CALLERS * VISITS) as f64;
    let (value, baseline) = (requests / median(times.0), requests / median(times.1));
    Ok(Row {
        bench: "rank",
        case: format!("{CALLERS} callers against one, {EVENTS}+1+{CANDIDATES}"),
        value,
        unit: "req/s",
        baseline,
        baseline_name: "one after another",
        ratio: value / baseline,
    })
}

/// Sends each user's next requests from its own thread. Returns the responses by caller.
fn all_at_once(engine: &Engine, users: &mut [User], candidates: usize) -> Result<(Duration, Vec<RankResponse>)> {
    let ready = Barrier::new(users.len() + 1);
    let visit = |user: &mut User| -> Result<Vec<RankResponse>> {
        ready.wait();
        (0..VISITS).map(|_| engine.rank(&user.next(candidates))).collect()
    };
    std::thread::scope(|scope| {
        let callers: Vec<_> = users.iter_mut().map(|user| scope.spawn(|| visit(user))).collect();
        ready.wait();
        let start = Instant::now();
        let mut answers = Vec::new();
        for caller in callers {
            answers.extend(caller.join().map_err(|_| Error::new(Status::Internal, "a caller panicked"))??);
        }
        Ok((start.elapsed(), answers))
    })
}

/// The time of a request without ONNX Runtime's run, which includes the table lookups.
fn overhead(folder: &Path, threads: u32) -> Result<Row> {
    const EVENTS: usize = 512;
    const CANDIDATES: usize = 8;
    let engine = open(folder, threads, Some(KvSize::Bytes(64 << 20)))?;
    let mut user = User::new(1, 1, EVENTS);
    user.warm(&engine)?;
    let mut times = Vec::new();
    for _ in 0..500 {
        let request = user.next(CANDIDATES);
        let start = Instant::now();
        let response = engine.rank(&request)?;
        let took = start.elapsed();
        computed(&response, 1)?;
        times.push(took.saturating_sub(response.run_time));
    }
    let value = median(times) * 1e6;
    Ok(Row {
        bench: "rank",
        case: format!("engine overhead, batch 1, {EVENTS}+1+{CANDIDATES}"),
        value,
        unit: "us",
        baseline: GOAL,
        baseline_name: "goal",
        ratio: GOAL / value,
    })
}

/// Checks that the intended case was measured.
fn computed(response: &RankResponse, rows: u64) -> Result<()> {
    if response.computed_rows == rows {
        return Ok(());
    }
    let message = format!("a request computed {} rows of its history, expected {rows}", response.computed_rows);
    Err(Error::new(Status::Internal, message))
}

fn alike(ours: &[f32], theirs: &[f32], tolerance: f32) -> Result<()> {
    let far = |(a, b): (&f32, &f32)| (a - b).abs() > tolerance * a.abs().max(b.abs());
    if ours.len() != theirs.len() || ours.iter().any(|score| !score.is_finite()) || ours.iter().zip(theirs).any(far) {
        let message = format!("the two sides differ by more than {tolerance:e}: {ours:?} and {theirs:?}");
        return Err(Error::new(Status::Internal, message));
    }
    Ok(())
}
