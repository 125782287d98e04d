//! Sequences with a fixed number of slots.

use pagoda::engine::{EngineStore, GenerateRequest, Generator, GeneratorOptions, KvPolicy};
use pagoda::{KvFormat, Status};
use pagoda_test_support::Folder;

use super::cases::{PAGE, folder, greedy, open, options, oracle, prompt, stepped, tokens};

const NAMES: [&str; 3] = ["lastrec", "smart-lastrec", "h2o"];

fn with(name: &str, cache_length: u32, options: GeneratorOptions) -> Generator {
    open(GeneratorOptions { kv_policy: Some(KvPolicy::new(name, cache_length)), ..options })
}

#[test]
fn where_all_tokens_have_a_slot_answers_are_those_of_no_policy() {
    for name in NAMES {
        let generator = with(name, 200, options(64));
        for (seed, length) in [(1, 1), (2, 33), (3, 150)] {
            let prompt = prompt(seed, length);
            assert_eq!(tokens(&generator, &greedy(&prompt, 20)), oracle(&prompt, 20), "{name}");
        }
    }
}

/// A prompt far longer than the slots, and an answer that is longer, too.
#[test]
fn memory_stays_what_the_slots_take() {
    for name in NAMES {
        let generator = with(name, 40, stepped(64));
        let request = GenerateRequest { max_new_tokens: Some(100), ..greedy(&prompt(1, 300), 100) };
        let stream = generator.stream(&request).unwrap();
        let pages = |generator: &Generator| generator.kv_stats().pages - generator.kv_stats().free_pages;
        let mut most = 0;
        while generator.step().unwrap() {
            most = most.max(pages(&generator));
        }
        assert_eq!(most, 40_u64.div_ceil(PAGE as u64), "{name}");
        let response = stream.response().unwrap();
        assert_eq!(response.choices[0].tokens.len(), 100);
        assert_eq!(pages(&generator), 0, "{name}: all pages are free again");
    }
}

#[test]
fn tokens_leave_and_answers_differ_from_those_that_saw_everything() {
    let long = prompt(1, 300);
    for name in NAMES {
        assert_ne!(tokens(&with(name, 40, options(64)), &greedy(&long, 20)), oracle(&long, 20), "{name}");
    }
}

#[test]
fn answers_do_not_depend_on_what_else_runs() {
    let prompts: Vec<_> = (0..6).map(|seed| prompt(seed, 30 + 50 * seed as usize)).collect();
    for name in NAMES {
        for kv_format in [None, Some(KvFormat::Int8)] {
            let options = || GeneratorOptions { kv_format, ..options(64) };
            let generator = with(name, 64, options());
            let alone: Vec<_> = prompts.iter().map(|prompt| tokens(&generator, &greedy(prompt, 30))).collect();
            let requests: Vec<_> = prompts.iter().map(|prompt| greedy(prompt, 30)).collect();
            // So few pages that not all of them run at once, too.
            for pages in [64, 5] {
                let generator = with(name, 64, GeneratorOptions { kv_size: pagoda::KvSize::Pages(pages), ..options() });
                let together = generator.generate_all(&requests, |_| {});
                for (index, (response, alone)) in together.into_iter().zip(&alone).enumerate() {
                    assert_eq!(response.unwrap().choices[0].tokens, *alone, "{name}, prompt {index}, {pages} pages");
                }
                assert_eq!(generator.stats().preemptions, 0, "{name}");
            }
        }
    }
}

#[test]
fn several_answers_and_cancelled_ones_leave_no_page() {
    let generator = with("h2o", 64, options(64));
    let request = GenerateRequest { n: Some(3), ..greedy(&prompt(1, 200), 10) };
    let response = generator.generate(&request).unwrap();
    let answers: Vec<_> = response.choices.iter().map(|choice| &choice.tokens).collect();
    assert!(answers.iter().all(|answer| *answer == answers[0] && answer.len() == 10));
    let mut stream = generator.stream(&greedy(&prompt(2, 200), 200)).unwrap();
    stream.next().unwrap().unwrap();
    drop(stream);
    // The step in which it was cancelled ends before the next request's.
    generator.generate(&greedy(&prompt(3, 10), 1)).unwrap();
    assert_eq!(generator.kv_stats().free_pages, generator.kv_stats().pages);
}

#[test]
fn what_a_policy_can_not_do_is_refused_in_words() {
    let refused = |options: GeneratorOptions| Generator::open(folder(), options).err().expect("it is refused");
    let policy = |name: &str, cache_length| Some(KvPolicy::new(name, cache_length));
    let error = refused(GeneratorOptions { kv_policy: policy("oldest", 64), ..options(64) });
    assert_eq!(error.argument(), Some("options.kv_policy.name"), "{error}");
    assert!(error.message().contains("\"oldest\" is none of"), "{error}");
    let error = refused(GeneratorOptions { kv_policy: policy("qh2o", 64), ..options(64) });
    assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("options.kv_policy.name")));
    let error = refused(GeneratorOptions { kv_policy: policy("h2o", 0), ..options(64) });
    assert_eq!(error.argument(), Some("options.kv_policy.cache_length"), "{error}");
    let grace = KvPolicy { grace_period: 64, ..KvPolicy::new("h2o", 64) };
    let error = refused(GeneratorOptions { kv_policy: Some(grace), ..options(64) });
    assert!(error.message().contains("64 slots, of which the grace period takes 64"), "{error}");
    let store = Folder::new();
    let store = Some(EngineStore::new(store.path().join("store")));
    let error = refused(GeneratorOptions { kv_policy: policy("h2o", 64), store, ..options(64) });
    assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("options.kv_policy")));
    let request = GenerateRequest { session: Some("anna".into()), ..greedy(&[1, 2], 3) };
    let error = with("h2o", 64, options(64)).generate(&request).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::Unsupported, Some("session")));
}
