//! The engine on a GPU, with models of a realistic size.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use pagoda::device::{DeviceMemory, Gpu, PinnedMemory, SideStream};
use pagoda::engine::{Columns, Events, GraphShape};
use pagoda::{
    Engine, EngineOptions, Error, KvFormat, KvSize, ModelOptions, Provider, RankRequest, RankResponse, Result, Status,
};
use pagoda_test_support::Random;

use super::failed;
use crate::{Report, Row, median};

const ITEMS: usize = 10_000;
const ACTIONS: usize = 8;
const CANDIDATES: usize = 256;
const USERS: usize = 8;
/// Warm-up rounds: the first few capture graphs.
const WARM_UP: usize = 10;
/// Measured rounds: with eight users a tenth of a second.
const ROUNDS: usize = 60;
/// Rounds after those, for the figure under sustained load: by then a GPU at its power limit has lowered its clock.
const SUSTAINED: usize = 300;
/// Rounds with onloads from host memory.
const ONLOADS: usize = 12;
/// The goal for the host time of a batch beside ONNX Runtime's run, in microseconds.
const HOST_GOAL: f64 = 100.0;

/// A model, the cached histories of its users, and their requests.
#[derive(Clone, Copy)]
struct Case {
    folder: &'static str,
    what: &'static str,
    cached: usize,
    new: usize,
    /// Bytes of the keys and values of a token, all layers together.
    token_bytes: usize,
}

const LARGE: Case =
    Case { folder: "gpu-1024", what: "8 layers, E=1024, 4x256", cached: 3968, new: 128, token_bytes: 8 * 2 * 1024 * 2 };
const LONG: Case =
    Case { folder: "gpu-512", what: "8 layers, E=512, 4x128", cached: 8128, new: 64, token_bytes: 8 * 2 * 512 * 2 };

/// Everything with a goal. The models are in folders beside that for the CPU.
pub fn measure(model: &Path, report: &Report) -> Result<()> {
    let folder = |case: &Case| model.with_file_name(case.folder);
    report.doing(format!("measuring rank: {}, one user", LARGE.what));
    report.rows(Bench::open(&folder(&LARGE), LARGE, 1, KvFormat::Native)?.compute((0.45, "goal"))?.run)?;
    report.doing(format!("measuring rank: {}, {USERS} users", LARGE.what));
    let bench = Bench::open(&folder(&LARGE), LARGE, USERS, KvFormat::Native)?;
    let Computed { run, host } = bench.compute((1.4, "goal"))?;
    let compute = run[0].value * 1e-3;
    report.rows(run)?;
    report.row(host)?;
    report.doing("measuring rank: histories from pinned memory");
    let onloads = bench.onloads()?;
    report.row(bench.onload_row(onloads, compute)?)?;
    drop(bench);
    for (format, name) in [(KvFormat::Int8, ", int8 pages"), (KvFormat::Fp8, ", fp8 pages")] {
        report.doing(format!("measuring rank: {}, {USERS} users{name}", LARGE.what));
        let bench = Bench { name, ..Bench::open(&folder(&LARGE), LARGE, USERS, format)? };
        report.rows(bench.compute((compute * 1e3, "native pages"))?.run)?;
        report.row(bench.row(", onload", bench.onloads()? * 1e3, "ms", onloads * 1e3, "native pages"))?;
    }
    report.doing(format!("measuring rank: {}, {USERS} users", LONG.what));
    report.rows(Bench::open(&folder(&LONG), LONG, USERS, KvFormat::Native)?.compute((1.0, "goal"))?.run)
}

/// The times of a batch with resident histories.
struct Computed {
    /// The run, from the inputs in host memory to the scores there: at first, and sustained.
    run: [Row; 2],
    /// The time of the engine beside the run.
    host: Row,
}

/// An engine whose users have their histories in the cache.
struct Bench {
    engine: Engine,
    case: Case,
    users: usize,
    /// Of its pages, as rows have it.
    name: &'static str,
}

impl Bench {
    fn open(folder: &PathBuf, case: Case, users: usize, format: KvFormat) -> Result<Self> {
        if !folder.join("pagoda.json").is_file() {
            let message = format!("{} is not a model folder: `make bench-model-gpu` makes it", folder.display());
            return Err(Error::new(Status::NotFound, message).about("--model"));
        }
        let rows = users * (case.new + CANDIDATES);
        let bytes = (users * (case.cached + case.new + 64) * case.token_bytes) as u64;
        let options = EngineOptions {
            model: ModelOptions { provider: Provider::Cuda, ..ModelOptions::default() },
            // Pages for two histories of each user: a history and its replacement are resident at the same time.
            kv_size: Some(KvSize::Bytes(bytes * 2)),
            kv_format: Some(format),
            host_bytes: bytes * 2,
            max_batch: users as u32,
            max_delay: Duration::from_millis(20),
            cuda_graphs: vec![GraphShape {
                users: users as u32,
                rows: rows as u32,
                candidates: (users * CANDIDATES) as u32,
                pages: 0,
            }],
            ..EngineOptions::default()
        };
        let bench = Self { engine: Engine::open(folder, options)?, case, users, name: "" };
        bench.remember()?;
        Ok(bench)
    }

    /// Resets the histories of all users in the pool to the cached events, without those of later rounds.
    fn remember(&self) -> Result<()> {
        for user in 0..self.users as u64 {
            self.engine.forget(&[user])?;
            self.engine.rank(&self.request(user, 0, self.case.cached, 1, 0))?;
        }
        Ok(())
    }

    /// A request with the events from `start` on. The cached events of a user are always the same; the later ones
    /// differ in each round. So the number of new events is always the same.
    fn request(&self, user: u64, start: usize, end: usize, candidates: usize, round: u64) -> RankRequest {
        let mut random = Random(user ^ if start == 0 { 0 } else { (round + 1) << 32 });
        let mut keys = |count: usize, below: usize| (0..count).map(|_| random.below(below) as i64).collect::<Vec<_>>();
        let events = end - start;
        let columns = Columns::new().with("item", keys(events, ITEMS)).with("action", keys(events, ACTIONS));
        RankRequest {
            user,
            start: (start > 0).then_some(start as u64),
            events: Events { keys: columns, times: Vec::new() },
            candidates: Columns::new().with("item", keys(candidates, ITEMS)),
            ..RankRequest::default()
        }
    }

    /// Sends the requests of all users as one batch. Returns the time from the first request to the last answer.
    fn batch(&self, round: u64) -> Result<(Duration, RankResponse)> {
        let Case { cached, new, .. } = self.case;
        let requests: Vec<_> =
            (0..self.users as u64).map(|user| self.request(user, cached, cached + new, CANDIDATES, round)).collect();
        let users = self.users;
        let answers = Arc::new((Mutex::new(Vec::with_capacity(users)), Condvar::new()));
        let begun = Instant::now();
        for request in &requests {
            let answers = Arc::clone(&answers);
            self.engine.rank_async(request, move |response| {
                // The time is taken in the callback, without the wake-up of this thread, which only the last callback
                // does.
                let at = Instant::now();
                let mut all = answers.0.lock().expect("not poisoned");
                all.push((at, response));
                if all.len() == users {
                    answers.1.notify_one();
                }
            })?;
        }
        let all = answers.0.lock().map_err(failed)?;
        let mut all = answers.1.wait_while(all, |all| all.len() < users).map_err(failed)?;
        let took = all.iter().map(|(at, _)| *at).max().unwrap_or(begun) - begun;
        let mut responses = all.drain(..).map(|(_, response)| response).collect::<Result<Vec<_>>>()?;
        for response in &responses {
            let (computed, others) = (response.computed_rows, response.batched_with);
            if computed != new as u64 || others + 1 != self.users {
                let message = format!("a request computed {computed} rows, expected {new}, with {others} others");
                return Err(Error::new(Status::Internal, message));
            }
        }
        Ok((took, responses.swap_remove(0)))
    }

    fn row(&self, what: &str, value: f64, unit: &'static str, baseline: f64, baseline_name: &'static str) -> Row {
        let Case { what: model, cached, new, .. } = self.case;
        Row {
            bench: "rank",
            case: format!("bf16 {model}, {cached}+{new}+{CANDIDATES}, B={}{}{what}", self.users, self.name),
            value,
            unit,
            baseline,
            baseline_name,
            ratio: baseline / value,
        }
    }

    /// The run is compared with the baseline that is given, in milliseconds.
    fn compute(&self, (goal, named): (f64, &'static str)) -> Result<Computed> {
        let (mut runs, mut rest) = (Vec::new(), Vec::new());
        for round in 0..WARM_UP + ROUNDS + SUSTAINED {
            let (took, response) = self.batch(round as u64)?;
            runs.push(response.run_time);
            rest.push(took.saturating_sub(response.run_time));
        }
        let (first, sustained) = runs[WARM_UP..].split_at(ROUNDS);
        let run = [("", first), (", sustained", sustained)];
        Ok(Computed {
            run: run.map(|(what, times)| self.row(what, median(times) * 1e3, "ms", goal, named)),
            host: self.row(", host", median(&rest[WARM_UP..]) * 1e6, "us", HOST_GOAL, "goal"),
        })
    }

    /// Seconds of a batch if every history is onloaded from pinned memory first.
    fn onloads(&self) -> Result<f64> {
        let users: Vec<u64> = (0..self.users as u64).collect();
        let mut times = Vec::new();
        for round in 0..ONLOADS {
            // Without this the events of the previous round would be onloaded too, and replaced.
            self.remember()?;
            if self.engine.unload(&users)? != self.users {
                return Err(Error::new(Status::Internal, "not all histories were in the pool"));
            }
            times.push(self.batch((WARM_UP + ROUNDS + SUSTAINED + round) as u64)?.0);
        }
        Ok(median(times))
    }

    /// That, compared with the slower of run and copy alone.
    fn onload_row(&self, seconds: f64, compute: f64) -> Result<Row> {
        let bytes = self.users * self.case.cached * self.case.token_bytes;
        let transfer = bytes as f64 / copy_speed()?;
        Ok(self.row(", onload", seconds * 1e3, "ms", compute.max(transfer) * 1e3, "larger of compute, copy"))
    }
}

/// Bytes a second from pinned memory to the GPU, in large copies.
fn copy_speed() -> Result<f64> {
    const BYTES: usize = 256 << 20;
    let gpu = Gpu::shared(0).map_err(failed)?;
    let (host, device) = (PinnedMemory::zeroed(gpu, BYTES), DeviceMemory::zeroed(gpu, BYTES));
    let (host, device, stream) =
        (host.map_err(failed)?, device.map_err(failed)?, SideStream::new(gpu).map_err(failed)?);
    let mut times = Vec::new();
    for _ in 0..9 {
        let begun = Instant::now();
        // SAFETY: both are as long as that, and the copy is waited for.
        unsafe { stream.upload(device.address(), host.data(), BYTES) }.map_err(failed)?;
        stream.wait().map_err(failed)?;
        times.push(begun.elapsed());
    }
    Ok(BYTES as f64 / median(times))
}
