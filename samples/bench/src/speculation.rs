//! Speculation: decoding with drafts against decoding without.

use std::path::Path;
use std::time::Duration;

use pagoda::{Error, GenerateRequest, Generator, GeneratorOptions, KvSize, ModelOptions, Provider, Result, Status};

use super::{Report, Row, find_language_model, median, options};

const TOKENS: u32 = 128;
const ROUNDS: usize = 3;
const MAX_DRAFT: u32 = 16;

const TEXT: &str = "The lighthouse at the end of the pier was built in 1874 by a company of engineers from the north. It is \
    thirty-one metres high and has a lamp that can be seen from a distance of twenty-two miles. Until 1962 a keeper lived in \
    the small house beside it with his family. The keeper lit the lamp every evening, wound the clock that turned it, and \
    wrote the weather into a book. Since then the lamp has been lit by a machine, and the house is a museum that is open \
    from May to October.";

/// What comes between the text and its changed copy, and how the copy begins.
const EDITS: [(&str, &str); 3] = [
    ("a word", "The same text again, with 'tower' instead of 'lighthouse':\n\nThe tower at the end of the pier"),
    (
        "a number",
        "The same text again, with the year 1880 instead of 1874:\n\nThe lighthouse at the end of the pier was built in 1880",
    ),
    ("its beginning", "The same text again, about another place:\n\nThe lighthouse at the mouth of the river"),
];
const FREE: [&str; 2] = [
    "Once upon a time there was a fox who wanted to learn to read. Every morning",
    "How bread is made, from the grain to the loaf, told to somebody who has never seen it: First",
];

/// The models of `samples/make_language_model.py`, the smaller of which drafts for the other.
const PAIR: [&str; 2] = ["target/bench/pair-main", "target/bench/pair-draft"];
/// How many tokens the smaller one drafts, and how often a guess is right: it knows 205 of the 256 tokens.
const PAIR_DRAFT: u32 = 4;
const PAIR_RATE: f64 = 205.0 / 256.0;
/// Two rounds over the circle of tokens.
const PAIR_TOKENS: u32 = 512;

/// Everything with a goal.
pub fn measure(threads: u32, on_gpu: bool, folder: &Path, report: &Report) -> Result<()> {
    find_language_model(folder)?;
    PAIR.into_iter().try_for_each(find_of_pair)?;
    report.doing("measuring speculation");
    let model = if on_gpu { ModelOptions { provider: Provider::Cuda, ..options(threads) } } else { options(threads) };
    let kv_size = KvSize::Bytes(1 << 29);
    let generator =
        Generator::open(folder, GeneratorOptions { model: model.clone(), kv_size, ..GeneratorOptions::default() })?;
    for (what, copy) in EDITS {
        let (case, prompt) = (format!("a text again but for {what}"), format!("{TEXT}\n\n{copy}"));
        report.row(compare(&generator, on_gpu, &case, &prompt, false)?)?;
    }
    // Drawn: the likeliest tokens of a small model soon repeat themselves.
    for beginning in FREE {
        report.row(compare(&generator, on_gpu, "free text", beginning, true)?)?;
    }
    drop(generator);
    report.row(pair(&model)?)
}

fn find_of_pair(folder: &str) -> Result<()> {
    if Path::new(folder).join("pagoda.json").is_file() {
        return Ok(());
    }
    let message = format!("{folder} is not a model folder: `make bench-model` makes it");
    Err(Error::new(Status::NotFound, message))
}

/// Drafts of a model whose guesses are right at a known rate, against the speed that this rate gives by the times of the two
/// models: a step verifies all drafts and the token before them, and takes those before the first wrong one and one more.
fn pair(model: &ModelOptions) -> Result<Row> {
    let [main, draft] = PAIR.map(Path::new);
    let open = |folder: &Path, draft_model: Option<&Path>| {
        let draft_model = draft_model.map(Path::to_path_buf);
        let kv_size = KvSize::Bytes(1 << 28);
        Generator::open(
            folder,
            GeneratorOptions { model: model.clone(), kv_size, draft_model, ..GeneratorOptions::default() },
        )
    };
    let plain = open(main, None)?;
    let step = time_of_circle(&plain, 1, 0)?;
    let verify = time_of_circle(&plain, 1 + PAIR_DRAFT, 0)?;
    drop(plain);
    let drafting = time_of_circle(&open(draft, None)?, 1, 0)?;
    let both = open(main, Some(draft))?;
    let time = time_of_circle(&both, 1, PAIR_DRAFT)?;
    let stats = both.stats();
    let tokens = (1.0 - PAIR_RATE.powi(PAIR_DRAFT as i32 + 1)) / (1.0 - PAIR_RATE);
    let predicted = tokens / (verify + f64::from(PAIR_DRAFT) * drafting);
    Ok(Row {
        bench: "speculation",
        case: format!(
            "a draft model ({} of {} right), {:.2} times as fast as without",
            stats.accepted_tokens,
            stats.drafted_tokens,
            step / time
        ),
        value: 1.0 / time,
        unit: "tokens/s",
        baseline: predicted,
        baseline_name: "by the formula",
        ratio: 1.0 / time / predicted,
    })
}

/// Seconds of a token, where so many sequences are decoded at once.
fn time_of_circle(generator: &Generator, sequences: u32, max_draft: u32) -> Result<f64> {
    let request = |first| GenerateRequest {
        max_new_tokens: Some(PAIR_TOKENS),
        do_sample: Some(false),
        ignore_eos: true,
        max_draft: Some(max_draft),
        ..GenerateRequest::new(vec![first])
    };
    let requests: Vec<_> = (0..sequences).map(request).collect();
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        generator.clear(false)?;
        let answers = generator.generate_all(&requests, |_| ()).into_iter().collect::<Result<Vec<_>>>()?;
        times.extend(answers.iter().map(|answer| answer.choices[0].timings.generation).max());
    }
    Ok(median(times) / f64::from(PAIR_TOKENS - 1))
}

/// Tokens per second with drafts against those without.
fn compare(generator: &Generator, on_gpu: bool, case: &str, prompt: &str, drawn: bool) -> Result<Row> {
    let (mut with, mut without, mut drafted) = (Vec::new(), Vec::new(), (0, 0));
    for _ in 0..ROUNDS {
        let (plain, time) = decode(generator, prompt, drawn, 0)?;
        without.push(time);
        let before = generator.stats();
        let (tokens, time) = decode(generator, prompt, drawn, MAX_DRAFT)?;
        with.push(time);
        let stats = generator.stats();
        drafted.0 += stats.accepted_tokens - before.accepted_tokens;
        drafted.1 += stats.drafted_tokens - before.drafted_tokens;
        // In half precision a product of many rows rounds otherwise than that of one, which near-equal tokens show.
        assert!(on_gpu || tokens == plain, "drafts change no token: {tokens:?}, without {plain:?}");
    }
    let tokens = f64::from(TOKENS - 1);
    let (value, baseline) = (tokens / median(with), tokens / median(without));
    Ok(Row {
        bench: "speculation",
        case: format!("{case} ({} of {} right)", drafted.0, drafted.1),
        value,
        unit: "tokens/s",
        baseline,
        baseline_name: "without drafts",
        ratio: value / baseline,
    })
}

/// An answer, and the time of all its tokens but the first.
fn decode(generator: &Generator, prompt: &str, drawn: bool, max_draft: u32) -> Result<(Vec<u32>, Duration)> {
    let request = GenerateRequest {
        max_new_tokens: Some(TOKENS),
        do_sample: Some(drawn),
        seed: Some(1),
        ignore_eos: true,
        repetition_penalty: Some(1.0),
        max_draft: Some(max_draft),
        ..GenerateRequest::new(prompt)
    };
    generator.clear(false)?;
    let choice = generator.generate(&request)?.choices.remove(0);
    Ok((choice.tokens, choice.timings.generation))
}
