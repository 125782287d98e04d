//! `pagoda serve` on loopback, against the engine and the generator that it serves: what HTTP adds to a request and to a token;
//! tensors over gRPC, against copies of the same bytes.

mod calls;
mod client;
mod process;
mod ranking;
mod streams;
mod tensors;

use std::path::{Path, PathBuf};

use pagoda::{Error, ModelOptions, Provider, Result, Status};
use pagoda_cli::bench::{LANGUAGE_MODEL, MODEL};

use super::{Report, Row};

/// Everything with a goal.
pub fn measure(threads: u32, report: &Report) -> Result<()> {
    let (ranker, language_model) = (folder(MODEL, "make bench-model")?, folder(LANGUAGE_MODEL, "make model-smollm2")?);
    report.doing("measuring serve: ranking");
    ranking::measure(&ranker, threads, report)?;
    report.doing("measuring serve: streams");
    report.rows(streams::measure(&language_model, threads)?)?;
    report.doing("measuring serve: tensors");
    report.row(tensors::measure(threads)?)
}

fn folder(path: &str, made_by: &str) -> Result<PathBuf> {
    if Path::new(path).join("pagoda.json").is_file() {
        return Ok(path.into());
    }
    Err(Error::new(Status::NotFound, format!("{path} is not a model folder: `{made_by}` makes it")))
}

/// As `pagoda serve` opens models.
fn options(threads: u32) -> ModelOptions {
    ModelOptions {
        provider: Provider::Cpu,
        intra_op_threads: threads,
        sleep_when_idle: true,
        ..ModelOptions::default()
    }
}

/// What something adds, against the most that it may.
fn added(case: String, value: f64, unit: &'static str, goal: f64) -> Row {
    // Less than nothing is noise.
    Row { bench: "serve", case, value, unit, baseline: goal, baseline_name: "goal", ratio: goal / value.max(1.0) }
}
