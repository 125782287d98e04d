//! `pagoda-bench`, which `pagoda bench` runs: figures and their baselines.

mod append;
mod attention;
mod by_python;
mod cuda;
mod decoder;
mod embedding;
mod genai;
mod generate;
mod grammar;
mod kv;
mod llama_cpp;
mod matmul;
mod memory;
mod overhead;
mod paged_attention;
mod policies;
mod random;
mod rank;
mod raw;
mod report;
mod serve;
mod speculation;
mod store;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use pagoda::{ElementType, Error, Model, ModelOptions, Provider, Result, Status, Tensor};
use pagoda_cli::bench::{Arguments, Backend, LANGUAGE_MODEL, LARGE_LANGUAGE_MODEL, Name};
use pagoda_cli::output;
use pagoda_test_support::{Attribute, Dim, Graph};
use report::{Report, Row};

/// Runs a benchmark: each row is a figure, the baseline of the same run, and the ratio (how many times as good).
#[derive(Parser)]
#[command(version, max_term_width = 120)]
struct CommandLine {
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    output::exit(run(&CommandLine::parse().arguments).map(|()| ExitCode::SUCCESS))
}

/// Runs the benchmark of the arguments and prints its rows.
fn run(arguments: &Arguments) -> Result<()> {
    let threads = match arguments.threads {
        0 => std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
        threads => threads,
    };
    let name = arguments.name.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let report = Report::new(arguments.json, arguments.backend, format!("measuring {name}"));
    match (arguments.name, arguments.backend) {
        (Name::Attention, Backend::Cuda) => cuda::attention(&report),
        (Name::Append, Backend::Cuda) => cuda::append(&report),
        (Name::PagedAttention, Backend::Cuda) => cuda::paged_attention(&report),
        (Name::Embedding, Backend::Cuda) => cuda::embedding(&report),
        (Name::Rank, Backend::Cuda) => cuda::rank(&arguments.model(), &report),
        (Name::Generate, Backend::Cuda) => cuda::generate(&arguments.model(), &report),
        (Name::Speculation, backend) => {
            speculation::measure(threads, backend == Backend::Cuda, &arguments.model(), &report)
        }
        (Name::Policies, Backend::Cuda) => policies::measure_on_gpu(&arguments.model(), &report),
        (_, Backend::Cuda) => Err(Error::invalid(
            "backend",
            "cuda has the benchmarks attention, append, paged-attention, embedding, rank, generate, policies and speculation; \
             use --backend cpu",
        )),
        (Name::Attention, Backend::Cpu) => attention::measure(threads, &report),
        (Name::Append, Backend::Cpu) => append::measure(threads, &report),
        (Name::PagedAttention, Backend::Cpu) => paged_attention::measure(threads, &report),
        (Name::Overhead, Backend::Cpu) => overhead::measure(&report),
        (Name::Kv, Backend::Cpu) => kv::measure(&report),
        (Name::Embedding, Backend::Cpu) => embedding::measure(threads, &report),
        (Name::Store, Backend::Cpu) => store::measure(&report),
        (Name::Rank, Backend::Cpu) => rank::measure(threads, &arguments.model(), &report),
        (Name::Policies, Backend::Cpu) => policies::measure(threads, &arguments.model(), &report),
        (Name::Grammar, Backend::Cpu) => grammar::measure(threads, &arguments.model(), &report),
        (Name::Decoder, Backend::Cpu) => decoder::measure(threads, &arguments.model(), &report),
        (Name::Serve, Backend::Cpu) => serve::measure(threads, &report),
        (Name::Generate, Backend::Cpu) => generate::measure(threads, &arguments.model(), &report),
    }
}

/// How both sides of a comparison run: on the same number of threads, which sleep while the other side runs.
fn options(threads: u32) -> ModelOptions {
    let provider = Provider::Cpu;
    ModelOptions { provider, intra_op_threads: threads, sleep_when_idle: true, ..ModelOptions::default() }
}

/// A model of one operator with these inputs and one output.
fn one_node(
    operator: &str,
    inputs: &[(&str, Tensor)],
    (output, element, dims): (&str, ElementType, &[i64]),
    attributes: &[Attribute],
    threads: u32,
) -> Result<Model> {
    let fixed = |dims: &[i64]| dims.iter().map(|&dim| Dim::Is(dim)).collect::<Vec<_>>();
    let names: Vec<&str> = inputs.iter().map(|(name, _)| *name).collect();
    let graph = inputs.iter().fold(Graph::new(), |graph, (name, tensor)| {
        graph.input(name, tensor.element_type() as i32, &fixed(tensor.dims()))
    });
    let graph = graph.node(operator, &names, &[output], attributes).output(output, element as i32, &fixed(dims));
    Model::open_memory(&graph.to_bytes(), &options(threads))
}

/// Times `measured` and `baseline` alternately, so that both see the same load of the machine. Returns the median of
/// each.
fn side_by_side(
    rounds: usize,
    mut measured: impl FnMut() -> Result<()>,
    mut baseline: impl FnMut() -> Result<()>,
) -> Result<(f64, f64)> {
    let times = in_turns(rounds, &mut [&mut measured as &mut dyn FnMut() -> Result<()>, &mut baseline])?;
    Ok((median(times[0].concat()), median(times[1].concat())))
}

/// Times each of `all` in each round, so that all see the same load of the machine. Returns the times of each by round.
fn in_turns(rounds: usize, all: &mut [impl FnMut() -> Result<()>]) -> Result<Vec<Vec<Burst>>> {
    let mut times = vec![Vec::new(); all.len()];
    for _ in 0..rounds {
        for (work, times) in all.iter_mut().zip(&mut times) {
            times.push(burst(work)?);
        }
    }
    Ok(times)
}

/// The times of a few runs one after the other.
type Burst = [Duration; 5];

/// A few runs one after the other; the first, which wakes threads and warms caches, is not counted.
fn burst(work: &mut impl FnMut() -> Result<()>) -> Result<Burst> {
    work()?;
    let mut times = [Duration::ZERO; 5];
    for time in &mut times {
        let start = Instant::now();
        work()?;
        *time = start.elapsed();
    }
    Ok(times)
}

/// Refuses a folder without a model.
fn find_language_model(folder: &Path) -> Result<()> {
    if !folder.join("pagoda.json").is_file() {
        let message = format!(
            "{} is not a model folder: `make model-smollm2` makes {LANGUAGE_MODEL}, `make bench-model-8b` {LARGE_LANGUAGE_MODEL}",
            folder.display()
        );
        return Err(Error::new(Status::NotFound, message).about("--model"));
    }
    Ok(())
}

fn median(times: impl Into<Vec<Duration>>) -> f64 {
    let mut times = times.into();
    times.sort();
    times[times.len() / 2].as_secs_f64()
}
