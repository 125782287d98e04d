//! The CUDA kernels against the CPU's reference, on a GPU host. One program that needs nothing beside it:
//! `gpu [--cases N] [PART…]`, with the parts below; it ends with 1 where one fails or there is no GPU.

mod captured;
#[path = "../common/mod.rs"]
mod common;
mod dense;
#[path = "../dense_cases/mod.rs"]
mod dense_cases;
mod device;
mod embed_output;
#[path = "../embed_output_cases/mod.rs"]
mod embed_output_cases;
mod followed;
mod glu;
#[path = "../glu_cases/mod.rs"]
mod glu_cases;
mod harm;
#[path = "../llm_cases/mod.rs"]
mod llm_cases;
mod paged;
mod paged_followed;
mod parity;
mod pools;
mod projection;
mod quantised;
mod same_bits;
mod sampling;
mod table;
mod tokens;
mod written;

use std::process::ExitCode;

use pagoda_kernels::cuda::Gpu;

/// What parts get.
pub(crate) struct Context {
    gpu: &'static Gpu,
    /// How many random calls of each type.
    cases: u64,
}

type Part = (&'static str, fn(&Context));

const PARTS: &[Part] = &[
    ("golden", parity::golden),
    ("random", parity::random),
    ("long", parity::long),
    ("windows", parity::windows),
    ("append", parity::append),
    ("alone-or-together", same_bits::alone_or_together),
    ("pages-moved", same_bits::pages_moved),
    ("twice", same_bits::twice),
    ("runs", same_bits::runs),
    ("followed", followed::followed),
    ("nonsense", harm::nonsense),
    ("quantised", quantised::random),
    ("quantised-followed", quantised::followed),
    ("quantised-nonsense", quantised::nonsense),
    ("quantised-refused", quantised::refused),
    ("large-pool", pools::beyond_32_bits),
    ("tokens-moved", tokens::moved),
    ("table-found", table::found),
    ("table-evicted", table::evicted),
    ("table-torn", table::torn),
    ("captured", captured::captured),
    ("dense-random", dense::random),
    ("dense-widths", dense::widths),
    ("dense-same-norms", dense::same_norms),
    ("dense-same-bits", dense::same_bits),
    ("dense-nonsense", dense::nonsense),
    ("dense-captured", dense::captured),
    ("unit", embed_output::unit),
    ("linear", embed_output::linear),
    ("embed", embed_output::embed),
    ("unit-captured", embed_output::captured),
    ("paged-golden", paged::golden),
    ("paged-random", paged::random),
    ("paged-slots", paged::slots),
    ("paged-tiles", paged::tiles),
    ("paged-same-bits", paged::same_bits),
    ("paged-nonsense", paged::nonsense),
    ("paged-refused", paged::refused),
    ("paged-captured", paged::captured),
    ("paged-followed", paged_followed::followed),
    ("block-linear", projection::blocks),
    ("block-linear-captured", projection::blocks_captured),
    ("block-linear-refused", projection::blocks_refused),
    ("glu", glu::random),
    ("glu-captured", glu::captured),
    ("projection", projection::random),
    ("projection-same-bits", projection::same_bits),
    ("projection-streams", projection::streams),
    ("projection-empty", projection::empty),
    ("projection-captured", projection::captured),
    ("sampling", sampling::random),
    ("sampling-draws", sampling::draws),
    ("sampling-same-bits", sampling::same_bits),
    ("sampling-nonsense", sampling::nonsense),
];

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut cases = 2000;
    if let Some(at) = arguments.iter().position(|argument| argument == "--cases") {
        cases = arguments[at + 1].parse().expect("--cases takes a number");
        arguments.drain(at..at + 2);
    }
    let gpu = match Gpu::open(0) {
        Ok(gpu) => Box::leak(Box::new(gpu)),
        Err(error) => {
            eprintln!("gpu: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("on {}", gpu.context().name().unwrap());
    let context = Context { gpu, cases };
    let mut failed = 0;
    for &(name, part) in PARTS {
        if !arguments.is_empty() && !arguments.iter().any(|argument| argument == name) {
            continue;
        }
        let start = std::time::Instant::now();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| part(&context)));
        let result = result.map(|()| context.gpu.context().synchronize());
        let good = matches!(result, Ok(Ok(())));
        println!("{name}: {} ({:.1} s)", if good { "ok" } else { "FAILED" }, start.elapsed().as_secs_f64());
        if let Ok(Err(error)) = result {
            println!("{name}: {error:?}");
        }
        failed += i32::from(!good);
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
