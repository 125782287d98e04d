//! Which tokens come out.

use pagoda::engine::{FinishReason, GenerateRequest, GenerateResponse};

use super::cases::{VOCAB, greedy, on_gpu, open, options, oracle, oracle_logits, prompt, stepped, tokens};

#[test]
fn greedy_tokens_are_those_of_the_oracle() {
    let generator = open(options(64));
    for (seed, len) in [(1, 1), (2, 5), (3, 31), (4, 32), (5, 33), (6, 100)] {
        let prompt = prompt(seed, len);
        let response = generator.generate(&greedy(&prompt, 20)).unwrap();
        assert_eq!(response.choices[0].tokens, oracle(&prompt, 20), "a prompt of {len} tokens");
        assert_eq!(response.choices[0].finish_reason, FinishReason::Length);
        assert_eq!(response.prompt_tokens, prompt);
    }
}

#[test]
fn sixteen_at_once_get_the_same_tokens_as_one_alone() {
    let requests: Vec<_> = (0..16).map(|n| greedy(&prompt(n, 3 + 7 * n as usize), 24)).collect();
    let alone: Vec<_> = {
        let generator = open(options(64));
        requests.iter().map(|request| tokens(&generator, request)).collect()
    };
    let generator = open(pagoda::GeneratorOptions { max_stretch: 0.0, ..stepped(256) });
    let streams: Vec<_> = requests.iter().map(|request| generator.stream(request).unwrap()).collect();
    while generator.step().unwrap() {}
    assert!(generator.stats().steps < 24 + 16, "they ran together: {:?}", generator.stats());
    for (stream, alone) in streams.into_iter().zip(alone) {
        assert_eq!(stream.response().unwrap().choices[0].tokens, alone);
    }
}

/// In a batch of sixteen tokens are sampled on the GPU, where the model runs on one; alone only the first, where a short prompt
/// is padded to a large batch. Few tokens can be drawn, because logits of a batch can differ in their last bits.
#[test]
fn every_option_gives_the_same_tokens_in_a_batch_of_sixteen() {
    let requests: Vec<_> = (0..16)
        .map(|n| {
            let greedy = greedy(&prompt(n, 3 + 5 * n as usize), 20);
            let drawn = GenerateRequest { do_sample: Some(true), top_k: Some(4), seed: Some(n), ..greedy.clone() };
            match n % 8 {
                0 => greedy,
                1 => GenerateRequest { temperature: Some(2.0), ..drawn },
                2 => GenerateRequest { top_k: Some(0), top_p: Some(0.02), temperature: Some(0.5), ..drawn },
                3 => GenerateRequest {
                    repetition_penalty: Some(1.3),
                    presence_penalty: 0.2,
                    frequency_penalty: 0.4,
                    ..greedy
                },
                4 => GenerateRequest { no_repeat_ngram_size: Some(2), logprobs: Some(0), ..greedy },
                5 => GenerateRequest { logit_bias: vec![(7, 4.0), (9, -1e30)], min_p: Some(0.3), ..drawn },
                6 => GenerateRequest { forced_eos: Some(1), min_new_tokens: Some(5), logprobs: Some(5), ..drawn },
                // More than the GPU counts, and what it does not do at all.
                _ => GenerateRequest { logprobs: Some(30), prompt_logprobs: (n > 8).then_some(1), ..drawn },
            }
        })
        .collect();
    let alone: Vec<_> = {
        let generator = open(options(64));
        let responses = requests.iter().map(|request| generator.generate(request).unwrap()).collect();
        assert!(generator.stats().sampled_on_gpu <= 16);
        responses
    };
    let generator = open(pagoda::GeneratorOptions { max_stretch: 0.0, ..stepped(256) });
    let streams: Vec<_> = requests.iter().map(|request| generator.stream(request).unwrap()).collect();
    while generator.step().unwrap() {}
    assert!(generator.stats().steps < 20 + 16, "they ran together: {:?}", generator.stats());
    for (n, (stream, alone)) in streams.into_iter().zip::<Vec<GenerateResponse>>(alone).enumerate() {
        let (together, alone) = (&stream.response().unwrap().choices[0], &alone.choices[0]);
        assert_eq!(together.tokens, alone.tokens, "request {n}");
        assert_eq!(together.logprobs.len(), alone.logprobs.len(), "request {n}");
        for (together, alone) in together.logprobs.iter().zip(&alone.logprobs) {
            assert!((together.logprob - alone.logprob).abs() < 1e-4, "request {n}: {together:?}, {alone:?}");
            assert_eq!((together.rank, together.top.len()), (alone.rank, alone.top.len()), "request {n}");
            for (together, alone) in together.top.iter().zip(&alone.top) {
                assert!((together.1 - alone.1).abs() < 1e-4, "request {n}: {together:?}, {alone:?}");
            }
        }
    }
    let sampled = generator.stats().sampled_on_gpu;
    assert_eq!(sampled >= 14 * 18, on_gpu(), "{sampled} tokens were sampled on the GPU");
}

#[test]
fn a_prompt_in_chunks_gets_the_same_tokens() {
    let prompt = prompt(7, 200);
    let expected = oracle(&prompt, 8);
    for max_batch_tokens in [1, 7, 32, 33, 512] {
        let generator = open(pagoda::GeneratorOptions { max_batch_tokens, ..options(64) });
        assert_eq!(tokens(&generator, &greedy(&prompt, 8)), expected, "{max_batch_tokens} rows a step");
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens_whatever_else_runs() {
    let request = |seed| GenerateRequest { seed: Some(seed), do_sample: Some(true), ..greedy(&prompt(3, 40), 30) };
    let alone = tokens(&open(options(64)), &request(5));
    assert_ne!(alone, tokens(&open(options(64)), &request(6)));
    let generator = open(options(256));
    let others: Vec<_> = (0..8)
        .map(|n| GenerateRequest { do_sample: Some(true), ..greedy(&prompt(100 + n, 11 * n as usize + 1), 40) })
        .collect();
    let _others: Vec<_> = others.iter().map(|request| generator.stream(request).unwrap()).collect();
    assert_eq!(tokens(&generator, &request(5)), alone);
}

#[test]
fn the_models_defaults_hold_where_the_request_says_nothing() {
    // pagoda.json: sampled, temperature 0.7, top_k 20, top_p 0.9.
    let generator = open(options(64));
    let silent = GenerateRequest { seed: Some(3), max_new_tokens: Some(20), ..GenerateRequest::new(prompt(1, 9)) };
    let said = GenerateRequest {
        do_sample: Some(true),
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.9),
        ..silent.clone()
    };
    assert_eq!(tokens(&generator, &silent), tokens(&generator, &said));
    let hotter = GenerateRequest { temperature: Some(5.0), top_k: Some(0), top_p: Some(1.0), ..silent.clone() };
    assert_ne!(tokens(&generator, &silent), tokens(&generator, &hotter));
}

#[test]
fn logprobs_are_the_log_softmax_of_the_raw_logits() {
    let generator = open(options(64));
    let prompt = prompt(8, 40);
    let request = GenerateRequest {
        logprobs: Some(3),
        prompt_logprobs: Some(2),
        temperature: Some(0.3),
        do_sample: Some(true),
        seed: Some(1),
        ..greedy(&prompt, 5)
    };
    // Twice: the second finds the prompt cached, and has to compute it all the same.
    for _ in 0..2 {
        let response = generator.generate(&request).unwrap();
        let mut all = prompt.clone();
        all.extend(&response.choices[0].tokens);
        let of_prompt = response.prompt_logprobs.iter().cloned();
        let of_answer = response.choices[0].logprobs.iter().cloned().map(Some);
        let logprobs: Vec<_> = of_prompt.chain(of_answer).collect();
        assert_eq!((logprobs.len(), &logprobs[0]), (45, &None), "nothing comes before the first token");
        for at in 1..45 {
            let logits = oracle_logits(&all[..at]);
            let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let expected = f64::from(logits[all[at] as usize]) - sum.ln();
            let found = logprobs[at].as_ref().unwrap();
            assert!((f64::from(found.logprob) - expected).abs() < 1e-4, "token {at}: {found:?}, expected {expected}");
            let largest = (0..VOCAB).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(found.top[0].0, largest as u32);
            assert_eq!(found.top.len(), if at < 40 { 2 } else { 3 });
        }
        assert_eq!(response.cached_tokens, 0);
    }
}

#[test]
fn several_answers_differ_by_their_draws_and_share_the_prompt() {
    for share_prefixes in [true, false] {
        let generator = open(pagoda::GeneratorOptions { share_prefixes, ..options(256) });
        let request =
            GenerateRequest { n: Some(4), do_sample: Some(true), seed: Some(9), ..greedy(&prompt(4, 100), 10) };
        let response = generator.generate(&request).unwrap();
        let answers: Vec<_> = response.choices.iter().map(|choice| choice.tokens.clone()).collect();
        assert_eq!(answers.len(), 4);
        assert!(answers[1..].iter().all(|answer| answer != &answers[0]), "{answers:?}");
        // The prompt once, what is behind its last whole page for each of the other three, and all new tokens but the last.
        assert_eq!(response.computed_tokens, 100 + 3 * (100 - 96) + 4 * 9, "sharing: {share_prefixes}");
        let first = tokens(&generator, &GenerateRequest { n: Some(1), ..request });
        assert_eq!(first, answers[0], "the first is that of a request for one");
    }
}
