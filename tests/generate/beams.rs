//! Beam search, against one that is written from the definition: transformers' `GenerationMixin._beam_search`, with every token
//! computed from the whole sequence.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use pagoda::engine::{
    BeamOptions, Choice, EarlyStop, Event, FinishReason, GenerateRequest, Generator, GeneratorOptions, Grammar,
    GrammarCompiler,
};
use pagoda::text::Tokenizer;
use pagoda::{Cancel, Status};
use pagoda_test_support::Random;

use super::cases::{
    PAGE, VOCAB, folder, greedy, on_gpu, open, options, oracle, oracle_logits, prompt, stepped, tokens,
};
use super::speculation;

/// The model's end-of-sequence tokens.
const EOS: [u32; 2] = [2, 4];
/// What stands for minus infinity in the definition.
const NEVER: f64 = -1e9;
/// Scores that are closer may come out in another order where a product is summed up otherwise.
const MARGIN: f64 = 2e-5;

/// An answer of the oracle.
#[derive(Clone, Debug)]
struct Found {
    tokens: Vec<u32>,
    score: f64,
    is_finished: bool,
}

/// The oracle's answers, and the smallest difference that one of its decisions was made by.
struct Expected {
    found: Vec<Found>,
    margin: f64,
}

fn log_softmax(tokens: &[u32]) -> Vec<f32> {
    static KNOWN: LazyLock<Mutex<HashMap<Vec<u32>, Vec<f32>>>> = LazyLock::new(Mutex::default);
    if let Some(known) = KNOWN.lock().unwrap().get(tokens) {
        return known.clone();
    }
    let logits = oracle_logits(tokens);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    let scores: Vec<f32> = logits.iter().map(|&logit| (f64::from(logit) - sum.ln()) as f32).collect();
    KNOWN.lock().unwrap().insert(tokens.to_vec(), scores.clone());
    scores
}

/// The logits processors of a request, on log probabilities.
fn process(request: &GenerateRequest, prompt: &[u32], answer: &[u32], allowed: &[bool], scores: &mut [f32]) {
    for &(token, bias) in &request.logit_bias {
        scores[token as usize] += bias;
    }
    let mut seen: Vec<u32> = prompt.iter().chain(answer).copied().collect();
    seen.sort_unstable();
    seen.dedup();
    for token in seen {
        let score = &mut scores[token as usize];
        let penalty = request.repetition_penalty.unwrap_or(1.0);
        *score = if *score < 0.0 { *score * penalty } else { *score / penalty };
    }
    if answer.len() < request.min_new_tokens.unwrap_or(0) as usize {
        EOS.iter().for_each(|&eos| scores[eos as usize] = f32::NEG_INFINITY);
    }
    for (score, allowed) in scores.iter_mut().zip(allowed) {
        if !allowed {
            *score = f32::NEG_INFINITY;
        }
    }
    if let Some(eos) = request.forced_eos.filter(|_| answer.len() + 1 == request.max_new_tokens.unwrap() as usize) {
        scores.fill(f32::NEG_INFINITY);
        scores[eos as usize] = 0.0;
    }
}

/// What a request can end with, beside tokens, and what it may have next.
struct Rules<'a> {
    ends: &'a dyn Fn(&[u32]) -> bool,
    allowed: &'a dyn Fn(&[u32]) -> Vec<bool>,
}

const FREE: Rules<'static> = Rules { ends: &|_| false, allowed: &|_| vec![true; VOCAB] };

fn search(request: &GenerateRequest, rules: &Rules<'_>) -> Expected {
    let pagoda::engine::Prompt::Tokens(prompt) = &request.prompt else { panic!("no tokens") };
    let BeamOptions { width, length_penalty, early_stop } = request.beams.unwrap();
    let width = width as usize;
    let max_new_tokens = request.max_new_tokens.unwrap() as usize;
    let mut ends = request.stop_tokens.clone();
    if !request.ignore_eos || request.grammar.is_some() {
        ends.extend(EOS);
    }
    ends.sort_unstable();
    ends.dedup();
    let beams_to_keep = (1 + ends.len()).max(2) * width;
    let penalised = |score: f64, length: usize| score / (length as f64).powf(f64::from(length_penalty));
    let mut margin = f64::INFINITY;

    let mut running: Vec<(Vec<u32>, f64)> =
        (0..width).map(|beam| (Vec::new(), if beam == 0 { 0.0 } else { NEVER })).collect();
    let mut sequences = vec![Found { tokens: Vec::new(), score: NEVER, is_finished: false }; width];
    loop {
        let length = running[0].0.len() + 1;
        // The candidates of all beams.
        let mut candidates = Vec::new();
        for (beam, (answer, beam_score)) in running.iter().enumerate() {
            if *beam_score <= NEVER / 2.0 {
                continue;
            }
            let mut scores = log_softmax(&[&prompt[..], answer].concat());
            process(request, prompt, answer, &(rules.allowed)(answer), &mut scores);
            let all = scores.iter().enumerate().filter(|(_, score)| **score > f32::NEG_INFINITY);
            candidates.extend(all.map(|(token, score)| (beam_score + f64::from(*score), beam, token as u32)));
        }
        candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
        let gap = |at: usize| candidates.get(at).map_or(f64::INFINITY, |next| candidates[at - 1].0 - next.0);
        margin = margin.min(gap(width.min(candidates.len())));
        let mut hits = Vec::new();
        for (_, beam, token) in candidates.iter().take(beams_to_keep) {
            let answer = [&running[*beam].0[..], &[*token]].concat();
            let hit = ends.contains(token) || length == max_new_tokens || (rules.ends)(&answer);
            hits.push((answer, hit));
        }
        // Those that go on, and those that ended.
        let going: Vec<usize> = (0..hits.len()).filter(|&at| !hits[at].1).collect();
        if going.len() > width {
            margin = margin.min(candidates[going[width - 1]].0 - candidates[going[width]].0);
        }
        let next: Vec<_> = going.iter().take(width).map(|&at| (hits[at].0.clone(), candidates[at].0)).collect();
        for (at, (answer, hit)) in hits.iter().enumerate().take(width) {
            if *hit {
                let score = penalised(candidates[at].0, length);
                sequences.push(Found { tokens: answer.clone(), score, is_finished: true });
            }
        }
        sequences.sort_by(|a, b| b.score.total_cmp(&a.score));
        let finished = sequences.iter().filter(|found| found.is_finished);
        let scores: Vec<f64> = finished.map(|found| found.score).collect();
        margin = scores.windows(2).map(|two| two[0] - two[1]).fold(margin, f64::min);
        sequences.truncate(width);
        // Whether it ends.
        let all_finished = sequences.iter().all(|found| found.is_finished);
        let hypothetical = if early_stop == EarlyStop::Never && length_penalty > 0.0 { max_new_tokens } else { length };
        let best_possible = next.first().map_or(f64::NEG_INFINITY, |best| penalised(best.1, hypothetical));
        let worst = if all_finished { sequences[width - 1].score } else { NEVER };
        if all_finished {
            margin = margin.min((best_possible - worst).abs());
        }
        let improvement_possible = best_possible > worst;
        let exists_open_beam = !(all_finished && early_stop == EarlyStop::WhenFull);
        if !improvement_possible || !exists_open_beam || next.is_empty() {
            break;
        }
        running = next;
        running.resize(width, (Vec::new(), NEVER));
        // Beams without a score do not go on, but have a length in the definition.
        let length = running[0].0.len();
        running.iter_mut().filter(|beam| beam.1 == NEVER).for_each(|beam| beam.0.resize(length, 0));
    }
    let mut found: Vec<_> = sequences.into_iter().filter(|found| found.is_finished).collect();
    found.truncate(request.n.unwrap_or(1) as usize);
    Expected { found, margin }
}

/// A request with `width` beams and as many answers.
fn beams(prompt: &[u32], max_new_tokens: u32, width: u32) -> GenerateRequest {
    GenerateRequest {
        beams: Some(BeamOptions::new(width)),
        do_sample: None,
        n: Some(width),
        ..greedy(prompt, max_new_tokens)
    }
}

/// Any request with beams.
fn any_request(random: &mut Random) -> GenerateRequest {
    let width = random.pick(&[1, 2, 3, 4, 4, 5, 8, 16]);
    let stop_tokens = (0..random.pick(&[0, 0, 3, 12, 30])).map(|_| random.below(VOCAB) as u32).collect();
    let prompt = prompt(random.below(9) as u64, random.pick(&[1, 5, 20, 31, 32, 33, 60, 70]));
    GenerateRequest {
        n: Some(1 + random.below(width as usize) as u32),
        ignore_eos: random.below(2) == 0,
        stop_tokens,
        beams: Some(BeamOptions {
            width,
            length_penalty: random.pick(&[-1.0, 0.0, 0.5, 1.0, 1.0, 2.0]),
            early_stop: random.pick(&[EarlyStop::WhenUnlikely, EarlyStop::WhenFull, EarlyStop::Never]),
        }),
        logit_bias: random.pick(&[&[][..], &[(2, 2.5)], &[(2, 3.5), (9, -1e30)]]).to_vec(),
        repetition_penalty: random.pick(&[None, None, Some(1.4), Some(0.8)]),
        min_new_tokens: random.pick(&[None, None, Some(1)]),
        forced_eos: random.pick(&[None, None, None, Some(2)]),
        ..beams(&prompt, random.pick(&[1, 2, 6, 14, 24]), width)
    }
}

/// Compares answers with those of the oracle. Returns false if these are too close to tell.
fn check(name: &str, request: &GenerateRequest, choices: &[Choice], rules: &Rules<'_>) -> bool {
    let expected = search(request, rules);
    if expected.margin < MARGIN {
        return false;
    }
    let all = |tokens: &mut dyn Iterator<Item = Vec<u32>>| tokens.collect::<Vec<_>>();
    assert_eq!(
        all(&mut choices.iter().map(|choice| choice.tokens.clone())),
        all(&mut expected.found.iter().map(|found| found.tokens.clone())),
        "{name}: {:?}, stop tokens {:?}",
        request.beams,
        request.stop_tokens,
    );
    for (choice, found) in choices.iter().zip(&expected.found) {
        let score = f64::from(choice.score.unwrap());
        assert!((score - found.score).abs() < 1e-4 * found.score.abs().max(1.0), "{name}: {score} for {found:?}");
        let last = *choice.tokens.last().unwrap();
        let stopped = request.stop_tokens.contains(&last)
            || (!request.ignore_eos || request.grammar.is_some()) && EOS.contains(&last)
            || (rules.ends)(&choice.tokens);
        let reason = if stopped { FinishReason::Stop } else { FinishReason::Length };
        assert_eq!(choice.finish_reason, reason, "{name}: {choice:?}");
    }
    true
}

#[test]
fn answers_and_scores_are_those_of_the_definition() {
    let generator = open(options(256));
    let mut random = Random(1);
    let (mut checked, mut stopped_early) = (0, 0);
    for case in 0..120 {
        let request = any_request(&mut random);
        let response = generator.generate(&request).unwrap();
        checked += usize::from(check(&format!("case {case}"), &request, &response.choices, &FREE));
        let longest = response.choices.iter().map(|choice| choice.tokens.len()).max().unwrap();
        stopped_early += usize::from(longest < request.max_new_tokens.unwrap() as usize);
    }
    assert!(checked > 110, "{checked} of 120 were far enough apart");
    assert!(stopped_early > 10, "{stopped_early} searches ended before the length");
}

#[test]
fn searches_run_with_others_in_pools_that_are_too_small() {
    let mut random = Random(2);
    for (pages, share_prefixes, max_batch) in
        [(256, true, 64), (256, false, 17), (24, true, 16), (12, false, 20), (6, true, 64)]
    {
        let generator = open(GeneratorOptions { share_prefixes, max_batch, ..options(pages) });
        let requests: Vec<_> = (0..24)
            .map(|n| match n % 3 {
                0 => GenerateRequest { priority: random.below(3) as i32, ..greedy(&prompt(100 + n, 50), 30) },
                _ => GenerateRequest { priority: random.below(3) as i32, ..any_request(&mut random) },
            })
            .collect();
        let outcomes = generator.generate_all(&requests, |_| ());
        let mut checked = 0;
        for (n, (request, outcome)) in requests.iter().zip(outcomes).enumerate() {
            let choices = outcome.unwrap().choices;
            match request.beams {
                None => {
                    assert_eq!(choices[0].tokens, oracle(&prompt(100 + n as u64, 50), 30), "{pages} pages, {n}");
                    assert_eq!(choices[0].score, None);
                }
                Some(_) => {
                    let name = format!("{pages} pages, request {n}");
                    checked += usize::from(check(&name, request, &choices, &FREE));
                }
            }
        }
        assert!(checked >= 14, "{checked} of 16 were far enough apart");
        assert!(pages > 12 || generator.stats().preemptions > 0, "{pages} pages: {:?}", generator.stats());
        if share_prefixes {
            generator.clear(true).unwrap();
        }
        let stats = generator.kv_stats();
        assert_eq!((stats.free_pages, stats.shared_pages), (u64::from(pages), 0), "{pages} pages");
    }
}

#[test]
fn a_search_that_fits_only_beam_by_beam_ends_with_the_same_answers() {
    // Each beam needs 3 pages, and there are 3; the host tier has what leaves them, or nothing has.
    for host_bytes in [0, 8 << 20] {
        for share_prefixes in [true, false] {
            let generator = open(GeneratorOptions { host_bytes, share_prefixes, ..options(3) });
            let request = beams(&prompt(5, 60), 20, 6);
            let response = generator.generate(&request).unwrap();
            assert!(check("alone", &request, &response.choices, &FREE));
            generator.clear(true).unwrap();
            assert_eq!(generator.kv_stats().free_pages, 3);
        }
    }
}

#[test]
fn few_rows_a_step_change_nothing() {
    for max_batch_tokens in [1, 3, 7] {
        let generator = open(GeneratorOptions { max_batch_tokens, max_batch: 8, ..options(64) });
        let request = beams(&prompt(6, 40), 8, 8);
        let response = generator.generate(&request).unwrap();
        assert!(check("rows", &request, &response.choices, &FREE));
    }
}

#[test]
fn beams_share_pages_and_compute_each_token_once() {
    // The prompt has three pages and a part of one; the beams part in that part and go on into the next page.
    let generator = open(GeneratorOptions { share_prefixes: false, max_stretch: 0.0, ..stepped(64) });
    let (start, width, new_tokens) = (prompt(7, 3 * PAGE + 20), 8, 20);
    let request = beams(&start, new_tokens, width);
    let stream = generator.stream(&request).unwrap();
    let (mut most, mut shared) = (0, 0);
    while generator.step().unwrap() {
        let stats = generator.kv_stats();
        most = most.max(stats.pages - stats.free_pages);
        shared = shared.max(stats.shared_pages);
    }
    let response = stream.response().unwrap();
    assert!(check("shared", &request, &response.choices, &FREE));
    assert_eq!(response.computed_tokens, u64::from(3 * PAGE as u32 + 20 + width * (new_tokens - 1)));
    assert!((4 + 8..=3 + 2 * 8).contains(&most) && shared >= 3, "{most} pages, {shared} of them shared");
    assert_eq!(generator.kv_stats().free_pages, 64);
}

#[test]
fn one_beam_is_greedy() {
    let generator = open(options(64));
    let response = generator.generate(&beams(&prompt(3, 33), 16, 1)).unwrap();
    assert_eq!(response.choices[0].tokens, oracle(&prompt(3, 33), 16));
    assert_eq!(response.choices[0].tokens, tokens(&generator, &greedy(&prompt(3, 33), 16)));
}

#[test]
fn each_beam_has_a_grammar_of_its_own() {
    let tokenizer = Arc::new(Tokenizer::from_file(folder().join("tokenizer.json")).unwrap());
    let compiler = GrammarCompiler::new(&tokenizer, VOCAB, &EOS).unwrap();
    let generator = open(options(64));
    let (mut checked, mut cut) = (0, 0);
    for (grammar, max_new_tokens) in [
        (Grammar::Regex("[abc]{2,5}".into()), 12),
        (Grammar::Regex("[0-9]{4}-[0-9]{2}".into()), 12),
        (Grammar::Choice(vec!["yes".into(), "no".into(), "yellow".into()]), 12),
        // It has no end.
        (Grammar::Regex("(ab|ac)+x".into()), 5),
    ] {
        let allowed = |answer: &[u32]| {
            let state = compiler.compile(&grammar, 0).unwrap();
            answer.iter().for_each(|&token| state.took(token));
            let next = state.next().unwrap();
            (0..VOCAB as u32).map(|token| next.allows(token)).collect()
        };
        for width in [1, 3, 8] {
            let request =
                GenerateRequest { grammar: Some(grammar.clone()), ..beams(&prompt(4, 12), max_new_tokens, width) };
            let choices = generator.generate(&request).unwrap().choices;
            let rules = Rules { ends: &|_| false, allowed: &allowed };
            checked += usize::from(check(&format!("{grammar:?}, {width} beams"), &request, &choices, &rules));
            assert!(!choices.is_empty());
            for choice in choices {
                // An answer may also be whole at its length.
                assert!(choice.missing.is_none() || choice.finish_reason == FinishReason::Length, "{choice:?}");
                cut += usize::from(choice.missing.is_some());
            }
        }
    }
    assert!(checked >= 10 && cut > 0, "{checked} of 12 were far enough apart, {cut} were cut");
}

#[test]
fn a_stop_text_ends_an_answer_of_a_search() {
    let tokenizer = Tokenizer::from_file(folder().join("tokenizer.json")).unwrap();
    let generator = open(options(64));
    let (mut checked, mut stopped) = (0, 0);
    for seed in 0..8 {
        let stop = vec!["e".to_owned(), "th".to_owned(), "a".to_owned(), "1".to_owned()];
        let request = GenerateRequest { stop: stop.clone(), ..beams(&prompt(seed, 9), 12, 5) };
        let ends = |answer: &[u32]| {
            let text = tokenizer.decode(answer, true).unwrap();
            stop.iter().any(|stop| text.contains(stop.as_str()))
        };
        let choices = generator.generate(&request).unwrap().choices;
        checked += usize::from(check(&format!("seed {seed}"), &request, &choices, &Rules { ends: &ends, ..FREE }));
        for choice in choices {
            assert!(stop.iter().all(|stop| !choice.text.contains(stop.as_str())), "{choice:?}");
            stopped += usize::from(choice.finish_reason == FinishReason::Stop);
        }
    }
    assert!(checked >= 6 && stopped > 0, "{checked} of 8 were far enough apart, {stopped} were stopped");
}

#[test]
fn a_search_sums_up_its_log_probabilities() {
    let generator = open(options(64));
    let request = GenerateRequest {
        logprobs: Some(3),
        prompt_logprobs: Some(1),
        echo: true,
        ignore_eos: false,
        logit_bias: vec![],
        ..beams(&prompt(8, 20), 12, 4)
    };
    let response = generator.generate(&request).unwrap();
    assert_eq!(response.prompt_logprobs.len(), 20);
    for choice in &response.choices {
        assert_eq!(choice.logprobs.len(), choice.tokens.len());
        let sum: f32 = choice.logprobs.iter().map(|token| token.logprob).sum();
        let score = choice.score.unwrap();
        assert!((score - sum / choice.tokens.len() as f32).abs() < 1e-4, "{score}, {sum}");
        assert!(choice.logprobs.iter().all(|token| token.top.len() == 3));
    }
    assert!(response.choices.is_sorted_by(|a, b| a.score >= b.score));
}

#[test]
fn a_stream_gets_the_answers_one_after_the_other_at_the_end() {
    let generator = open(stepped(64));
    let mut stream = generator.stream(&beams(&prompt(2, 10), 6, 3)).unwrap();
    let mut events = Vec::new();
    for _ in 0..5 {
        assert!(generator.step().unwrap());
        assert!(stream.try_next().is_none(), "the search goes on");
    }
    while generator.step().unwrap() {}
    while let Some(event) = stream.try_next() {
        events.push(event);
    }
    let Some(Event::End(Ok(response))) = events.pop() else { panic!("no end") };
    let mut expected = Vec::new();
    for (index, choice) in response.choices.iter().enumerate() {
        expected.extend(choice.tokens.iter().map(|&token| (index as u32, token)));
    }
    let mut texts = vec![String::new(); 3];
    let found: Vec<_> = events
        .iter()
        .map(|event| {
            let Event::Token(token) = event else { panic!("{event:?}") };
            texts[token.choice as usize].push_str(&token.text);
            (token.choice, token.id)
        })
        .collect();
    assert_eq!(found, expected);
    assert_eq!(texts, response.choices.iter().map(|choice| choice.text.clone()).collect::<Vec<_>>());
}

#[test]
fn a_search_that_is_cancelled_has_its_best_beams_and_frees_its_pages() {
    let generator = open(GeneratorOptions { share_prefixes: false, max_batch_tokens: 16, ..stepped(64) });
    for steps in [0, 1, 2, 5, 9, 17] {
        let cancel = Arc::new(Cancel::new());
        let request = GenerateRequest { cancel: Some(Arc::clone(&cancel)), n: Some(2), ..beams(&prompt(1, 40), 60, 6) };
        let stream = generator.stream(&request).unwrap();
        // Beside another one, which goes on.
        let other = generator.stream(&beams(&prompt(2, 40), 12, 4)).unwrap();
        for _ in 0..steps {
            generator.step().unwrap();
        }
        cancel.trigger();
        generator.step().unwrap();
        let choices = stream.response().unwrap().choices;
        assert!(!choices.is_empty() && choices.len() <= 2);
        for choice in &choices {
            assert_eq!(choice.finish_reason, FinishReason::Cancelled);
            assert_eq!(choice.tokens.is_empty(), choice.score == Some(0.0));
        }
        assert_eq!(choices[0].tokens.is_empty(), steps < 5, "after {steps} steps");
        assert!(check("the other", &beams(&prompt(2, 40), 12, 4), &other.response().unwrap().choices, &FREE));
        assert_eq!(generator.kv_stats().free_pages, 64);
    }
    // A dropped stream, a timeout, and a generator that is closed.
    drop(generator.stream(&beams(&prompt(1, 40), 60, 6)).unwrap());
    while generator.step().unwrap() {}
    let request = GenerateRequest { timeout: Some(Duration::ZERO), ..beams(&prompt(1, 40), 60, 6) };
    let answer = generator.generate(&request).unwrap().choices;
    assert_eq!((answer.len(), answer[0].finish_reason), (1, FinishReason::Timeout));
    assert_eq!(generator.kv_stats().free_pages, 64);
    let stream = generator.stream(&beams(&prompt(1, 40), 60, 6)).unwrap();
    for _ in 0..8 {
        generator.step().unwrap();
    }
    drop(generator);
    assert_eq!(stream.response().unwrap().choices[0].finish_reason, FinishReason::Cancelled);
}

/// A request that is answered, cancelled, or left.
fn ask(generator: &Generator, random: &mut Random, known: &[(GenerateRequest, Vec<Vec<u32>>)]) {
    let (request, expected) = &known[random.below(known.len())];
    let mut request = GenerateRequest { priority: random.below(3) as i32, ..request.clone() };
    let cancel = Arc::new(Cancel::new());
    let wait = Duration::from_micros(random.below(20_000) as u64);
    let outcome = match random.below(5) {
        0 => return drop(generator.stream(&request).map(|stream| stream.take(random.below(5)).count())),
        1 => {
            request.cancel = Some(Arc::clone(&cancel));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(wait);
                    cancel.trigger();
                });
                generator.generate(&request)
            })
        }
        2 => generator.generate(&GenerateRequest { timeout: Some(wait), ..request }),
        _ => generator.generate(&request),
    };
    match outcome {
        Err(error) => assert_eq!(error.status(), Status::Capacity, "{error}"),
        Ok(response) => {
            let early =
                |choice: &Choice| matches!(choice.finish_reason, FinishReason::Cancelled | FinishReason::Timeout);
            if !response.choices.iter().any(early) {
                let found: Vec<_> = response.choices.into_iter().map(|choice| choice.tokens).collect();
                assert_eq!(&found, expected, "{:?}", request.beams);
            }
        }
    }
}

/// Searches, drafts and grammars at once.
#[test]
fn random_requests_of_all_kinds_on_many_threads() {
    let mut random = Random(3);
    let mut known = Vec::new();
    let plain = open(options(64));
    while known.len() < 12 {
        let request = GenerateRequest { max_draft: Some(0), ..speculation::any_request(&mut random) };
        let answers = plain.generate(&request).unwrap().choices.into_iter().map(|choice| choice.tokens).collect();
        known.push((GenerateRequest { max_draft: Some(6), ..request }, answers));
    }
    drop(plain);
    while known.len() < 28 {
        let mut request = any_request(&mut random);
        if random.once_in(3) {
            request =
                GenerateRequest { beams: None, stop_tokens: vec![], ..greedy(&prompt(known.len() as u64, 40), 20) };
            known.push((request, vec![oracle(&prompt(known.len() as u64, 40), 20)]));
            continue;
        }
        let expected = search(&request, &FREE);
        if expected.margin > MARGIN && request.beams.unwrap().width <= 8 {
            known.push((request, expected.found.into_iter().map(|found| found.tokens).collect()));
        }
    }
    for (share_prefixes, host_bytes, draft_model) in [
        (true, 0, None),
        (true, 1 << 20, Some(folder())),
        (false, 1 << 20, Some(speculation::glide())),
        (false, 0, None),
    ] {
        let generator = open(GeneratorOptions {
            draft_model,
            share_prefixes,
            host_bytes,
            queue: 12,
            max_batch: 9,
            max_batch_tokens: 40,
            max_stretch: 0.0,
            ..options(10)
        });
        std::thread::scope(|scope| {
            for thread in 0..6 {
                let (generator, known) = (&generator, &known);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    (0..20).for_each(|_| ask(generator, &mut random, known));
                });
            }
        });
        // What was left ends with the next step.
        while generator.stats().running + generator.stats().waiting > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stats = generator.stats();
        assert!(stats.preemptions > 0 && stats.ended_early > 0 && stats.answered > 0, "{stats:?}");
        generator.clear(true).unwrap();
        let kv = generator.kv_stats();
        assert_eq!((kv.free_pages, kv.shared_pages, kv.resident_owners), (10, 0, 0), "{kv:?}");
    }
}

#[test]
fn the_prompt_of_a_search_is_shared_with_later_requests() {
    let generator = open(options(64));
    let start = prompt(9, 3 * PAGE + 5);
    generator.generate(&beams(&start, 6, 4)).unwrap();
    let response = generator.generate(&beams(&start, 6, 4)).unwrap();
    assert_eq!(response.cached_tokens as usize, 3 * PAGE);
    assert!(check("again", &beams(&start, 6, 4), &response.choices, &FREE));
}

#[test]
fn what_makes_no_sense_with_beams_is_refused() {
    fn refused(generator: &Generator, request: GenerateRequest) -> (Status, String) {
        let error = generator.generate(&request).unwrap_err();
        (error.status(), error.argument().unwrap_or_default().to_owned())
    }
    let generator = open(GeneratorOptions { max_batch: 8, ..options(64) });
    let request = || beams(&prompt(1, 5), 4, 4);
    let with = |options: BeamOptions| GenerateRequest { n: Some(1), beams: Some(options), ..request() };
    let invalid = |argument: &str| (Status::InvalidArgument, argument.to_owned());
    for (request, expected) in [
        (with(BeamOptions::new(0)), invalid("beams.width")),
        (with(BeamOptions::new(17)), invalid("beams.width")),
        (with(BeamOptions::new(9)), invalid("beams.width")),
        (with(BeamOptions { length_penalty: f32::NAN, ..BeamOptions::new(4) }), invalid("beams.length_penalty")),
        (GenerateRequest { n: Some(5), ..request() }, invalid("n")),
        (GenerateRequest { n: Some(1), session: Some("s".into()), ..request() }, invalid("session")),
        (GenerateRequest { do_sample: Some(true), ..request() }, invalid("do_sample")),
        (GenerateRequest { temperature: Some(0.5), ..request() }, invalid("temperature")),
    ] {
        assert_eq!(refused(&generator, request), expected);
    }
    // The model's own defaults draw, which a search does not.
    assert!(generator.generate(&GenerateRequest { do_sample: None, ..request() }).is_ok());
    let error = GenerateRequest { no_repeat_ngram_size: Some(1), logit_bias: vec![], ..request() };
    assert!(generator.generate(&error).is_ok(), "each token once");
    if !on_gpu() {
        let policy = pagoda::engine::KvPolicy::new("lastrec".to_owned(), 64);
        let generator = open(GeneratorOptions { kv_policy: Some(policy), ..options(64) });
        assert_eq!(refused(&generator, request()), (Status::Unsupported, "beams".to_owned()));
    }
}
