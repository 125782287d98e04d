//! Grammars: what the masks of a token cost, and decoding with a grammar against decoding without.

use std::path::Path;
use std::time::{Duration, Instant};

use pagoda::engine::{Driver, Grammar, GrammarCompiler};
use pagoda::{GenerateRequest, Generator, GeneratorOptions, KvSize, Result};

use super::{Report, Row, find_language_model, median, options};

/// Goals, in microseconds: of the median, and of the 99th percentile.
const MEDIAN: f64 = 50.0;
const P99: f64 = 1000.0;

/// Sequences that run together, and the tokens of each that are timed.
const BATCH: usize = 8;
const TOKENS: u32 = 96;
const ROUNDS: usize = 3;

/// Schemas and values that are valid by them.
const SCHEMAS: [(&str, &str); 3] = [
    (
        r#"{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "age", "tags"], "additionalProperties": false}"#,
        r#"{"name": "Augusta Ada King, Countess of Lovelace", "age": 36, "email": "ada@analytical.example",
        "tags": ["mathematics", "the Analytical Engine", "notes on Bernoulli numbers"]}"#,
    ),
    (
        r##"{"$defs": {"node": {"type": "object", "properties": {"value": {"type": ["number", "string", "null"]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "required": ["value", "children"]}},
        "$ref": "#/$defs/node"}"##,
        r#"{"value": "root", "children": [{"value": 3.25, "children": []}, {"value": null, "children": [{"value":
        "a leaf with a longer text, to see what strings cost", "children": []}]}, {"value": -17e3, "children": []}]}"#,
    ),
    (
        r#"{"type": "object"}"#,
        r#"{"any": ["value", {"of": true, "JSON": [1, 2, 3, "four \"quoted\" words", null]}], "ünïcode": "日本語 text"}"#,
    ),
];

/// Everything with a goal.
pub fn measure(threads: u32, folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    report.doing("measuring grammar: masks");
    let generator = open(threads, folder)?;
    report.rows(masks(&generator)?)?;
    report.doing("measuring grammar: decode");
    report.row(decode(&generator)?)
}

fn open(threads: u32, folder: &Path) -> Result<Generator> {
    let (model, kv_size, driver) = (options(threads), KvSize::Bytes(1 << 29), Driver::Caller);
    Generator::open(folder, GeneratorOptions { model, kv_size, driver, ..GeneratorOptions::default() })
}

/// The time of each token of the values, from the token before it to its mask. Each value comes twice, as in two requests with the
/// same grammar.
fn masks(generator: &Generator) -> Result<Vec<Row>> {
    let folder = generator.folder();
    let compiler = GrammarCompiler::new(generator.tokenizer(), folder.vocab_size as usize, &folder.tokens.eos)?;
    let mut times = Vec::new();
    for (schema, value) in SCHEMAS.iter().chain(&SCHEMAS) {
        let state = compiler.compile(&Grammar::JsonSchema((*schema).to_owned()), 0)?;
        for token in generator.tokenizer().encode(value, false)? {
            let begun = Instant::now();
            let next = state.next()?;
            times.push(begun.elapsed().as_secs_f64() * 1e6);
            assert!(next.allows(token), "the schema allows the value");
            state.took(token);
        }
    }
    times.sort_by(f64::total_cmp);
    let row = |case: &str, value: f64, goal: f64| Row {
        bench: "grammar",
        case: case.into(),
        value,
        unit: "us",
        baseline: goal,
        baseline_name: "the goal",
        ratio: goal / value,
    };
    let p99 = times[times.len() * 99 / 100];
    Ok(vec![row("mask of a token, median", times[times.len() / 2], MEDIAN), row("mask of a token, p99", p99, P99)])
}

/// Tokens per second of sequences that run together, all with a schema, against the same without.
fn decode(generator: &Generator) -> Result<Row> {
    // It does not end before the tokens do.
    let schema = r#"{"type": "array", "minItems": 1000, "items": {"type": "string", "maxLength": 40}}"#;
    let grammar = Grammar::JsonSchema(schema.into());
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        with.push(batch(generator, Some(&grammar))?);
        without.push(batch(generator, None)?);
    }
    let tokens = f64::from(TOKENS) * BATCH as f64;
    let (value, baseline) = (tokens / median(with), tokens / median(without));
    Ok(Row {
        bench: "grammar",
        case: format!("decode {BATCH} sequences, JSON schema"),
        value,
        unit: "tokens/s",
        baseline,
        baseline_name: "without a grammar",
        ratio: value / baseline,
    })
}

/// The time that the tokens of a batch take.
fn batch(generator: &Generator, grammar: Option<&Grammar>) -> Result<Duration> {
    let request = |number: usize| GenerateRequest {
        max_new_tokens: Some(TOKENS),
        ignore_eos: true,
        do_sample: Some(true),
        seed: Some(number as u64),
        grammar: grammar.cloned(),
        ..GenerateRequest::new(format!("{number} names of rivers, as JSON:"))
    };
    generator.clear(false)?;
    let streams = (0..BATCH).map(|number| generator.stream(&request(number))).collect::<Result<Vec<_>>>()?;
    generator.step()?;
    let begun = Instant::now();
    while generator.step()? {}
    drop(streams);
    Ok(begun.elapsed())
}
