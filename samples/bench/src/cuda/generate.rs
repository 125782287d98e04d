//! The generator on a GPU, step by step: decode, prefill, both in one step, and many requests at once.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::{Driver, Prompt, TokenStream};
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvSize, ModelOptions, Provider, Result};
use pagoda_test_support::Random;

use super::super::{Report, Row, find_language_model, median};

/// A Llama of 8B in bf16 by PyTorch 2.11, compiled, in a CUDA graph, with a contiguous cache, on an H200: milliseconds.
const PYTORCH: &str = "PyTorch on 8B, noted";
const DECODE: [(usize, usize, f64); 4] = [(1, 2048, 4.53), (8, 2048, 4.99), (32, 2048, 6.49), (128, 1024, 9.16)];
const PREFILL: [(usize, f64); 3] = [(512, 12.75), (2048, 48.9), (8192, 219.0)];

const STEPS: usize = 60;
const WARM_UP: usize = 10;
/// Tokens of an answer: more than the steps of any case.
const MOST_STEPS: u32 = 250;
const ROUNDS: usize = 7;
/// The parts of a mixed step: sequences that decode, their tokens, and the rows of a prompt.
const MIXED: (usize, usize, usize) = (64, 1024, 448);
/// Requests at once, their tokens, and the tokens of their answers.
const MANY: (usize, usize, u32) = (64, 512, 128);
/// The goal for the engine's own time in a decode step, in microseconds.
const OWN_TIME: f64 = 40.0;

struct Bench {
    generator: Generator,
    random: Random,
    vocab: usize,
}

/// Everything with a goal.
pub fn measure(folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    report.doing("measuring generate: opening");
    let mut bench = Bench::open(folder)?;
    for (tokens, pytorch) in PREFILL {
        report.doing(format!("measuring generate: prefill {tokens}"));
        let time = bench.prefill(tokens)?;
        report.row(row(format!("prefill {tokens}"), time, PYTORCH, pytorch))?;
    }
    for (sequences, tokens, pytorch) in DECODE {
        report.doing(format!("measuring generate: decode {sequences} after {tokens}"));
        let (time, own) = bench.decode(sequences, tokens)?;
        report.row(row(format!("decode {sequences} after {tokens}"), time, PYTORCH, pytorch))?;
        let own = row(format!("engine time, step of {sequences}"), own * 1e3, "goal", OWN_TIME);
        report.row(Row { unit: "us", ..own })?;
    }
    report.doing("measuring generate: a prompt beside sequences that decode");
    report.row(bench.mixed()?)?;
    report.doing("measuring generate: many requests");
    report.row(bench.many()?)
}

fn row(case: String, value: f64, baseline_name: &'static str, baseline: f64) -> Row {
    Row { bench: "generate", case, value, unit: "ms", baseline, baseline_name, ratio: baseline / value }
}

impl Bench {
    fn open(folder: &Path) -> Result<Self> {
        let model = ModelOptions { provider: Provider::Cuda, ..ModelOptions::default() };
        let options = GeneratorOptions {
            model,
            kv_size: KvSize::Bytes(24 << 30),
            max_batch: 128,
            max_batch_tokens: 8192,
            max_stretch: 0.0,
            share_prefixes: false,
            driver: Driver::Caller,
            ..GeneratorOptions::default()
        };
        let generator = Generator::open(folder, options)?;
        let vocab = generator.folder().vocab_size as usize;
        Ok(Self { generator, random: Random(1), vocab })
    }

    fn request(&mut self, tokens: usize, new: u32) -> Result<TokenStream> {
        let tokens = (0..tokens).map(|_| self.random.below(self.vocab) as u32).collect();
        self.generator.stream(&GenerateRequest {
            do_sample: Some(false),
            ignore_eos: true,
            max_new_tokens: Some(new),
            ..GenerateRequest::new(Prompt::Tokens(tokens))
        })
    }

    /// Runs one step. Returns its time and the number of its rows.
    fn step(&self) -> Result<(Duration, u64)> {
        let before = self.generator.stats().computed_tokens;
        let begun = Instant::now();
        self.generator.step()?;
        Ok((begun.elapsed(), self.generator.stats().computed_tokens - before))
    }

    /// Starts so many sequences and runs steps until all of them decode.
    fn start(&mut self, sequences: usize, tokens: usize) -> Result<Vec<TokenStream>> {
        let streams = (0..sequences).map(|_| self.request(tokens, MOST_STEPS)).collect::<Result<_>>()?;
        while self.step()?.1 != sequences as u64 {}
        Ok(streams)
    }

    /// Ends sequences, and forgets what is cached of them.
    fn end(&self, streams: Vec<TokenStream>) -> Result<()> {
        drop(streams);
        while self.generator.step()? {}
        self.generator.clear(false).map(drop)
    }

    /// Milliseconds of a prompt's first token.
    fn prefill(&mut self, tokens: usize) -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..=ROUNDS {
            let stream = self.request(tokens, 1)?;
            let begun = Instant::now();
            while self.generator.step()? {}
            times.push(begun.elapsed());
            self.end(vec![stream])?;
        }
        times.remove(0);
        Ok(median(times) * 1e3)
    }

    /// Milliseconds of a step in which so many sequences decode, and those of it that the engine takes beside the model.
    fn decode(&mut self, sequences: usize, tokens: usize) -> Result<(f64, f64)> {
        let streams = self.start(sequences, tokens)?;
        for _ in 0..WARM_UP {
            self.step()?;
        }
        let before = self.generator.stats();
        let times = (0..STEPS).map(|_| Ok(self.step()?.0)).collect::<Result<Vec<_>>>()?;
        let after = self.generator.stats();
        let own = (after.step_us - before.step_us) as f64 - (after.model_us - before.model_us) as f64;
        self.end(streams)?;
        Ok((median(times) * 1e3, own * 1e-3 / STEPS as f64))
    }

    /// A step with a part of a prompt in it, against the larger of its parts alone.
    fn mixed(&mut self) -> Result<Row> {
        let (sequences, tokens, rows) = MIXED;
        let prompt = self.prefill(rows)?;
        let streams = self.start(sequences, tokens)?;
        let (mut alone, mut mixed) = (Vec::new(), Vec::new());
        for round in 0..20 {
            alone.push(self.step()?.0);
            let other = self.request(rows, 1)?;
            let (time, rows_of_step) = self.step()?;
            assert_eq!(rows_of_step, (sequences + rows) as u64, "all of them in one step");
            drop(other);
            if round >= 5 {
                mixed.push(time);
            }
            self.step()?;
        }
        self.end(streams)?;
        let larger = (median(alone) * 1e3).max(prompt);
        let case = format!("{sequences} decodes and {rows} rows of a prompt");
        Ok(row(case, median(mixed) * 1e3, "larger part alone", larger))
    }

    /// Many requests at once, against what their prompts and their steps take alone.
    fn many(&mut self) -> Result<Row> {
        let (requests, tokens, new) = MANY;
        let prompts = self.prefill(8192)? * (requests * tokens) as f64 / 8192.0;
        let (step, _) = self.decode(requests, tokens + new as usize / 2)?;
        let ideal = prompts + step * f64::from(new - 1);
        let streams = (0..requests).map(|_| self.request(tokens, new)).collect::<Result<Vec<_>>>()?;
        let begun = Instant::now();
        while self.generator.step()? {}
        let time = begun.elapsed().as_secs_f64() * 1e3;
        self.end(streams)?;
        Ok(row(format!("{requests} requests, {tokens} in, {new} out"), time, "its parts alone", ideal))
    }
}
