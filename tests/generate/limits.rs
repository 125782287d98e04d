//! What is refused, with the numbers.

use pagoda::Status;
use pagoda::engine::{ContextEnd, FinishReason, GenerateRequest, Generator, GeneratorOptions};

use super::cases::{folder, greedy, open, options, oracle, prompt};

#[test]
fn requests_that_can_not_be_answered_are_refused_with_the_numbers() {
    let generator = open(GeneratorOptions { max_prompt_tokens: 300, max_new_tokens: 400, ..options(14) });
    let cases = [
        (greedy(&[], 1), "prompt", "no tokens"),
        (greedy(&[1, 272], 1), "prompt[1]", "272 is no token: the model has 272"),
        (greedy(&prompt(1, 301), 1), "prompt", "301 tokens are more than the 300 of options.max_prompt_tokens"),
        (greedy(&[1], 0), "max_new_tokens", "0 tokens"),
        (greedy(&[1], 401), "max_new_tokens", "401 is more than the 400 of options.max_new_tokens"),
        (
            greedy(&prompt(1, 200), 313),
            "max_new_tokens",
            "313 tokens after a prompt of 200 are more than the model's context of 512",
        ),
        (greedy(&prompt(1, 200), 300), "max_new_tokens", "500 pages"),
        (GenerateRequest { n: Some(0), ..greedy(&[1], 1) }, "n", "0 is not between 1 and 1024"),
        (GenerateRequest { stop: vec![String::new()], ..greedy(&[1], 1) }, "stop", "empty"),
        (GenerateRequest { stop_tokens: vec![272], ..greedy(&[1], 1) }, "stop_tokens", "272"),
        (GenerateRequest { temperature: Some(-1.0), ..greedy(&[1], 1) }, "temperature", "-1"),
        (GenerateRequest { logprobs: Some(1001), ..greedy(&[1], 1) }, "logprobs", "1001"),
        (GenerateRequest { session: Some(String::new()), ..greedy(&[1], 1) }, "session", "empty"),
        (GenerateRequest { session: Some("a".into()), n: Some(2), ..greedy(&[1], 1) }, "n", "2 answers in a session"),
    ];
    for (request, argument, message) in cases {
        let error = generator.generate(&request).unwrap_err();
        let message = if message == "500 pages" { "need 16 pages and the pool has 14" } else { message };
        assert_eq!(error.argument(), Some(argument), "{error}");
        assert!(error.to_string().contains(message), "{error}");
    }
    assert_eq!(generator.stats().failed, 14);
}

#[test]
fn an_answer_can_end_where_the_context_does() {
    let generator = open(options(64));
    let prompt = prompt(1, 508);
    let request = GenerateRequest { context_end: ContextEnd::Stop, ..greedy(&prompt, 100) };
    let answer = &generator.generate(&request).unwrap().choices[0];
    assert_eq!((answer.tokens.clone(), answer.finish_reason), (oracle(&prompt, 4), FinishReason::Length));
    // Without a number: as many as there is room for.
    let answer = &generator.generate(&GenerateRequest { max_new_tokens: None, ..request }).unwrap().choices[0];
    assert_eq!(answer.tokens.len(), 4);
    let error = generator.generate(&greedy(&super::cases::prompt(1, 512), 1)).unwrap_err();
    assert!(error.to_string().contains("512 tokens leave no room"), "{error}");
}

#[test]
fn options_that_can_not_be_are_refused() {
    let cases = [
        (GeneratorOptions { max_batch: 0, ..options(8) }, "options.max_batch"),
        (GeneratorOptions { max_batch_tokens: 0, ..options(8) }, "options.max_batch_tokens"),
        (GeneratorOptions { queue: 0, ..options(8) }, "options.queue"),
        (GeneratorOptions { max_stretch: 1.0, ..options(8) }, "options.max_stretch"),
        (GeneratorOptions { max_stretch: f32::NAN, ..options(8) }, "options.max_stretch"),
        (options(0), "options.kv_size"),
    ];
    for (options, argument) in cases {
        let error = Generator::open(folder(), options).err().unwrap();
        assert_eq!(error.argument(), Some(argument), "{error}");
    }
    let ranker = folder().join("../../engine/gather");
    let error = Generator::open(ranker, options(8)).err().unwrap();
    assert_eq!(error.status(), Status::Unsupported, "{error}");
}
