//! Conversations.

use pagoda::engine::{EngineStore, GenerateRequest, GenerateResponse, Generator, GeneratorOptions};
use pagoda_test_support::Folder;

use super::cases::{PAGE, greedy, open, options, oracle, prompt, stepped};

fn turn(generator: &Generator, tokens: &[u32], new: u32) -> GenerateResponse {
    let request = GenerateRequest { session: Some("anna".into()), ..greedy(tokens, new) };
    let response = generator.generate(&request).unwrap();
    assert_eq!(response.choices[0].tokens, oracle(tokens, new as usize));
    response
}

/// A first turn of 50 tokens and 10 new ones, and what the conversation is after it, with `more` tokens behind.
fn first_turn(generator: &Generator, more: usize) -> Vec<u32> {
    let mut conversation = prompt(1, 50);
    conversation.extend(&turn(generator, &conversation, 10).choices[0].tokens);
    conversation.extend(prompt(2, more));
    conversation
}

#[test]
fn the_next_turn_computes_only_what_is_new() {
    let generator = open(options(64));
    let conversation = first_turn(&generator, 7);
    let response = turn(&generator, &conversation, 5);
    // The last token of the answer was never computed.
    assert_eq!((response.cached_tokens, response.computed_tokens), (59, 8 + 4));
}

#[test]
fn an_evicted_conversation_comes_back_from_its_tier() {
    let folder = Folder::new();
    let store = || Some(EngineStore::new(folder.path().join("store")));
    for options in
        [GeneratorOptions { host_bytes: 8 << 20, ..options(64) }, GeneratorOptions { store: store(), ..options(64) }]
    {
        let generator = open(options);
        let conversation = first_turn(&generator, 7);
        assert_eq!(generator.unload(&["anna"]).unwrap(), 1);
        assert_eq!(generator.kv_stats().resident_owners, 0);
        assert_eq!(turn(&generator, &conversation, 5).cached_tokens, 59);
        // Fetched before it is needed.
        assert_eq!(generator.unload(&["anna"]).unwrap(), 1);
        assert_eq!(generator.prefetch(&["anna"]).unwrap(), 1);
        let mut conversation = conversation.clone();
        conversation.extend(oracle(&conversation, 5));
        assert_eq!(turn(&generator, &conversation, 5).cached_tokens, 71);
        drop(generator);
    }
    let generator = open(options(64));
    let conversation = first_turn(&generator, 7);
    generator.unload(&["anna"]).unwrap();
    assert_eq!(turn(&generator, &conversation, 5).cached_tokens, 0, "without a tier it is computed again");
}

#[test]
fn a_conversation_survives_a_restart() {
    let folder = Folder::new();
    let options = || GeneratorOptions { store: Some(EngineStore::new(folder.path().join("store"))), ..options(64) };
    let generator = open(options());
    let conversation = first_turn(&generator, 7);
    drop(generator);
    let generator = open(options());
    assert_eq!(turn(&generator, &conversation, 5).cached_tokens, 59);
    assert_eq!(generator.forget(&["anna", "bert"]).unwrap(), 1);
    generator.clear(true).unwrap();
    drop(generator);
    assert_eq!(turn(&open(options()), &conversation, 5).cached_tokens, 0, "forgotten");
}

#[test]
fn an_edited_message_is_noticed_and_computed_from_there() {
    for share_prefixes in [true, false] {
        let generator = open(GeneratorOptions { share_prefixes, ..options(64) });
        let conversation = first_turn(&generator, 20);
        turn(&generator, &conversation, 5);
        for at in [75, 40, 33, 3] {
            let mut edited = conversation.clone();
            edited[at] = (edited[at] + 1) % 200;
            let response = turn(&generator, &edited, 5);
            assert_eq!(response.cached_tokens as usize, at / PAGE * PAGE, "token {at}");
            // As it was: only what was edited is gone.
            let response = turn(&generator, &conversation, 5);
            assert_eq!(response.cached_tokens as usize, at / PAGE * PAGE, "token {at}, back");
        }
    }
}

#[test]
fn a_shorter_conversation_keeps_its_whole_pages() {
    let generator = open(options(64));
    let conversation = first_turn(&generator, 60);
    turn(&generator, &conversation, 5);
    // The answer again, and a shorter prompt; the last token is always computed.
    for (len, cached) in [(120, 96), (97, 96), (96, 64), (65, 64), (64, 32), (33, 32), (32, 0), (1, 0)] {
        let response = turn(&generator, &conversation[..len], 3);
        assert_eq!(response.cached_tokens, cached, "{len} tokens");
        turn(&generator, &conversation, 5);
    }
}

#[test]
fn requests_of_one_session_run_one_at_a_time() {
    let generator = open(stepped(64));
    let request = GenerateRequest { session: Some("anna".into()), ..greedy(&prompt(1, 10), 4) };
    let streams: Vec<_> = (0..3).map(|_| generator.stream(&request).unwrap()).collect();
    let mut most = 0;
    while generator.step().unwrap() {
        most = most.max(generator.stats().running);
    }
    assert_eq!(most, 1);
    for stream in streams {
        assert_eq!(stream.response().unwrap().choices[0].tokens, oracle(&prompt(1, 10), 4));
    }
}
