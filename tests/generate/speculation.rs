//! Drafts: answers are what they are without, and fewer steps give them.

use std::fs;
use std::path::{Path, PathBuf};

use pagoda::engine::{GenerateRequest, GenerateResponse, Generator, GeneratorOptions, Grammar, KvPolicy};
use pagoda::{KvFormat, Status};
use pagoda_test_support::{Folder, Random, times};
use serde_json::{Value, json};

use super::cases::{PAGE, folder, greedy, on_gpu, open, options, oracle, oracle_logits, prompt, stepped, tokens};
use super::folders::{change, copy_of, replace};

fn drafting(request: &GenerateRequest, max_draft: u32) -> GenerateRequest {
    GenerateRequest { max_draft: Some(max_draft), ..request.clone() }
}

/// Answers requests together.
fn all(generator: &Generator, requests: &[GenerateRequest]) -> Vec<GenerateResponse> {
    generator.generate_all(requests, |_| ()).into_iter().map(Result::unwrap).collect()
}

/// What must not depend on drafts. Times do.
fn answer(response: &GenerateResponse) -> Vec<(Vec<u32>, String, String)> {
    let one = |choice: &pagoda::engine::Choice| {
        // Chunks and single rows of a GPU have logits that differ in their last bits.
        let logprobs: Vec<_> = choice.logprobs.iter().map(|of| (of.rank, (of.logprob * 1e3).round())).collect();
        let logprobs = if on_gpu() { String::new() } else { format!("{logprobs:?}") };
        (
            choice.tokens.clone(),
            choice.text.clone(),
            format!("{:?} {:?} {logprobs}", choice.finish_reason, choice.missing),
        )
    };
    response.choices.iter().map(one).collect()
}

/// Tokens that repeat what came before, with changes.
fn repetitive(random: &mut Random, tokens: usize) -> Vec<u32> {
    let base = prompt(random.below(1 << 30) as u64, 4 + random.below(12));
    let mut out = Vec::new();
    while out.len() < tokens {
        out.extend(&base);
        if random.below(3) == 0 {
            out.push(random.below(272) as u32);
        }
    }
    out.truncate(tokens);
    out
}

#[test]
fn greedy_tokens_are_those_without_drafts() {
    let (plain, drafted) = (open(options(256)), open(GeneratorOptions { max_draft: 12, ..options(256) }));
    let mut random = Random(5);
    let requests: Vec<_> = (0..1000)
        .map(|_| {
            let tokens = 1 + random.below(60);
            greedy(&repetitive(&mut random, tokens), 4 + random.below(28) as u32)
        })
        .collect();
    for (chunk, requests) in (1..).zip(requests.chunks(40)) {
        let (expected, got) = (all(&plain, requests), all(&drafted, requests));
        for ((request, expected), got) in requests.iter().zip(&expected).zip(&got) {
            assert_eq!(got.choices[0].tokens, expected.choices[0].tokens, "{:?}", request.prompt);
        }
        // How much is drafted depends on how busy the machine is: until some guess was right and some was wrong.
        let stats = drafted.stats();
        if chunk * 40 >= times(200, 1000) && (1..stats.drafted_tokens).contains(&stats.accepted_tokens) {
            break;
        }
    }
    let (plain, stats) = (plain.stats(), drafted.stats());
    assert_eq!((plain.drafted_tokens, plain.drafts), (0, 0));
    assert!(stats.accepted_tokens > 0 && stats.accepted_tokens < stats.drafted_tokens, "{stats:?}");
    assert!(stats.drafts <= stats.drafted_tokens && stats.generated_tokens == plain.generated_tokens, "{stats:?}");
}

/// A request of any kind.
pub fn any_request(random: &mut Random) -> GenerateRequest {
    let tokens = 1 + random.below(80);
    let mut request = greedy(&repetitive(random, tokens), 4 + random.below(37) as u32);
    request.seed = Some(random.below(1000) as u64);
    if random.below(2) == 0 {
        (request.do_sample, request.temperature) = (Some(true), Some(0.2 + random.below(10) as f32 * 0.1));
        request.top_k = Some(random.below(20) as u32);
    }
    match random.below(9) {
        0 => request.repetition_penalty = Some(1.3),
        1 => (request.presence_penalty, request.frequency_penalty) = (0.5, 0.5),
        2 => request.no_repeat_ngram_size = Some(3),
        3 => request.logprobs = Some(3),
        4 => request.n = Some(3),
        5 => request.stop_tokens = (0..20).collect(),
        6 => (request.min_new_tokens, request.ignore_eos) = (Some(4), false),
        7 => request.grammar = Some(Grammar::Regex("(ab|cd){3,20}".into())),
        _ => request.prompt_logprobs = Some(1),
    }
    request
}

#[test]
fn every_kind_of_request_gets_the_same_answer_in_batches_and_tiny_pools() {
    let plain = open(options(256));
    for (pages, max_batch_tokens) in [(256, 512), (14, 40)] {
        let drafted = open(GeneratorOptions { max_batch: 8, max_batch_tokens, max_stretch: 0.0, ..options(pages) });
        let mut random = Random(u64::from(pages));
        for turn in 1..=90 {
            let requests: Vec<_> = (0..6).map(|_| any_request(&mut random)).collect();
            let with_drafts: Vec<_> =
                requests.iter().map(|request| drafting(request, 1 + random.below(16) as u32)).collect();
            let (expected, got) = (all(&plain, &requests), all(&drafted, &with_drafts));
            for (at, ((request, expected), got)) in with_drafts.iter().zip(&expected).zip(&got).enumerate() {
                assert_eq!(answer(got), answer(expected), "{:?} at {at}", request.prompt);
                assert_eq!(got.prompt_logprobs.len(), expected.prompt_logprobs.len(), "{:?} at {at}", request.prompt);
            }
            // The same.
            if turn >= times(10, 30) && drafted.stats().accepted_tokens > 0 {
                break;
            }
        }
        let stats = drafted.stats();
        assert!(stats.drafts > 0 && stats.accepted_tokens > 0, "{stats:?}");
        drafted.clear(true).unwrap();
        let kv = drafted.kv_stats();
        assert_eq!((kv.free_pages, kv.shared_pages, kv.resident_owners), (u64::from(pages), 0, 0), "{kv:?}");
    }
}

/// What may be drawn next, the likeliest first, with its probability: as many tokens as `top_k` of a request.
fn likeliest<const K: usize>(tokens: &[u32]) -> [(u32, f64); K] {
    let logits = oracle_logits(tokens);
    let mut order: Vec<_> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    let weights: [f64; K] =
        std::array::from_fn(|at| f64::from(logits[order[at] as usize] - logits[order[0] as usize]).exp());
    std::array::from_fn(|at| (order[at], weights[at] / weights.iter().sum::<f64>()))
}

/// How often the first, the second and the third of the likeliest tokens is drawn, against what the logits of the oracle say, by how
/// likely the first one is: a chi-square test, of answers that are drafted by a model that would draw otherwise.
#[test]
fn drawn_tokens_have_the_distribution_of_the_model() {
    const K: usize = 3;
    let other = other_weights(&folder(), 0.05);
    let options = GeneratorOptions { max_batch_tokens: 48, max_stretch: 0.0, ..stepped(256) };
    let generator = open(GeneratorOptions { draft_model: Some(other.path().to_owned()), max_draft: 3, ..options });
    let (mut guessed, mut accepted) = (0, 0);
    // What was drawn, and what was to be expected, by tenths of the probability of the likeliest token.
    let mut cells = [[(0.0, 0.0); K]; 10];
    for turn in 0..40 {
        let request = |seed: u64| GenerateRequest {
            do_sample: Some(true),
            temperature: Some(1.0),
            top_k: Some(K as u32),
            seed: Some(seed),
            ..greedy(&prompt(seed, 20), 40)
        };
        let requests: Vec<_> = (0..3).map(|at| request(turn * 3 + at)).collect();
        let streams: Vec<_> = requests.iter().map(|request| generator.stream(request).unwrap()).collect();
        // Each step forgets that drafts do not pay off, and counts them from 0.
        generator.clear_speculation();
        while generator.step().unwrap() {
            let stats = generator.stats();
            (guessed, accepted) = (guessed + stats.drafted_tokens, accepted + stats.accepted_tokens);
            generator.clear_speculation();
        }
        for (at, stream) in (0..).zip(streams) {
            let mut tokens = prompt(turn * 3 + at, 20);
            for drawn in stream.response().unwrap().choices.remove(0).tokens {
                let next = likeliest::<K>(&tokens);
                assert!(next.iter().any(|(token, _)| *token == drawn), "{drawn} is none of {next:?}");
                for (cell, (token, likely)) in cells[(next[0].1 * 10.0) as usize].iter_mut().zip(next) {
                    *cell = (cell.0 + f64::from(u8::from(token == drawn)), cell.1 + likely);
                }
                tokens.push(drawn);
            }
        }
    }
    assert!(accepted > 100 && guessed - accepted > 100, "{accepted} of {guessed}");
    let cells = cells.iter().filter(|cells| cells.iter().all(|cell| cell.1 > 5.0));
    let (count, chi_square) = cells.fold((0, 0.0), |(count, sum), cells| {
        (count + 1, sum + cells.iter().map(|(drawn, expected)| (drawn - expected).powi(2) / expected).sum::<f64>())
    });
    // With 2 degrees of freedom for each of three to seven tenths one right sampler in 1,000, at most, is over these.
    let critical = [22.5, 26.1, 29.6, 32.9, 36.1].get(count - 3);
    assert!(critical.is_some_and(|critical| chi_square < *critical), "{chi_square} of {count} tenths");
}

#[test]
fn requests_that_are_cancelled_between_steps_leave_no_page() {
    let options = GeneratorOptions { max_batch: 8, max_batch_tokens: 40, max_draft: 16, ..stepped(14) };
    // Prompts come in as fast as they can, so that pages run out.
    let generator = open(GeneratorOptions { max_stretch: 0.0, ..options });
    let mut random = Random(11);
    let mut streams = Vec::new();
    for _ in 0..1500 {
        if random.below(4) == 0 && streams.len() < 12 {
            streams.push(generator.stream(&any_request(&mut random)).unwrap());
        }
        if random.below(12) == 0 && !streams.is_empty() {
            streams.swap_remove(random.below(streams.len()));
        }
        generator.step().unwrap();
    }
    streams.clear();
    while generator.stats().running + generator.stats().waiting > 0 {
        generator.step().unwrap();
    }
    assert!(generator.stats().drafts > 0 && generator.stats().preemptions > 0, "{:?}", generator.stats());
    generator.clear(true).unwrap();
    let kv = generator.kv_stats();
    assert_eq!((kv.free_pages, kv.shared_pages, kv.resident_owners), (14, 0, 0), "{kv:?}");
}

#[test]
fn what_was_drafted_is_shared_and_kept_like_anything_else() {
    let plain = open(options(256));
    let generator = open(GeneratorOptions { max_draft: 8, draft_model: Some(folder()), ..options(256) });
    let mut random = Random(3);
    for turn in 0..times(8, 20) {
        let first = repetitive(&mut random, 20);
        let session = (turn % 2 == 0).then(|| format!("s{turn}"));
        let ask = |generator: &Generator, tokens: &[u32]| {
            generator.generate(&GenerateRequest { session: session.clone(), ..greedy(tokens, 80) }).unwrap()
        };
        let answered = ask(&generator, &first);
        let next = [&first, &answered.choices[0].tokens[..], &[7]].concat();
        let second = ask(&generator, &next);
        assert!(second.cached_tokens as usize >= (next.len() - 2) / PAGE * PAGE, "{}", second.cached_tokens);
        assert_eq!(second.choices[0].tokens, tokens(&plain, &greedy(&next, 80)), "by pages that drafts were in");
    }
    assert!(generator.stats().accepted_tokens > 0, "{:?}", generator.stats());
}

/// A model's folder with weights that differ by so much.
fn other_weights(of: &Path, differ: f32) -> Folder {
    let copy = copy_of(of);
    let path = copy.path().join("weights.bin");
    let mut random = Random(9);
    let weights = fs::read(&path).unwrap();
    let (floats, rest) = weights.as_chunks::<4>();
    let changed = floats.iter().flat_map(|&bytes| {
        let by = 1.0 + differ * (random.below(2001) as f32 / 1000.0 - 1.0);
        (f32::from_le_bytes(bytes) * by).to_le_bytes()
    });
    let changed: Vec<_> = changed.chain(rest.iter().copied()).collect();
    replace(&copy, "weights.bin", &changed);
    copy
}

/// Checks that requests of any kind have the answers that they have without this draft model, which has so many bytes for its
/// pages. Returns how many tokens it guessed right, and how many in all.
fn same_with(draft_model: &Path, pages: u32, draft_kv_bytes: u64) -> (u64, u64) {
    let (plain, options) =
        (open(options(256)), GeneratorOptions { max_batch: 8, max_batch_tokens: 64, ..options(pages) });
    let drafted = open(GeneratorOptions { draft_model: Some(draft_model.to_owned()), draft_kv_bytes, ..options });
    let (mut random, mut accepted, mut guessed) = (Random(draft_kv_bytes), 0, 0);
    for _ in 0..30 {
        // Otherwise little is drafted, since it does not pay off: the models are as small as each other.
        drafted.clear_speculation();
        let requests: Vec<_> = (0..6).map(|_| any_request(&mut random)).collect();
        let with_drafts: Vec<_> =
            requests.iter().map(|request| drafting(request, 1 + random.below(8) as u32)).collect();
        let (expected, got) = (all(&plain, &requests), all(&drafted, &with_drafts));
        for (at, (expected, got)) in expected.iter().zip(&got).enumerate() {
            assert_eq!(answer(got), answer(expected), "{:?} at {at}", requests[at].prompt);
        }
        let stats = drafted.stats();
        (accepted, guessed) = (accepted + stats.accepted_tokens, guessed + stats.drafted_tokens);
    }
    (accepted, guessed)
}

#[test]
fn a_draft_model_changes_no_token() {
    let mut rates = Vec::new();
    for differ in [0.0, 0.05, 0.8] {
        let other = other_weights(&folder(), differ);
        // The second one has too little room for all.
        for draft_pages in [256, 9] {
            let (accepted, guessed) = same_with(other.path(), 40, draft_pages * 8192);
            assert!(guessed > 0);
            rates.push(accepted as f64 / guessed as f64);
        }
    }
    // The same weights guess all that grammars, penalties and the last bits of logits do not change.
    assert!(rates[0] > 0.7 && rates[0] > rates[2] && rates[2] > rates[4], "{rates:?}");
}

#[test]
fn the_same_model_drafts_what_it_would_generate() {
    let generator = open(GeneratorOptions { draft_model: Some(folder()), max_draft: 4, ..stepped(64) });
    for seed in 0..10 {
        let stream = generator.stream(&greedy(&prompt(seed, 20), 40)).unwrap();
        while generator.step().unwrap() {}
        assert_eq!(stream.response().unwrap().choices[0].tokens, oracle(&prompt(seed, 20), 40));
    }
    let stats = generator.stats();
    assert_eq!((stats.accepted_tokens, stats.drafted_tokens > 0), (stats.drafted_tokens, true), "{stats:?}");
}

/// A model that drafts for the model of the tests and attends to its pages: `make_glide.py` beside it says how.
pub fn glide() -> PathBuf {
    folder().with_file_name("glide")
}

#[test]
fn a_draft_model_reads_the_pages_of_the_main_model() {
    // Without other sequences, with them, and where their pages are evicted.
    for (pages, streams) in [(64, 1), (256, 3), (10, 3)] {
        // Prompts are computed at once: few tokens come after them.
        let options = GeneratorOptions { max_batch_tokens: 48, max_stretch: 0.0, ..stepped(pages) };
        let generator = open(GeneratorOptions { draft_model: Some(glide()), max_draft: 1, ..options });
        let (mut accepted, mut guessed) = (0, 0);
        for turn in 0..8 {
            let prompt = |at: u64| prompt(turn * 10 + at, 1 + (at as usize * 37 + turn as usize * 11) % 90);
            let streams: Vec<_> = (0..streams).map(|at| generator.stream(&greedy(&prompt(at), 40)).unwrap()).collect();
            // Each step forgets that drafts do not pay off, and counts them from 0.
            generator.clear_speculation();
            while generator.step().unwrap() {
                let stats = generator.stats();
                (accepted, guessed) = (accepted + stats.accepted_tokens, guessed + stats.drafted_tokens);
                generator.clear_speculation();
            }
            for (at, stream) in (0..).zip(streams) {
                assert_eq!(stream.response().unwrap().choices[0].tokens, oracle(&prompt(at), 40));
            }
        }
        // It would not guess a token of 272 by chance.
        assert!(accepted == guessed && guessed > 50, "{accepted} of {guessed}, {pages} pages");
    }
}

#[test]
fn a_random_draft_model_that_reads_pages_changes_no_token() {
    let random_weights = other_weights(&glide(), 0.8);
    for pages in [256, 40] {
        let (_, guessed) = same_with(random_weights.path(), pages, 1 << 20);
        assert!(guessed > 20, "{guessed}");
    }
}

#[test]
fn a_draft_model_that_reads_other_pages_is_refused() {
    let error = Generator::open(glide(), options(8)).err().unwrap();
    assert_eq!((error.argument(), error.status()), (Some("folder"), Status::Unsupported), "{error}");
    assert!(error.to_string().contains("draft_model"), "{error}");
    let refused = |other: GeneratorOptions, expected: &str| {
        let error = Generator::open(folder(), other).err().unwrap();
        assert_eq!(error.argument(), Some("options.draft_model"), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    };
    let with = |draft_model: PathBuf| GeneratorOptions { draft_model: Some(draft_model), ..options(8) };
    refused(GeneratorOptions { kv_format: Some(KvFormat::Int8), ..with(glide()) }, "int8");
    refused(GeneratorOptions { kv_policy: Some(KvPolicy::new("lastrec", 64)), ..with(glide()) }, "policy");
    for (key, value, expected) in [
        ("heads", json!(4), "4 heads"),
        ("head_size", json!(16), "16 numbers a head"),
        ("page_size", json!(16), "16 tokens a page"),
        ("type", json!("f16"), "f16"),
        ("layers", json!([0, 2]), "layer 2"),
    ] {
        let other = other_weights(&glide(), 0.0);
        change(&other, |about| about["main"][key] = value.clone());
        refused(with(other.path().to_owned()), expected);
    }
    let other = other_weights(&glide(), 0.0);
    change(&other, |about| about["main"]["layers"] = json!([0]));
    let error = Generator::open(folder(), with(other.path().to_owned())).err().unwrap();
    assert!(error.to_string().contains("2 names for 1 layers"), "{error}");
}

#[test]
fn a_draft_model_with_other_tokens_is_refused() {
    let other = other_weights(&folder(), 0.0);
    let text = fs::read_to_string(other.path().join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_str(&text).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let names: Vec<_> = vocab.keys().filter(|name| name.len() == 1).take(2).cloned().collect();
    let (one, two) = (vocab[&names[0]].clone(), vocab[&names[1]].clone());
    (vocab[&names[0]], vocab[&names[1]]) = (two, one);
    replace(&other, "tokenizer.json", tokenizer.to_string().as_bytes());
    let options = GeneratorOptions { draft_model: Some(other.path().to_owned()), ..options(8) };
    let error = Generator::open(folder(), options).err().unwrap();
    assert_eq!(error.argument(), Some("options.draft_model"), "{error}");
    assert!(error.to_string().contains("same tokenizer"), "{error}");
}

#[test]
fn a_generator_drafts_only_while_it_is_to() {
    let generator = open(GeneratorOptions { max_draft: 8, ..options(64) });
    let repeated = greedy(&[5, 6, 7].repeat(20), 60);
    let expected = tokens(&generator, &drafting(&repeated, 0));
    assert_eq!(generator.stats().drafts, 0, "the request says so");
    generator.set_speculation(false);
    assert_eq!(tokens(&generator, &repeated), expected);
    assert_eq!(generator.stats().drafts, 0, "the generator says so");
    generator.set_speculation(true);
    for _ in 0..20 {
        assert_eq!(tokens(&generator, &repeated), expected);
    }
    assert!(generator.stats().drafts > 0, "{:?}", generator.stats());
    generator.clear_speculation();
    generator.set_speculation(false);
    assert_eq!(tokens(&generator, &repeated), expected);
    let stats = generator.stats();
    assert_eq!((stats.drafts, stats.drafted_tokens, stats.accepted_tokens), (0, 0, 0));
}

#[test]
fn too_long_drafts_are_refused() {
    let error = open(options(8)).generate(&drafting(&greedy(&[1], 1), 65)).unwrap_err();
    assert_eq!((error.argument(), error.to_string().contains("65")), (Some("max_draft"), true), "{error}");
    let error = Generator::open(folder(), GeneratorOptions { max_draft: 99, ..options(8) }).err().unwrap();
    assert_eq!(error.argument(), Some("options.max_draft"), "{error}");
}
