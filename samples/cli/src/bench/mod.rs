//! `pagoda bench`: figures beside their baselines.

mod append;
mod attention;
mod matmul;
mod overhead;
mod random;
mod raw;

use std::time::{Duration, Instant};

use clap::ValueEnum;
use pagoda::Result;

/// What to measure and how.
#[derive(clap::Args)]
pub struct Arguments {
    /// What to measure.
    name: Name,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
    /// Where to measure.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// Threads for both sides; 0 = one for each core.
    #[arg(long, default_value_t = 0)]
    threads: u32,
}

#[derive(Clone, Copy, ValueEnum)]
enum Name {
    /// HstuAttention, against ONNX Runtime's MatMul on 1024x1024x1024.
    Attention,
    /// PagedKvAppend, against memcpy of the same bytes.
    Append,
    /// A run of a one-node model through pagoda.h, against ONNX Runtime's own C call.
    Overhead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Backend {
    Cpu,
}

/// Measures what the arguments ask for and prints it.
pub fn run(arguments: &Arguments) -> Result<()> {
    let threads = match arguments.threads {
        0 => std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        threads => threads,
    };
    let Backend::Cpu = arguments.backend;
    let rows = match arguments.name {
        Name::Attention => attention::measure(threads)?,
        Name::Append => append::measure(threads)?,
        Name::Overhead => overhead::measure()?,
    };
    for row in rows {
        println!("{}", if arguments.json { row.json() } else { row.text() });
    }
    Ok(())
}

/// One figure beside its baseline.
struct Row {
    bench: &'static str,
    case: String,
    value: f64,
    unit: &'static str,
    baseline: f64,
    baseline_name: &'static str,
    /// How many times as good as the baseline.
    ratio: f64,
}

impl Row {
    fn json(&self) -> String {
        format!(
            r#"{{"bench":"{}","case":"{}","value":{:.4},"unit":"{}","baseline":{:.4},"baseline_name":"{}","ratio":{:.3},"backend":"cpu"}}"#,
            self.bench, self.case, self.value, self.unit, self.baseline, self.baseline_name, self.ratio
        )
    }

    fn text(&self) -> String {
        format!(
            "{:<10} {:<44} {:>9.3} {:<8} {:<24} {:>9.3}   x{:.2}",
            self.bench, self.case, self.value, self.unit, self.baseline_name, self.baseline, self.ratio
        )
    }
}

/// Times `measured` and `baseline` in turn, so that both see the same machine, and returns the median of each.
fn side_by_side(
    rounds: usize,
    mut measured: impl FnMut() -> Result<()>,
    mut baseline: impl FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let mut times = (Vec::new(), Vec::new());
    for round in 0..rounds + rounds / 4 + 1 {
        let (a, b) = (time(&mut measured)?, time(&mut baseline)?);
        // The first rounds warm caches, pages and clocks.
        if round > rounds / 4 {
            times.0.push(a);
            times.1.push(b);
        }
    }
    Ok((median(times.0), median(times.1)))
}

fn time(work: &mut impl FnMut() -> Result<()>) -> Result<Duration> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed())
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}
