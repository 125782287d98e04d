//! `pagoda bench`: its command line. The benchmarks are a separate program, `pagoda-bench` (samples/bench).

use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::ValueEnum;
use pagoda::{Error, Status};

/// The model folder that [`Name::Rank`] measures by default.
pub const MODEL: &str = "target/bench/rank";
/// The model folder that [`Name::Generate`], [`Name::Policies`], [`Name::Grammar`] and [`Name::Speculation`] measure by default.
pub const LANGUAGE_MODEL: &str = "target/models/smollm2";
/// A language model of 8B with random weights: `make bench-model-8b` makes it.
pub const LARGE_LANGUAGE_MODEL: &str = "target/bench/llm-8b";

/// What to measure and how.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagoda bench attention
  pagoda bench rank --model target/bench/rank      (after `make bench-model`)
  pagoda bench kv --json | jq 'select(.ratio < 1)'

The benchmarks are in the program pagoda-bench, which `make build` puts beside `pagoda`; an installed Pagoda has none.")]
pub struct Arguments {
    /// What to measure.
    pub name: Name,
    /// One JSON object a line.
    #[arg(long)]
    pub json: bool,
    /// Where to measure.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    pub backend: Backend,
    /// Threads for both sides; 0 = one for each core.
    #[arg(long, default_value_t = 0)]
    pub threads: u32,
    /// The model folder to measure [default: of `rank` target/bench/rank, which `make bench-model` makes; of language models
    /// target/models/smollm2, which `make model-smollm2` makes; of `generate` on a GPU target/bench/llm-8b, which `make bench-model-8b`
    /// makes]
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    model: Option<PathBuf>,
}

impl Arguments {
    /// The model folder to measure.
    pub fn model(&self) -> PathBuf {
        let default = match (self.name, self.backend) {
            (Name::Generate, Backend::Cuda) => LARGE_LANGUAGE_MODEL,
            (Name::Generate | Name::Policies | Name::Grammar | Name::Speculation, _) => LANGUAGE_MODEL,
            _ => MODEL,
        };
        self.model.clone().unwrap_or_else(|| default.into())
    }
}

/// A benchmark.
#[derive(Clone, Copy, ValueEnum)]
pub enum Name {
    /// HstuAttention, against ONNX Runtime's MatMul on 1024x1024x1024.
    Attention,
    /// PagedKvAppend, against memcpy of the same bytes.
    Append,
    /// PagedAttention: decode against summing the same bytes, prefill against MatMul, short formats against f32.
    PagedAttention,
    /// A run of a one-node model through pagoda.h, against ONNX Runtime's own C call.
    Overhead,
    /// Lookup, prepare and commit of a batch in the KV cache.
    Kv,
    /// Lookups in an embedding table, against a bare gather and a map behind a lock; writes 5 GB of temporary files.
    Embedding,
    /// The host store: reading against memcpy, appending against write and fdatasync, opening.
    Store,
    /// The engine with a model of 8 layers: with the cache against without, 16 callers against one, its own time.
    Rank,
    /// The generator with SmolLM2 in 4 bits: prefill, decode, 8 sequences at once, its own time, turns of a conversation.
    Generate,
    /// The decoder of another exporter (`--model`), run as it is, against a plain loop over it with growing past tensors; and
    /// converted, against ONNX Runtime GenAI, where PAGODA_GENAI names a Python that has it.
    Decoder,
    /// Cache policies: their decisions, and decoding with 2,048 slots against decoding with 2,048 cached tokens.
    Policies,
    /// Grammars: the masks of a token, and decoding 8 sequences with a JSON schema against decoding without.
    Grammar,
    /// Speculation: decoding with drafts against decoding without, of texts that repeat the prompt and of free text.
    Speculation,
    /// `pagoda serve` on loopback: what HTTP adds to a ranking and to a token, 16 streams, tensors over gRPC, memory.
    Serve,
}

/// Where a benchmark computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The operators inside ONNX Runtime, on the CPU.
    Cpu,
    /// On the first GPU: the kernels alone of `attention`, `append` and `embedding`, the engine of `rank`.
    Cuda,
}

/// Replaces this process by `pagoda-bench` from the folder of its executable, with the same arguments after `bench`.
/// They were parsed only to check them. Returns only if that fails.
pub fn exec() -> Error {
    let program = match std::env::current_exe() {
        Ok(pagoda) => pagoda.with_file_name("pagoda-bench"),
        Err(error) => return Error::new(Status::Io, format!("the path of this program is not known: {error}")),
    };
    let error = Command::new(&program).args(std::env::args_os().skip(2)).exec();
    let program = program.display();
    if error.kind() == ErrorKind::NotFound {
        let missing = format!(
            "the benchmarks are not installed: there is no {program}. They come with Pagoda's source: run `make build` there, \
             and then target/release/pagoda bench"
        );
        return Error::new(Status::NotFound, missing);
    }
    Error::new(Status::Io, format!("{program} does not start: {error}"))
}
