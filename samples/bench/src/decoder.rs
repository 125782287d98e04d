//! Decoders of other exporters, as they are and rewritten for pages: decoding against a plain loop over the same graph with past
//! tensors that grow. Converted: prefill and decoding against ONNX Runtime GenAI with the graph as it was.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::folder::generate::{Form, PastPresent};
use pagoda::folder::{ConvertTo, GenerateFolder, convert};
use pagoda::{
    Cancel, ElementType, Error, GenerateRequest, Generator, GeneratorOptions, KvSize, Model, Result, Status, Tensor,
};
use pagoda_test_support::Folder;

use super::{Report, Row, genai, generate, median, options};

const TOKENS: u32 = 48;
const ROUNDS: usize = 3;
/// Tokens before those that are timed.
const PROMPTS: [u32; 3] = [16, 1000, 2000];
const SEQUENCES: u32 = 8;

/// Everything with a goal.
pub fn measure(threads: u32, path: &Path, report: &Report) -> Result<()> {
    if !GenerateFolder::is_foreign(path) {
        let message = format!(
            "{} is no folder of another exporter: name one with --model, such as target/models/smollm2-past-present or \
             target/models/smollm2-group-query, which make has as goals",
            path.display()
        );
        return Err(Error::new(Status::NotFound, message).about("--model"));
    }
    against_a_loop(threads, path, report)?;
    converted(threads, path, report)
}

/// The graph as it is, and rewritten as a generator has it otherwise, where it is recognised.
fn against_a_loop(threads: u32, path: &Path, report: &Report) -> Result<()> {
    let all =
        || GeneratorOptions { model: options(threads), kv_size: KvSize::Bytes(1 << 30), ..GeneratorOptions::default() };
    let generator = Generator::open_folder(GenerateFolder::open(path)?, all())?;
    let rewritten = Some(Generator::open(path, all())?).filter(|other| other.folder().form == Form::Paged);
    let folder = generator.folder();
    let Form::PastPresent(names) = &folder.form else {
        return Err(Error::new(Status::Unsupported, "its graph has no past tensors").about("--model"));
    };
    let plain = Loop { model: Model::open(folder.file(&folder.model), &options(threads))?, names, folder };
    for prompt in PROMPTS.into_iter().filter(|prompt| prompt + TOKENS <= folder.limits.max_context) {
        report.doing(format!("measuring after {prompt} tokens"));
        let (mut others, expected) = (Vec::new(), plain.decode(&ids(0, prompt))?.0);
        for (how, generator) in [("", Some(&generator)), ("rewritten, ", rewritten.as_ref())] {
            let Some(generator) = generator else { continue };
            let mut own = Vec::new();
            for _ in 0..ROUNDS {
                let (tokens, time) = generated(generator, prompt, 1)?;
                own.push(time);
                others.push(plain.decode(&ids(0, prompt))?.1);
                // Rewritten products with weights in blocks do not round their inputs.
                assert!(
                    !how.is_empty() || tokens == expected,
                    "both take the likeliest tokens: {tokens:?}, {expected:?}"
                );
            }
            let other = median(others.clone());
            report.row(row(format!("{how}1 sequence after {prompt} tokens"), 1, median(own), other))?;
            let several =
                (0..ROUNDS).map(|_| Ok(generated(generator, prompt, SEQUENCES)?.1)).collect::<Result<Vec<_>>>()?;
            let case = format!("{how}{SEQUENCES} sequences after {prompt} tokens");
            report.row(row(case, SEQUENCES, median(several), other))?;
        }
    }
    Ok(())
}

/// The graph with pages, where a Python has ONNX Runtime GenAI, which knows no other attention than GroupQueryAttention.
fn converted(threads: u32, path: &Path, report: &Report) -> Result<()> {
    report.doing("measuring ONNX Runtime GenAI");
    let Some(other) = genai::measure(path, threads)? else { return Ok(()) };
    report.doing("measuring the converted graph");
    let out = Folder::new();
    convert(path, out.path(), ConvertTo::Paged, &Cancel::new())?;
    let generator = generate::open(out.path(), threads, None)?;
    let (prefill, decode) = generate::one_sequence(&generator)?;
    let (eight, _) = generate::eight_sequences(&generator)?;
    let against = |case: &str, value, baseline| {
        let (case, ratio) = (format!("converted, {case}"), value / baseline);
        Row { bench: "decoder", case, value, unit: "tokens/s", baseline, baseline_name: "ORT GenAI", ratio }
    };
    report.rows([
        against("prefill 512", prefill, other.prefill),
        against("decode after 512", decode, other.decode),
        against("8 sequences at once", eight, other.eight),
    ])
}

fn row(case: String, sequences: u32, own: f64, other: f64) -> Row {
    let tokens = f64::from(TOKENS - 1);
    let (value, baseline) = (f64::from(sequences) * tokens / own, tokens / other);
    let baseline_name = "plain loop, 1 sequence";
    Row { bench: "decoder", case, value, unit: "tokens/s", baseline, baseline_name, ratio: value / baseline }
}

/// Any tokens, others for each sequence.
fn ids(sequence: u32, count: u32) -> Vec<u32> {
    (0..count).map(|at| 300 + (at * 7919 + sequence * 104_729) % 200).collect()
}

/// The tokens of the first of so many sequences, and the time of all tokens but the first ones.
fn generated(generator: &Generator, prompt: u32, sequences: u32) -> Result<(Vec<u32>, Duration)> {
    let request = |sequence| GenerateRequest {
        max_new_tokens: Some(TOKENS),
        do_sample: Some(false),
        ignore_eos: true,
        repetition_penalty: Some(1.0),
        max_draft: Some(0),
        ..GenerateRequest::new(ids(sequence, prompt))
    };
    // Prompts are in the cache, all but their last page: what is timed is decoding.
    let requests: Vec<_> = (0..sequences).map(request).collect();
    let warm: Vec<_> =
        requests.iter().map(|request| GenerateRequest { max_new_tokens: Some(1), ..request.clone() }).collect();
    generator.generate_all(&warm, |_| ()).into_iter().collect::<Result<Vec<_>>>()?;
    let mut answers = generator.generate_all(&requests, |_| ()).into_iter().collect::<Result<Vec<_>>>()?;
    let time = answers.iter().map(|answer| answer.choices[0].timings.generation).max().unwrap_or_default();
    Ok((answers.remove(0).choices.remove(0).tokens, time))
}

/// A plain loop: what a run returns is the past of the next one.
struct Loop<'a> {
    model: Model,
    names: &'a PastPresent,
    folder: &'a GenerateFolder,
}

impl Loop<'_> {
    /// The likeliest tokens after a prompt, and the time of all but the first.
    fn decode(&self, prompt: &[u32]) -> Result<(Vec<u32>, Duration)> {
        let kv = &self.folder.kv;
        let empty = || Tensor::zeros(kv.element, &[1, kv.heads.into(), 0, kv.head_size.into()]);
        let mut past = (0..2 * kv.layers).map(|_| empty()).collect::<Result<Vec<_>>>()?;
        let (mut new, mut length, mut tokens, mut begun) = (prompt.to_vec(), 0, Vec::new(), Instant::now());
        while tokens.len() < TOKENS as usize {
            let (token, present) = self.step(&new, length, &past)?;
            length += new.len();
            (past, new) = (present, vec![token]);
            tokens.push(token);
            if tokens.len() == 1 {
                begun = Instant::now();
            }
        }
        Ok((tokens, begun.elapsed()))
    }

    fn step(&self, new: &[u32], length: usize, past: &[Tensor]) -> Result<(u32, Vec<Tensor>)> {
        let Self { model, names, folder } = self;
        let count = new.len() as i64;
        let ids: Vec<i64> = new.iter().map(|&token| token.into()).collect();
        let (ids, positions) = (Tensor::from_slice(&[1, count], &ids)?, length as i64..length as i64 + count);
        let positions = Tensor::from_slice(&[1, count], &positions.collect::<Vec<_>>())?;
        let all = length + new.len();
        let mask = Tensor::from_slice(&[1, all as i64], &vec![1_i64; all])?;
        let branch = Tensor::from_bools(&[1], &[length > 0])?;
        let mut fed: Vec<(&str, &Tensor)> = vec![(&names.input_ids, &ids), (&names.attention_mask, &mask)];
        fed.extend(names.position_ids.as_ref().map(|name| (name.as_str(), &positions)));
        fed.extend(names.use_cache_branch.as_ref().map(|name| (name.as_str(), &branch)));
        let layers = names.past_keys.iter().chain(&names.past_values);
        fed.extend(layers.map(String::as_str).zip(past));
        let outputs: Vec<&str> = [&names.logits]
            .into_iter()
            .chain(&names.present_keys)
            .chain(&names.present_values)
            .map(String::as_str)
            .collect();
        let mut made = model.run(&fed, &outputs)?;
        let logits = made.remove(0);
        if logits.element_type() != ElementType::F32 {
            return Err(Error::new(Status::Unsupported, "only logits in f32 are measured").about("--model"));
        }
        let row = &logits.as_slice::<f32>()?[(new.len() - 1) * folder.vocab_size as usize..];
        let best = (0..row.len()).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        Ok((best as u32, made))
    }
}
