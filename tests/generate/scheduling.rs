//! Who runs when, and what happens when pages run out.

use std::sync::Arc;
use std::time::Duration;

use pagoda::engine::{Event, FinishReason, GenerateRequest, Generator, GeneratorOptions, TokenStream};
use pagoda::{Cancel, Status};
use pagoda_test_support::Folder;

use super::cases::{VOCAB, folder, greedy, on_gpu, open, options, oracle, prompt, stepped, tokens};
use super::folders::{copy_of, replace};

fn ended(stream: &mut TokenStream) -> Option<Vec<u32>> {
    while let Some(event) = stream.try_next() {
        if let Event::End(outcome) = event {
            return Some(outcome.unwrap().choices[0].tokens.clone());
        }
    }
    None
}

#[test]
fn a_sequence_that_pages_run_out_for_is_preempted_and_ends_with_the_same_tokens() {
    // Each needs 4 pages at its end, and there are 6: never two at the end.
    let requests: Vec<_> = (0..4).map(|n| greedy(&prompt(n, 40), 80)).collect();
    for share_prefixes in [true, false] {
        let generator = open(GeneratorOptions { share_prefixes, ..options(6) });
        let outcomes = generator.generate_all(&requests, |_| ());
        for (n, outcome) in outcomes.into_iter().enumerate() {
            let expected = oracle(&prompt(n as u64, 40), 80);
            assert_eq!(outcome.unwrap().choices[0].tokens, expected, "request {n}");
        }
        assert!(generator.stats().preemptions > 0, "{:?}", generator.stats());
    }
}

#[test]
fn a_preempted_sequence_comes_back_from_the_host_tier() {
    let requests: Vec<_> = (0..4).map(|n| greedy(&prompt(n, 40), 80)).collect();
    let generator = open(GeneratorOptions { host_bytes: 8 << 20, share_prefixes: false, ..options(6) });
    let outcomes = generator.generate_all(&requests, |_| ());
    let mut computed = 0;
    for (n, outcome) in outcomes.into_iter().enumerate() {
        let response = outcome.unwrap();
        assert_eq!(response.choices[0].tokens, oracle(&prompt(n as u64, 40), 80), "request {n}");
        computed += response.computed_tokens;
    }
    assert!(generator.stats().preemptions > 0, "{:?}", generator.stats());
    assert_eq!(computed, 4 * (40 + 79), "nothing was computed twice");
}

#[test]
fn sequences_that_decode_advance_in_every_step_while_a_prompt_comes_in() {
    let generator = open(GeneratorOptions { max_batch_tokens: 16, max_stretch: 0.0, ..stepped(64) });
    let mut decoding = generator.stream(&greedy(&prompt(1, 3), 60)).unwrap();
    generator.step().unwrap();
    while decoding.try_next().is_some() {}
    let mut long = generator.stream(&greedy(&prompt(2, 300), 2)).unwrap();
    let mut steps = 0;
    loop {
        generator.step().unwrap();
        if long.try_next().is_some() {
            break;
        }
        steps += 1;
        assert!(matches!(decoding.try_next(), Some(Event::Token(_))), "step {steps}");
        assert!(decoding.try_next().is_none(), "one token a step");
    }
    assert_eq!(steps, 300_usize.div_ceil(15) - 1, "15 rows a step are left for the prompt");
}

#[test]
fn higher_priorities_run_first_and_equal_ones_in_order() {
    let generator = open(GeneratorOptions { max_batch: 1, ..stepped(64) });
    let mut streams: Vec<_> = [0, 5, 0, 5]
        .iter()
        .map(|&priority| GenerateRequest { priority, ..greedy(&prompt(1, 3), 2) })
        .map(|request| generator.stream(&request).unwrap())
        .collect();
    let mut order = Vec::new();
    while generator.step().unwrap() || order.len() < 4 {
        let now: Vec<_> = (0..4).filter(|&n| ended(&mut streams[n]).is_some()).collect();
        order.extend(now);
    }
    assert_eq!(order, [1, 3, 0, 2]);
}

#[test]
fn a_cancelled_request_frees_its_pages_within_one_step() {
    let generator = open(GeneratorOptions { share_prefixes: false, max_batch_tokens: 8, ..stepped(64) });
    for in_prompt in [true, false] {
        let cancel = Arc::new(Cancel::new());
        let request = GenerateRequest {
            cancel: Some(Arc::clone(&cancel)),
            ..greedy(&prompt(1, if in_prompt { 200 } else { 3 }), 100)
        };
        let stream = generator.stream(&request).unwrap();
        for _ in 0..5 {
            generator.step().unwrap();
        }
        assert!(generator.kv_stats().free_pages < 64);
        cancel.trigger();
        generator.step().unwrap();
        assert_eq!(generator.kv_stats().free_pages, 64);
        let answer = &stream.response().unwrap().choices[0];
        assert_eq!(answer.finish_reason, FinishReason::Cancelled);
        assert_eq!(answer.tokens.len(), if in_prompt { 0 } else { 5 });
    }
}

#[test]
fn a_dropped_stream_cancels_its_request() {
    let generator = open(GeneratorOptions { share_prefixes: false, ..stepped(64) });
    let stream = generator.stream(&greedy(&prompt(1, 3), 100)).unwrap();
    generator.step().unwrap();
    drop(stream);
    assert!(!generator.step().unwrap());
    assert_eq!((generator.kv_stats().free_pages, generator.stats().ended_early), (64, 1));
}

#[test]
fn a_timeout_ends_a_request_with_what_it_has() {
    let generator = open(stepped(64));
    let request = GenerateRequest { timeout: Some(Duration::ZERO), ..greedy(&prompt(1, 3), 100) };
    let stream = generator.stream(&request).unwrap();
    assert!(!generator.step().unwrap());
    let response = stream.response().unwrap();
    assert_eq!(response.choices[0].finish_reason, FinishReason::Timeout);
    // While the generator's own thread runs.
    let generator = open(options(64));
    let request = GenerateRequest { timeout: Some(Duration::from_millis(50)), ..greedy(&prompt(1, 3), 500) };
    let answer = &generator.generate(&request).unwrap().choices[0];
    assert!(answer.finish_reason == FinishReason::Timeout || answer.tokens.len() == 500);
}

#[test]
fn the_queue_is_bounded() {
    let generator = open(GeneratorOptions { queue: 3, ..stepped(64) });
    let streams: Vec<_> = (0..3).map(|_| generator.stream(&greedy(&prompt(1, 3), 1)).unwrap()).collect();
    let error = generator.stream(&greedy(&prompt(1, 3), 1)).err().unwrap();
    assert_eq!(error.status(), Status::Capacity, "{error}");
    assert!(error.to_string().contains("3 answers wait already and 1 more would exceed the 3"), "{error}");
    while generator.step().unwrap() {}
    streams.into_iter().for_each(|stream| drop(stream.response().unwrap()));
    generator.stream(&greedy(&prompt(1, 3), 1)).unwrap();
}

#[test]
fn many_requests_are_answered_in_order_beyond_the_queue() {
    let generator = open(GeneratorOptions { queue: 5, ..options(64) });
    let requests: Vec<_> = (0..40).map(|n| greedy(&prompt(n, 2 + n as usize % 5), 3)).collect();
    let mut progress = Vec::new();
    let outcomes = generator.generate_all(&requests, |done| progress.push(done));
    assert_eq!(progress, (1..=40).collect::<Vec<_>>());
    let alone = open(options(64));
    for (request, outcome) in requests.iter().zip(outcomes) {
        assert_eq!(outcome.unwrap().choices[0].tokens, tokens(&alone, request));
    }
}

#[test]
fn closing_a_generator_cancels_what_runs() {
    let generator = open(options(64));
    let stream = generator.stream(&greedy(&prompt(1, 3), 500)).unwrap();
    drop(generator);
    let answer = &stream.response().unwrap().choices[0];
    assert!(matches!(answer.finish_reason, FinishReason::Cancelled | FinishReason::Length));
}

/// The model without a row for its last token: a run with it fails.
fn without_last_token() -> Folder {
    let copy = copy_of(&folder());
    let mut graph = std::fs::read(copy.path().join("model.onnx")).unwrap();
    let rows = [&[8, 0x90, 2, 8, 32, 16, 1, 66, 16][..], b"embedding.weight"].concat();
    let find = |graph: &[u8], what: &[u8]| graph.windows(what.len()).position(|part| part == what).unwrap();
    let at = find(&graph, &rows);
    let length = at + find(&graph[at..], b"34816");
    graph[at + 1] -= 1;
    graph[length..length + 5].copy_from_slice(b"34688");
    replace(&copy, "model.onnx", &graph);
    copy
}

#[test]
fn of_a_step_that_fails_only_the_sequence_at_fault_fails() {
    // A GPU does not find the row missing.
    if on_gpu() {
        return;
    }
    let model = without_last_token();
    for (max_draft, draft_model) in [(0, None), (4, None), (4, Some(folder()))] {
        let options = GeneratorOptions { max_draft, draft_model, ..stepped(64) };
        let generator = Generator::open(model.path(), options).unwrap();
        let whole: Vec<_> = (0..3).map(|n| [5, 6, 7, 8].repeat(4 + n)).collect();
        let streams: Vec<_> = whole.iter().map(|prompt| generator.stream(&greedy(prompt, 30)).unwrap()).collect();
        for _ in 0..10 {
            generator.step().unwrap();
        }
        let at_fault = generator.stream(&greedy(&[5, 6, 7, VOCAB as u32 - 1], 30)).unwrap();
        while generator.step().unwrap() {}
        let error = at_fault.response().unwrap_err();
        assert!(error.to_string().contains("271"), "{error}");
        for (prompt, stream) in whole.iter().zip(streams) {
            assert_eq!(stream.response().unwrap().choices[0].tokens, oracle(prompt, 30));
        }
        assert_eq!(generator.stats().failed, 1);
        generator.clear(false).unwrap();
        assert_eq!(generator.kv_stats().free_pages, 64, "no lease is left");
    }
}

#[test]
fn a_draft_model_that_fails_fails_no_sequence() {
    if on_gpu() {
        return;
    }
    let draft = without_last_token();
    let options = GeneratorOptions { max_draft: 4, draft_model: Some(draft.path().to_owned()), ..stepped(64) };
    let generator = Generator::open(folder(), options).unwrap();
    let prompts: Vec<_> = (0..3).map(|n| [5, 6, 7, VOCAB as u32 - 1].repeat(2 + n)).collect();
    let streams: Vec<_> = prompts.iter().map(|prompt| generator.stream(&greedy(prompt, 40)).unwrap()).collect();
    while generator.step().unwrap() {}
    for (prompt, stream) in prompts.iter().zip(streams) {
        assert_eq!(stream.response().unwrap().choices[0].tokens, oracle(prompt, 40));
    }
    assert_eq!((generator.stats().failed, generator.stats().drafts), (0, 0));
    // It is not asked any more, until it is to be tried again.
    generator.generate(&greedy(&[5, 6, 7], 20)).unwrap();
    assert_eq!(generator.stats().drafts, 0);
    generator.clear_speculation();
    generator.generate(&greedy(&[5, 6, 7], 20)).unwrap();
    assert!(generator.stats().drafts > 0);
}
