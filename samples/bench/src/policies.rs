//! Cache policies: what their decisions cost a step, and decoding with a fixed number of slots against decoding with all tokens.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::{Driver, KvPolicy, Prompt, TokenStream};
use pagoda::kv::policy::{LayerSlots, PolicyOptions, Ranking, SlotPlan, SlotValues, named};
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvFormat, KvSize, Result};
use pagoda_cli::progress::Progress;
use pagoda_test_support::Random;

use super::{Row, find_language_model, median, options, side_by_side};

/// A model of 8 billion weights has so many layers and kv heads.
const LAYERS: usize = 32;
const HEADS: usize = 8;
const SLOTS: usize = 2048;

/// The steps that are timed in turn, and how often.
const STEPS: usize = 8;
const ROUNDS: usize = 12;

/// Everything with a goal.
pub fn measure(threads: u32, folder: &Path, progress: &Progress) -> Result<Vec<Row>> {
    find_language_model(folder)?;
    let mut rows = Vec::new();
    for name in ["lastrec", "h2o", "qh2o-vlen"] {
        progress.doing(format!("measuring policies: the decisions of {name}"));
        rows.push(decisions(name)?);
    }
    for (name, kv_format) in [("lastrec", None), ("h2o", None), ("h2o", Some(KvFormat::Int8))] {
        progress.doing(format!("measuring policies: decode with {name}"));
        rows.push(decode(threads, folder, name, kv_format)?);
    }
    Ok(rows)
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
    let streams = [start(&with, SLOTS + 64)?, start(&without, SLOTS - STEPS * ROUNDS / 2)?];
    for _ in 0..ROUNDS {
        times.push(steps(&with)?);
        baseline.push(steps(&without)?);
    }
    drop(streams);
    let (value, baseline) = (1.0 / median(times), 1.0 / median(baseline));
    let format = kv_format.map_or(String::new(), |format| format!(" {format:?}").to_lowercase());
    Ok(Row {
        bench: "policies",
        case: format!("decode {name}{format}, L={SLOTS}"),
        value,
        unit: "tokens/s",
        baseline,
        baseline_name: "all of 2048 tokens cached",
        ratio: value / baseline,
    })
}

/// A sequence whose prompt is read.
fn start(generator: &Generator, prompt: usize) -> Result<TokenStream> {
    let mut random = Random(1);
    let tokens = (0..prompt).map(|_| 1000 + random.below(40_000) as u32).collect();
    let mut stream = generator.stream(&GenerateRequest {
        do_sample: Some(false),
        ignore_eos: true,
        max_new_tokens: Some(1000),
        ..GenerateRequest::new(Prompt::Tokens(tokens))
    })?;
    while generator.stats().computed_tokens < prompt as u64 && generator.step()? {}
    stream.next().transpose()?;
    Ok(stream)
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
