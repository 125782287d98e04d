//! Many threads with random requests, cancels, timeouts and a small pool: no leak, no hang, every page accounted for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pagoda::engine::{FinishReason, GenerateRequest, Generator, GeneratorOptions};
use pagoda::{Cancel, Status};
use pagoda_test_support::Random;

use super::cases::{greedy, open, options, oracle, prompt};

const THREADS: u64 = 8;
/// Prompts that the requests have; their answers are known.
const PROMPTS: usize = 24;
const MOST_NEW: usize = 24;

/// A prompt: many share a prefix with others.
fn shared_prompt(number: usize) -> Vec<u32> {
    let mut tokens = prompt((number % 4) as u64, 13 * (number % 8));
    tokens.extend(prompt(100 + number as u64, 1 + number));
    tokens
}

fn random_request(random: &mut Random, number: usize) -> GenerateRequest {
    let mut request = greedy(&shared_prompt(number), 1 + random.below(MOST_NEW) as u32);
    if random.once_in(4) {
        request.session = Some(format!("session {}", random.below(6)));
    } else if random.once_in(4) {
        request.n = Some(2 + random.below(2) as u32);
    }
    if random.once_in(6) {
        request.timeout = Some(Duration::from_micros(random.below(20_000) as u64));
    }
    request.priority = random.below(3) as i32;
    request
}

/// Answers a request in one of several ways, and compares the tokens with those that are known.
fn ask(generator: &Generator, random: &mut Random, answers: &[Vec<u32>]) {
    let number = random.below(PROMPTS);
    let mut request = random_request(random, number);
    let cancel = Arc::new(Cancel::new());
    let check = |tokens: &[u32]| assert_eq!(tokens, &answers[number][..tokens.len()], "prompt {number}");
    let outcome = match random.below(4) {
        0 => {
            // A stream that may be dropped in the middle.
            let stop_after = random.below(2 * MOST_NEW);
            match generator.stream(&request) {
                Ok(stream) => {
                    let mut texts: HashMap<u32, Vec<u32>> = HashMap::new();
                    for token in stream.take(stop_after) {
                        let token = token.unwrap();
                        texts.entry(token.choice).or_default().push(token.id);
                    }
                    texts.values().for_each(|tokens| check(tokens));
                    return;
                }
                Err(error) => Err(error),
            }
        }
        1 => {
            request.cancel = Some(Arc::clone(&cancel));
            let wait = Duration::from_micros(random.below(10_000) as u64);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(wait);
                    cancel.trigger();
                });
                generator.generate(&request)
            })
        }
        _ => generator.generate(&request),
    };
    match outcome {
        Err(error) => assert_eq!(error.status(), Status::Capacity, "{error}"),
        Ok(response) => {
            for choice in &response.choices {
                check(&choice.tokens);
                let whole = choice.tokens.len() == request.max_new_tokens.unwrap() as usize;
                assert_eq!(whole, choice.finish_reason == FinishReason::Length, "{choice:?}");
            }
        }
    }
}

#[test]
fn random_requests_on_many_threads() {
    let requests = std::env::var("PAGODA_GENERATE_REQUESTS").map_or(15, |requests| requests.parse().unwrap());
    let answers: Vec<_> = (0..PROMPTS).map(|number| oracle(&shared_prompt(number), MOST_NEW)).collect();
    for (share_prefixes, host_bytes) in [(true, 0), (true, 1 << 20), (false, 1 << 20)] {
        // The longest sequence has 5 pages.
        let generator = open(GeneratorOptions {
            share_prefixes,
            host_bytes,
            queue: 12,
            max_batch: 8,
            max_batch_tokens: 40,
            // Prompts come in as fast as they can, so that pages run out.
            max_stretch: 0.0,
            ..options(12)
        });
        let done = Mutex::new(0);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (generator, answers, done) = (&generator, &answers, &done);
                scope.spawn(move || {
                    let mut random = Random(thread + 1);
                    for _ in 0..requests {
                        ask(generator, &mut random, answers);
                        *done.lock().unwrap() += 1;
                    }
                });
            }
        });
        assert_eq!(done.into_inner().unwrap(), requests * THREADS);
        // A dropped stream ends with the next step.
        while generator.stats().running + generator.stats().waiting > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stats = generator.stats();
        assert!(stats.preemptions > 0 && stats.ended_early > 0 && stats.answered > 0, "{stats:?}");
        generator.clear(true).unwrap();
        let kv = generator.kv_stats();
        assert_eq!((kv.free_pages, kv.shared_pages, kv.resident_owners), (12, 0, 0), "{kv:?}");
    }
}
