//! The generator, with SmolLM2-135M in 4 bits: prefill, decode, 8 sequences at once, its own time, its memory, turns of a
//! conversation, and what a long prompt costs the others.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::{EngineStore, GeneratorStats, Prompt};
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvSize, ModelOptions, Result};
use pagoda_test_support::{Folder, Random};

use super::{Report, Row, find_language_model, llama_cpp, median, memory, options};

/// Tokens per second on two cores, written down: ONNX Runtime GenAI in int4.
const GENAI: &str = "ORT GenAI int4, noted";
const GENAI_DECODE: f64 = 62.0;

const PROMPT: usize = 512;
const NEW: u32 = 64;
const SEQUENCES: usize = 8;
/// The goal for the engine's own time in a step of 8 sequences, in microseconds.
const OWN_TIME: f64 = 60.0;
/// The goal for what a token takes beside its keys and values, in bytes.
const TOKEN_BYTES: f64 = 1024.0;
const CONVERSATION: usize = 2000;
const LONG: usize = 8000;
const ROUNDS: usize = 5;

/// Everything with a goal.
pub fn measure(threads: u32, folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    report.doing("measuring generate: llama.cpp");
    let (name, llama) = llama_cpp::measure(folder, threads)?;
    report.doing("measuring generate: opening");
    let begun = Instant::now();
    let generator = open(folder, threads, None)?;
    report.row(row("open", begun.elapsed().as_secs_f64(), "s", "goal", 1.0, 1.0 / begun.elapsed().as_secs_f64()))?;
    report.doing("measuring generate: prefill and decode");
    let ((prefill, decode), memory) = with_memory(&generator, || one_sequence(&generator))?;
    let against = |case, value, baseline| row(case, value, "tokens/s", name, baseline, value / baseline);
    report.row(against("prefill 512", prefill, llama.prefill))?;
    report.row(against("decode after 512", decode, llama.decode))?;
    report.row(row("decode after 512", decode, "tokens/s", GENAI, GENAI_DECODE, decode / GENAI_DECODE))?;
    report.doing(format!("measuring generate: {SEQUENCES} sequences"));
    let (eight, own) = eight_sequences(&generator)?;
    report.row(against("8 sequences at once", eight, llama.eight))?;
    report.row(row("engine time, step of 8 sequences", own, "us", "goal", OWN_TIME, OWN_TIME / own))?;
    report.rows(memory)?;
    report.doing("measuring generate: tokens while a long prompt comes in");
    report.row(stalls(&generator)?)?;
    drop(generator);
    report.doing("measuring generate: turns of a conversation");
    report.rows(turns(folder, threads)?)
}

fn row(case: &str, value: f64, unit: &'static str, baseline_name: &'static str, baseline: f64, ratio: f64) -> Row {
    Row { bench: "generate", case: case.to_owned(), value, unit, baseline, baseline_name, ratio }
}

/// The result of `run`, and the memory that it left: what the process has resident, against the weights and the pages that are in
/// use; and what each cached token takes beside its keys and values.
fn with_memory<T>(generator: &Generator, run: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Row>)> {
    const MIB: f64 = 1024.0 * 1024.0;
    let before = generator.kv_stats();
    let (result, bytes) = memory::taken_by(run);
    let after = generator.kv_stats();
    let kv = &generator.folder().kv;
    let pages = (after.pages - after.free_pages) * u64::from(kv.page_size) * kv.bytes_per_token;
    let needed = (generator.folder().model_bytes() + pages) as f64 / MIB;
    let resident = memory::resident("self")? as f64 / MIB;
    let each = bytes as f64 / (after.resident_tokens - before.resident_tokens) as f64;
    let rows = vec![
        row("resident memory", resident, "MiB", "weights and pages in use", needed, needed / resident),
        row("memory of a cached token, beside its page", each, "bytes", "goal", TOKEN_BYTES, TOKEN_BYTES / each),
    ];
    Ok((result?, rows))
}

/// A generator that has the cores to itself.
pub fn open(folder: &Path, threads: u32, store: Option<EngineStore>) -> Result<Generator> {
    // No other program is measured beside it, so that its threads may spin between operators.
    let model = ModelOptions { sleep_when_idle: false, ..options(threads) };
    Generator::open(
        folder,
        GeneratorOptions { model, kv_size: KvSize::Bytes(1 << 30), store, ..GeneratorOptions::default() },
    )
}

/// Tokens that no other request has, so that nothing is shared.
fn tokens(random: &mut Random, count: usize) -> Vec<u32> {
    (0..count).map(|_| 1000 + random.below(40_000) as u32).collect()
}

fn request(tokens: Vec<u32>, new: u32) -> GenerateRequest {
    GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(new),
        ..GenerateRequest::new(Prompt::Tokens(tokens))
    }
}

/// Tokens per second of prefill, and of decode after it, of one sequence alone.
pub fn one_sequence(generator: &Generator) -> Result<(f64, f64)> {
    let mut random = Random(1);
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        let timings = generator.generate(&request(tokens(&mut random, PROMPT), NEW))?.choices[0].timings;
        prefill.push(timings.first_token);
        decode.push(timings.per_token(NEW as usize));
    }
    // The first round wakes threads and touches weights.
    Ok((PROMPT as f64 / median(prefill.split_off(1)), 1.0 / median(decode.split_off(1))))
}

/// Tokens per second of 8 sequences that decode together, and the engine's own time in a step, in microseconds.
pub fn eight_sequences(generator: &Generator) -> Result<(f64, f64)> {
    let mut random = Random(2);
    let (mut rates, mut own) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        let requests: Vec<_> = (0..SEQUENCES).map(|_| request(tokens(&mut random, 16), 2 * NEW)).collect();
        let mut streams = requests.iter().map(|request| generator.stream(request)).collect::<Result<Vec<_>>>()?;
        // All have begun when each has its first token.
        for stream in &mut streams {
            stream.next().transpose()?;
        }
        let (before, begun) = (generator.stats(), Instant::now());
        for stream in streams {
            for token in stream {
                token?;
            }
        }
        let (took, after) = (begun.elapsed(), generator.stats());
        let rows = after.computed_tokens - before.computed_tokens;
        rates.push(took.div_f64(rows as f64));
        own.push(own_time(&before, &after));
    }
    Ok((1.0 / median(rates.split_off(1)), median(own.split_off(1)) * 1e6))
}

/// The time of a step outside the model.
fn own_time(before: &GeneratorStats, after: &GeneratorStats) -> Duration {
    let own = (after.step_us - before.step_us) - (after.model_us - before.model_us);
    Duration::from_micros(own).div_f64((after.steps - before.steps) as f64)
}

/// The 99th percentile of the time between tokens of 7 sequences while a long prompt comes in, against that without.
fn stalls(generator: &Generator) -> Result<Row> {
    let mut random = Random(3);
    let without = gaps(generator, &mut random, 0)?;
    let with = gaps(generator, &mut random, LONG)?;
    let (with, without) = (percentile_99(with), percentile_99(without));
    let case = format!("p99 between tokens, {LONG}-token prompt comes in");
    Ok(row(&case, with * 1e3, "ms", "without it", without * 1e3, without / with))
}

/// The times between the tokens of 7 sequences, while a prompt of so many tokens comes in.
fn gaps(generator: &Generator, random: &mut Random, prompt: usize) -> Result<Vec<Duration>> {
    let requests: Vec<_> = (1..SEQUENCES).map(|_| request(tokens(random, 16), 400)).collect();
    let mut streams = requests.iter().map(|request| generator.stream(request)).collect::<Result<Vec<_>>>()?;
    for stream in &mut streams {
        stream.next().transpose()?;
    }
    let long = (prompt > 0).then(|| generator.stream(&request(tokens(random, prompt), 1))).transpose()?;
    let (mut gaps, mut last) = (Vec::new(), Instant::now());
    for _ in 0..150 {
        for stream in &mut streams {
            stream.next().transpose()?;
        }
        gaps.push(last.elapsed());
        last = Instant::now();
    }
    drop(long);
    Ok(gaps)
}

fn percentile_99(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() * 99 / 100].as_secs_f64()
}

/// The time to the first token of a second turn, against that of the whole conversation: resident, and after a restart.
fn turns(folder: &Path, threads: u32) -> Result<Vec<Row>> {
    let stores = Folder::new();
    let store = || Some(EngineStore::new(stores.path().join("store")));
    let mut generator = open(folder, threads, store())?;
    let mut random = Random(4);
    let (mut cold, mut resident, mut restarted) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..3 {
        let mut conversation = tokens(&mut random, CONVERSATION);
        for after_restart in [false, true] {
            let session = Some(format!("{round}"));
            let turn = |generator: &Generator, tokens: Vec<u32>| -> Result<(Duration, Vec<u32>)> {
                let response =
                    generator.generate(&GenerateRequest { session: session.clone(), ..request(tokens, 8) })?;
                let choice = &response.choices[0];
                Ok((choice.timings.first_token, choice.tokens.clone()))
            };
            if !after_restart {
                let (first, answer) = turn(&generator, conversation.clone())?;
                cold.push(first);
                conversation.extend(answer);
            }
            if after_restart {
                drop(generator);
                generator = open(folder, threads, store())?;
            }
            conversation.extend(tokens(&mut random, 20));
            let (first, answer) = turn(&generator, conversation.clone())?;
            conversation.extend(answer);
            if after_restart {
                restarted.push(first)
            } else {
                resident.push(first)
            };
        }
    }
    let (cold, resident, restarted) = (median(cold), median(resident), median(restarted));
    let row = |case, value: f64| row(case, value * 1e3, "ms", "cold prefill", cold * 1e3, cold / value);
    Ok(vec![
        row("second turn of 2,000 tokens, resident", resident),
        row("second turn of 2,000 tokens, restarted", restarted),
    ])
}
