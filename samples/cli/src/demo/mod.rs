//! `pagoda demo`: MovieLens-100K, replayed through the engine.

mod auc;
mod chart;
mod data;
mod print;
mod replay;
mod report;
mod top;

use std::path::PathBuf;
use std::process::ExitCode;

use pagoda::engine::{Engine, EngineOptions};
use pagoda::{Error, KvFormat, KvSize, ModelOptions, Provider, Result, Status};

use crate::output;
use crate::progress::Progress;
use crate::words::KV_FORMATS;
use data::Data;
use report::Report;

const EXAMPLE: &str = "\
Example:
  make demo                      fetch the data, export the model, and run `pagoda demo`
  pagoda demo --user 405 --json
  pagoda demo --kv-format int8   what quantised keys and values cost: the engine without a cache has native ones

Exit code 1 also if an AUC is further than 0.001 from that of the training framework.";

/// Enough for the keys and values of every user of the test, so that nothing is evicted.
const CACHE_BYTES: u64 = 256 << 20;

/// What to replay, and the user to recommend to.
#[derive(clap::Args)]
#[command(after_help = EXAMPLE)]
pub struct Arguments {
    /// The folder that `make demo` fills (samples/movielens/prepare.py).
    #[arg(default_value = "target/demo/movielens", value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
    /// The user to recommend movies to; by default the one with the most requests.
    #[arg(long)]
    user: Option<u64>,
    /// Where to write the chart; by default latency.svg in the folder.
    #[arg(long)]
    chart: Option<PathBuf>,
    /// Threads of the model; 0 = one for each core.
    #[arg(long, default_value_t = 0)]
    threads: u32,
    /// How the engine with the cache keeps keys and values; by default as the model was exported.
    #[arg(long, value_name = "FORMAT", value_parser = KV_FORMATS)]
    kv_format: Option<String>,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

/// Replays the test set, prints the report, and writes the chart.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let progress = Progress::spinner("opening the model");
    let data = Data::read(&arguments.folder)?;
    let folder = arguments.folder.join("model");
    let kv_format = arguments.kv_format.as_deref().and_then(KvFormat::named);
    let with_cache = EngineOptions { kv_format, ..options(arguments, Some(KvSize::Bytes(CACHE_BYTES))) };
    let cached = Engine::open(&folder, with_cache)?;
    let plain = Engine::open(&folder, options(arguments, None))?;
    let top = top::ten(&data, &cached, arguments.user)?;
    let replay = replay::replay(&data, &cached, &plain, &progress)?;
    let path = arguments.chart.clone().unwrap_or_else(|| arguments.folder.join("latency.svg"));
    let report = Report::new(&data, &cached, &replay, top, path.display().to_string());
    let svg = chart::latency(&replay.requests, &report.about());
    std::fs::write(&path, svg)
        .map_err(|error| Error::new(Status::Io, format!("{} can not be written: {error}", path.display())))?;
    drop(progress);
    if arguments.json {
        output::json(&report)?
    } else {
        output::write(report.text().as_bytes())?
    }
    if report.agrees() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(Error::new(Status::Internal, "the scores are not those of the training framework: see the last table"))
}

/// Both engines are equal except for the cache and the format of its pages. Idle threads of one sleep while the other is measured.
fn options(arguments: &Arguments, kv_size: Option<KvSize>) -> EngineOptions {
    let model = ModelOptions {
        provider: Provider::Cpu,
        intra_op_threads: arguments.threads,
        sleep_when_idle: true,
        ..ModelOptions::default()
    };
    EngineOptions { model, kv_size, ..EngineOptions::default() }
}
