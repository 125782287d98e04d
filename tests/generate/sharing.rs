//! Prefixes that sequences share.

use pagoda::engine::{EngineStore, GenerateRequest, GeneratorOptions};
use pagoda_test_support::Folder;

use super::cases::{PAGE, greedy, on_gpu, open, options, oracle, prompt, stepped, tokens};

/// A prompt that begins with `shared` tokens of one and goes on with others.
fn after(shared: usize, seed: u64) -> Vec<u32> {
    let mut tokens = prompt(1, shared);
    tokens.extend(prompt(seed, 20));
    tokens
}

#[test]
fn a_prefix_is_computed_once() {
    let generator = open(options(256));
    generator.generate(&greedy(&after(100, 2), 3)).unwrap();
    for seed in 3..6 {
        let response = generator.generate(&greedy(&after(100, seed), 3)).unwrap();
        assert_eq!(response.cached_tokens, 96, "whole pages of the prefix");
        assert_eq!(response.choices[0].tokens, oracle(&after(100, seed), 3));
    }
    // The same prompt: the last token is computed in any case.
    let response = generator.generate(&greedy(&after(100, 3), 3)).unwrap();
    assert_eq!(response.cached_tokens, 96);
    let exact = prompt(1, 4 * PAGE);
    generator.generate(&greedy(&exact, 3)).unwrap();
    let response = generator.generate(&greedy(&exact, 3)).unwrap();
    assert_eq!((response.cached_tokens, response.choices[0].tokens.clone()), (96, oracle(&exact, 3)));
}

#[test]
fn answers_have_the_same_bits_with_sharing_and_without() {
    let request = |seed| GenerateRequest { logprobs: Some(5), ..greedy(&after(150, seed), 12) };
    let shared = open(options(256));
    let own = open(GeneratorOptions { share_prefixes: false, ..options(256) });
    for seed in 2..8 {
        let (shared, own) = (shared.generate(&request(seed)).unwrap(), own.generate(&request(seed)).unwrap());
        assert_eq!((shared.choices[0].tokens.clone(), own.cached_tokens), (own.choices[0].tokens.clone(), 0));
        // On a GPU a product of another number of rows may round otherwise.
        if on_gpu() {
            for (shared, own) in shared.choices[0].logprobs.iter().zip(&own.choices[0].logprobs) {
                assert!((shared.logprob - own.logprob).abs() < 1e-4, "{shared:?} {own:?}");
            }
        } else {
            assert_eq!(shared.choices[0].logprobs, own.choices[0].logprobs);
        }
        assert_eq!(shared.cached_tokens, if seed == 2 { 0 } else { 128 });
    }
}

#[test]
fn requests_that_arrive_together_compute_their_prefix_once() {
    let generator = open(GeneratorOptions { max_batch_tokens: 50, ..stepped(256) });
    let streams: Vec<_> = (2..10).map(|seed| generator.stream(&greedy(&after(200, seed), 4)).unwrap()).collect();
    while generator.step().unwrap() {}
    let mut computed = 0;
    for (seed, stream) in (2..10).zip(streams) {
        let response = stream.response().unwrap();
        assert_eq!(response.choices[0].tokens, oracle(&after(200, seed), 4));
        computed += response.computed_tokens;
    }
    // The prefix once; the others its last part, which is no whole page, and their own tokens.
    assert_eq!(computed, 220 + 7 * (220 - 192) + 8 * 3);
}

#[test]
fn a_prefix_is_found_in_the_host_tier() {
    // The pool holds one sequence.
    let generator = open(GeneratorOptions { host_bytes: 8 << 20, ..options(8) });
    generator.generate(&greedy(&after(150, 2), 3)).unwrap();
    generator.generate(&greedy(&prompt(77, 200), 3)).unwrap();
    let response = generator.generate(&greedy(&after(150, 3), 3)).unwrap();
    assert_eq!((response.cached_tokens, response.choices[0].tokens.clone()), (128, oracle(&after(150, 3), 3)));
}

#[test]
fn a_prefix_is_found_on_disk_after_a_restart() {
    let folder = Folder::new();
    let options = || GeneratorOptions { store: Some(EngineStore::new(folder.path().join("store"))), ..options(64) };
    let generator = open(options());
    generator.generate(&greedy(&after(150, 2), 3)).unwrap();
    drop(generator);
    let generator = open(options());
    let response = generator.generate(&greedy(&after(150, 3), 3)).unwrap();
    assert_eq!((response.cached_tokens, response.choices[0].tokens.clone()), (128, oracle(&after(150, 3), 3)));
}

#[test]
fn without_sharing_nothing_of_a_request_stays() {
    let generator = open(GeneratorOptions { share_prefixes: false, ..options(64) });
    tokens(&generator, &greedy(&after(100, 2), 3));
    tokens(&generator, &GenerateRequest { n: Some(3), ..greedy(&after(100, 2), 3) });
    assert_eq!(generator.kv_stats().free_pages, 64);
}

#[test]
fn the_cache_can_be_cleared() {
    let generator = open(options(64));
    tokens(&generator, &greedy(&after(100, 2), 3));
    assert!(generator.kv_stats().free_pages < 64);
    assert_eq!(generator.clear(true).unwrap(), 1);
    assert_eq!(generator.kv_stats().free_pages, 64);
    assert_eq!(generator.generate(&greedy(&after(100, 2), 3)).unwrap().cached_tokens, 0);
}
