//! Cache policies: what their decisions cost a step, and decoding with a fixed number of slots against decoding with all tokens.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::{Driver, Event, KvPolicy, Prompt, TokenStream};
use pagoda::folder::GenerateFolder;
use pagoda::kv::policy::{LayerSlots, PolicyOptions, Ranking, SlotPlan, SlotValues, named};
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvFormat, KvSize, ModelOptions, Provider, Result};
use pagoda_test_support::Random;

use super::{Report, Row, find_language_model, median, memory, options, side_by_side};

/// A model of 8 billion weights has so many layers and kv heads.
const LAYERS: usize = 32;
const HEADS: usize = 8;
const SLOTS: usize = 2048;

/// Sequences that decode together on a GPU.
const BATCHES: [usize; 2] = [1, 16];

/// The steps that are timed in turn, and how often.
const STEPS: usize = 8;
const ROUNDS: usize = 12;

/// The most tokens of an answer.
const LONGEST: u64 = 32_000;

/// Everything with a goal.
pub fn measure(threads: u32, folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    for name in ["lastrec", "h2o", "qh2o-vlen"] {
        report.doing(format!("measuring policies: the decisions of {name}"));
        report.row(decisions(name)?)?;
    }
    for (name, kv_format) in [("lastrec", None), ("h2o", None), ("h2o", Some(KvFormat::Int8))] {
        report.doing(format!("measuring policies: decode with {name}"));
        report.row(decode(threads, folder, name, kv_format)?)?;
    }
    long_answer(threads, folder, report)
}

/// Decode on the first GPU, of one sequence and of a batch.
pub fn measure_on_gpu(folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    for (kv_format, names) in [(None, &["lastrec", "h2o"][..]), (Some(KvFormat::Int8), &["h2o"])] {
        report.doing("measuring policies: decode with all tokens cached");
        let mut baselines = Vec::new();
        speeds(folder, kv_format, None, |_, speed| {
            baselines.push(speed);
            Ok(())
        })?;
        for name in names {
            report.doing(format!("measuring policies: decode with {name}"));
            let mut of_all = baselines.iter();
            speeds(folder, kv_format, Some(KvPolicy::new(*name, SLOTS as u32)), |sequences, speed| {
                of_all.next().map_or(Ok(()), |all| report.row(decode_row(name, kv_format, sequences, speed, *all)))
            })?;
        }
    }
    Ok(())
}

/// Tokens per second on the first GPU, for each of [`BATCHES`] as soon as it is known.
fn speeds(
    folder: &Path,
    kv_format: Option<KvFormat>,
    kv_policy: Option<KvPolicy>,
    mut each: impl FnMut(usize, f64) -> Result<()>,
) -> Result<()> {
    let model = ModelOptions { provider: Provider::Cuda, ..ModelOptions::default() };
    let prompt = if kv_policy.is_some() { SLOTS + 64 } else { SLOTS - STEPS * ROUNDS / 2 };
    let (driver, kv_size) = (Driver::Caller, KvSize::Bytes(4 << 30));
    // Each sequence has a prompt of its own.
    let options =
        GeneratorOptions { max_batch: 16, share_prefixes: false, max_stretch: 0.0, ..GeneratorOptions::default() };
    let generator =
        Generator::open(folder, GeneratorOptions { model, kv_size, kv_format, kv_policy, driver, ..options })?;
    for sequences in BATCHES {
        let streams = start(&generator, prompt, sequences)?;
        let times = (0..ROUNDS).map(|_| steps(&generator)).collect::<Result<Vec<_>>>()?;
        each(sequences, sequences as f64 / median(times))?;
        drop(streams);
        while generator.step()? {}
    }
    Ok(())
}

/// The decisions of a step that decodes one token, in all layers: the plan, the graph's inputs, and the scores. Against a copy of
/// these inputs, which any decision on the host makes.
fn decisions(name: &str) -> Result<Row> {
    let policy = named(name, &PolicyOptions::default())?;
    let mut layers =
        (0..LAYERS).map(|_| LayerSlots::new(&*policy, HEADS, SLOTS)).collect::<Result<Vec<LayerSlots>>>()?;
    let mut random = Random(1);
    let all: Vec<f32> = (0..HEADS * SLOTS).map(|_| random.below(1 << 20) as f32).collect();
    let (mut ranking, mut plan, mut token_pos) = (Ranking::default(), SlotPlan::default(), Vec::new());
    let mut step = |rows: usize, token_pos: &mut Vec<i32>| -> Result<()> {
        let values = SlotValues { lengths: &all[..rows * HEADS], errors: &all[..rows * HEADS] };
        let weights = if policy.needs().weights { &all[..] } else { &[] };
        for slots in &mut layers {
            slots.plan_into(&*policy, rows, &mut ranking, &mut plan)?;
            token_pos.clear();
            slots.token_pos_after(&plan, token_pos);
            std::hint::black_box(&token_pos);
            slots.commit(&*policy, &plan, weights, values)?;
        }
        Ok(())
    };
    step(SLOTS / 2, &mut token_pos)?;
    step(SLOTS / 2, &mut token_pos)?;
    // Memory of all layers, as in a step.
    let from = vec![1_i32; LAYERS * HEADS * SLOTS];
    let mut to = Vec::new();
    let copy = || {
        for from in from.chunks_exact(HEADS * SLOTS) {
            to.clear();
            to.extend_from_slice(from);
            std::hint::black_box(&to);
        }
        Ok(())
    };
    let (took, copied) = side_by_side(40, || step(1, &mut token_pos), copy)?;
    Ok(Row {
        bench: "policies",
        case: format!("decisions of {name}, {LAYERS} layers, {HEADS} heads, L={SLOTS}"),
        value: took * 1e6,
        unit: "us",
        baseline: copied * 1e6,
        baseline_name: "memcpy of token_pos",
        ratio: copied / took,
    })
}

/// Tokens per second of one sequence with as many slots, all in use, against one whose cache has as many tokens.
fn decode(threads: u32, folder: &Path, name: &str, kv_format: Option<KvFormat>) -> Result<Row> {
    let open = |kv_policy: Option<KvPolicy>| {
        // Threads that spin would take the cores of the other one.
        let model = options(threads);
        let kv_size = KvSize::Bytes(1 << 30);
        let driver = Driver::Caller;
        Generator::open(
            folder,
            GeneratorOptions { model, kv_size, kv_format, kv_policy, driver, ..GeneratorOptions::default() },
        )
    };
    let with = open(Some(KvPolicy::new(name, SLOTS as u32)))?;
    let without = open(None)?;
    let (mut times, mut baseline) = (Vec::new(), Vec::new());
    let streams = [start(&with, SLOTS + 64, 1)?, start(&without, SLOTS - STEPS * ROUNDS / 2, 1)?];
    for _ in 0..ROUNDS {
        times.push(steps(&with)?);
        baseline.push(steps(&without)?);
    }
    drop(streams);
    Ok(decode_row(name, kv_format, 1, 1.0 / median(times), 1.0 / median(baseline)))
}

fn decode_row(name: &str, kv_format: Option<KvFormat>, sequences: usize, value: f64, baseline: f64) -> Row {
    let format = kv_format.map_or(String::new(), |format| format!(" {format:?}").to_lowercase());
    let sequences = if sequences == 1 { String::new() } else { format!(", B={sequences}") };
    Row {
        bench: "policies",
        case: format!("decode {name}{format}, L={SLOTS}{sequences}"),
        value,
        unit: "tokens/s",
        baseline,
        baseline_name: "all of 2048 tokens cached",
        ratio: value / baseline,
    }
}

/// An answer far longer than its slots, as long as the model's context allows: tokens per second of its last thousand tokens
/// against those of its third thousand, and the memory that a token between them took against that of its keys and values. Nothing
/// where the context has no room for the thousands that are compared.
fn long_answer(threads: u32, folder: &Path, report: &Report) -> Result<()> {
    const SLOTS: u32 = 1024;
    const THOUSAND: u64 = 1000;
    let found = GenerateFolder::open(folder)?;
    let prompt = 16;
    let tokens = LONGEST.min(u64::from(found.limits.max_context).saturating_sub(prompt)) / THOUSAND * THOUSAND;
    if tokens < 5 * THOUSAND {
        return Ok(());
    }
    let kv_policy = Some(KvPolicy { grace_period: SLOTS / 2, ..KvPolicy::new("h2o", SLOTS) });
    let (model, driver) = (options(threads), Driver::Caller);
    let generator =
        Generator::open(folder, GeneratorOptions { model, kv_policy, driver, ..GeneratorOptions::default() })?;
    let mut stream = generator.stream(&GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(tokens as u32),
        ..GenerateRequest::new(Prompt::Tokens((1000..1000 + prompt as u32).collect()))
    })?;
    let mut thousand = |number: u64| -> Result<Duration> {
        report.doing(format!("measuring policies: a long answer, {} of {tokens} tokens", number * THOUSAND));
        let begun = Instant::now();
        for _ in 0..THOUSAND {
            generator.step()?;
            stream.next().transpose()?;
        }
        Ok(begun.elapsed())
    };
    thousand(0)?;
    thousand(1)?;
    let early = thousand(2)?.as_secs_f64();
    let (between, taken) =
        memory::taken_by(|| (3..tokens / THOUSAND - 1).try_for_each(|number| thousand(number).map(drop)));
    between?;
    let late = thousand(tokens / THOUSAND - 1)?.as_secs_f64();
    let case = |what: &str| format!("{what} of {tokens} tokens, h2o, L={SLOTS}");
    let of_token = taken as f64 / (tokens - 4 * THOUSAND) as f64;
    report.rows([
        Row {
            bench: "policies",
            case: case("the last thousand"),
            value: THOUSAND as f64 / late,
            unit: "tokens/s",
            baseline: THOUSAND as f64 / early,
            baseline_name: "tokens 2,000 to 3,000",
            ratio: early / late,
        },
        Row {
            bench: "policies",
            case: case("memory of each"),
            value: of_token,
            unit: "bytes",
            baseline: found.kv.bytes_per_token as f64,
            baseline_name: "its keys and values",
            ratio: found.kv.bytes_per_token as f64 / of_token.max(1.0),
        },
    ])
}

/// Sequences whose prompts are read.
fn start(generator: &Generator, prompt: usize, sequences: usize) -> Result<Vec<TokenStream>> {
    let mut random = Random(1);
    let mut streams = Vec::new();
    for _ in 0..sequences {
        let tokens = (0..prompt).map(|_| 1000 + random.below(40_000) as u32).collect();
        streams.push(generator.stream(&GenerateRequest {
            do_sample: Some(false),
            ignore_eos: true,
            max_new_tokens: Some(1000),
            ..GenerateRequest::new(Prompt::Tokens(tokens))
        })?);
    }
    let mut begun = vec![false; sequences];
    while begun.contains(&false) && generator.step()? {
        for (begun, stream) in begun.iter_mut().zip(&mut streams).filter(|(begun, _)| !**begun) {
            *begun = matches!(stream.try_next(), Some(Event::Token(_)));
        }
    }
    Ok(streams)
}

/// The time of a step that decodes.
fn steps(generator: &Generator) -> Result<Duration> {
    // The first wakes threads.
    generator.step()?;
    let begun = Instant::now();
    for _ in 1..STEPS {
        generator.step()?;
    }
    Ok(begun.elapsed() / (STEPS as u32 - 1))
}
