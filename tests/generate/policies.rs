//! Sequences with a fixed number of slots.

use pagoda::engine::{Chat, EngineStore, GenerateRequest, Generator, GeneratorOptions, KvPolicy, Prompt};
use pagoda::{KvFormat, Status};
use pagoda_test_support::Folder;

use super::cases::{PAGE, folder, greedy, open, options, oracle, prompt, stepped, tokens};

fn names() -> [&'static str; 6] {
    ["lastrec", "smart-lastrec", "h2o", "h2o-vlen", "qh2o", "qh2o-vlen"]
}

fn with(name: &str, cache_length: u32, options: GeneratorOptions) -> Generator {
    open(GeneratorOptions { kv_policy: Some(KvPolicy::new(name, cache_length)), ..in_format_of(name, options) })
}

/// With a format that the policy takes.
fn in_format_of(name: &str, options: GeneratorOptions) -> GeneratorOptions {
    let quantised = name.starts_with('q').then_some(KvFormat::Int8);
    GeneratorOptions { kv_format: options.kv_format.or(quantised), ..options }
}

#[test]
fn where_all_tokens_have_a_slot_answers_are_those_of_no_policy() {
    for name in names() {
        let generator = with(name, 200, options(64));
        // Quantised pages change the numbers.
        let without = name.starts_with('q').then(|| open(in_format_of(name, options(64))));
        for (seed, length) in [(1, 1), (2, 33), (3, 150)] {
            let request = greedy(&prompt(seed, length), 20);
            let expected = match &without {
                Some(generator) => tokens(generator, &request),
                None => oracle(&prompt(seed, length), 20),
            };
            assert_eq!(tokens(&generator, &request), expected, "{name}");
        }
    }
}

/// A prompt far longer than the slots, and an answer that is longer, too.
#[test]
fn memory_stays_what_the_slots_take() {
    for name in names() {
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
    for name in names() {
        assert_ne!(tokens(&with(name, 40, options(64)), &greedy(&long, 20)), oracle(&long, 20), "{name}");
    }
}

/// The errors of quantisation count for nothing where scores count for all.
#[test]
fn heavy_hitters_of_quantised_pages_are_heavy_hitters() {
    let request = greedy(&prompt(1, 300), 30);
    let answer = |name: &str, score_share: f32| {
        let policy = KvPolicy { score_share, ..KvPolicy::new(name, 40) };
        tokens(&open(GeneratorOptions { kv_policy: Some(policy), ..in_format_of("q", options(64)) }), &request)
    };
    let without = answer("h2o", 0.5);
    assert_eq!(answer("qh2o", 1.0), without);
    assert_eq!(answer("qh2o-vlen", 1.0), answer("h2o-vlen", 0.5));
    assert_ne!(answer("qh2o", 0.1), without, "errors count");
    assert_ne!(answer("h2o-vlen", 0.5), without, "lengths count");
}

#[test]
fn answers_do_not_depend_on_what_else_runs() {
    let prompts: Vec<_> = (0..6).map(|seed| prompt(seed, 30 + 50 * seed as usize)).collect();
    for name in names() {
        for kv_format in [None, Some(KvFormat::Int8)] {
            let options = || in_format_of(name, GeneratorOptions { kv_format, ..options(64) });
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
    assert!(error.message().contains("set options.kv_format to int8, int4 or fp8, or take h2o"), "{error}");
    let error = refused(GeneratorOptions { kv_policy: policy("h2o", 0), ..options(64) });
    assert_eq!(error.argument(), Some("options.kv_policy.cache_length"), "{error}");
    let grace = KvPolicy { grace_period: 64, ..KvPolicy::new("h2o", 64) };
    let error = refused(GeneratorOptions { kv_policy: Some(grace), ..options(64) });
    assert!(error.message().contains("64 slots, of which the grace period takes 64"), "{error}");
    let lengths = KvPolicy { cache_lengths: vec![64; 3], ..KvPolicy::new("h2o", 64) };
    let error = refused(GeneratorOptions { kv_policy: Some(lengths), ..options(64) });
    assert_eq!(error.argument(), Some("options.kv_policy.cache_lengths"), "{error}");
    assert!(error.message().contains("3 numbers for a model of 2 layers"), "{error}");
}

#[test]
fn dense_is_no_policy_and_refuses_what_does_not_fit() {
    let generator = with("dense", 0, options(64));
    assert_eq!(tokens(&generator, &greedy(&prompt(1, 50), 20)), oracle(&prompt(1, 50), 20));
    let session = GenerateRequest { session: Some("anna".into()), ..greedy(&prompt(1, 50), 20) };
    assert_eq!(generator.generate(&session).unwrap().cached_tokens, 32, "a page is shared");
    let generator = with("dense", 64, options(64));
    assert_eq!(tokens(&generator, &greedy(&prompt(1, 50), 14)), oracle(&prompt(1, 50), 14));
    let error = generator.generate(&greedy(&prompt(1, 50), 15)).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("max_new_tokens")));
    assert!(error.message().contains("options.kv_policy.cache_length of 64"), "{error}");
    assert_eq!(generator.generate(&greedy(&prompt(1, 64), 1)).unwrap_err().argument(), Some("prompt"));
}

#[test]
fn layers_may_have_different_numbers_of_slots() {
    for name in names() {
        let with = |cache_lengths: [u32; 2]| {
            let policy = KvPolicy { cache_lengths: cache_lengths.to_vec(), ..KvPolicy::new(name, 0) };
            open(GeneratorOptions { kv_policy: Some(policy), ..in_format_of(name, stepped(64)) })
        };
        let run = |generator: &Generator| {
            let stream = generator.stream(&greedy(&prompt(1, 200), 20)).unwrap();
            let mut most = 0;
            while generator.step().unwrap() {
                most = most.max(generator.kv_stats().pages - generator.kv_stats().free_pages);
            }
            (stream.response().unwrap().choices[0].tokens.clone(), most)
        };
        let different = run(&with([300, 40]));
        assert_eq!(different.1, 220_u64.div_ceil(PAGE as u64), "{name}: as many pages as the longest layer takes");
        let (same, all) = (run(&with([40, 40])), run(&with([300, 300])));
        assert_eq!(same.1, 2, "{name}");
        assert!(different.0 != same.0 && different.0 != all.0, "{name}");
    }
}

#[test]
fn a_request_chooses_its_own_policy_where_the_slots_allow_it() {
    let generator = with("h2o", 40, options(64));
    let request =
        |name: &str| GenerateRequest { kv_policy: Some(KvPolicy::new(name, 0)), ..greedy(&prompt(1, 200), 20) };
    let names = ["h2o", "lastrec", "smart-lastrec"];
    let together = generator.generate_all(&names.map(request), |_| {});
    for (name, response) in names.iter().zip(together) {
        let alone = tokens(&with(name, 40, options(64)), &greedy(&prompt(1, 200), 20));
        assert_eq!(response.unwrap().choices[0].tokens, alone, "{name}");
    }
    // In a session, turn by turn: what is in the slots of another policy is not continued.
    let turn = |name: &str, tokens: &[u32]| {
        let request = GenerateRequest { session: Some("anna".into()), ..request(name) };
        generator.generate(&GenerateRequest { prompt: tokens.to_vec().into(), ..request }).unwrap()
    };
    let mut conversation = prompt(1, 200);
    conversation.extend(&turn("lastrec", &conversation).choices[0].tokens);
    conversation.push(7);
    assert_eq!(turn("lastrec", &conversation).cached_tokens, 219);
    assert_eq!(turn("h2o", &conversation).cached_tokens, 0);

    let refused = |generator: &Generator, policy: KvPolicy| {
        let request = GenerateRequest { kv_policy: Some(policy), ..greedy(&[1, 2], 3) };
        let error = generator.generate(&request).unwrap_err();
        (error.status(), error.argument().unwrap().to_owned())
    };
    let name = || "kv_policy.name".to_owned();
    assert_eq!(refused(&with("lastrec", 40, options(64)), KvPolicy::new("h2o", 0)), (Status::Unsupported, name()));
    assert_eq!(refused(&generator, KvPolicy::new("h2o-vlen", 0)), (Status::Unsupported, name()));
    assert_eq!(refused(&generator, KvPolicy::new("oldest", 0)), (Status::InvalidArgument, name()));
    let length = (Status::Unsupported, "kv_policy.cache_length".to_owned());
    assert_eq!(refused(&generator, KvPolicy::new("h2o", 50)), length);
    assert_eq!(refused(&open(options(64)), KvPolicy::new("h2o", 40)), (Status::Unsupported, "kv_policy".into()));
}

#[test]
fn the_log_has_the_slots_that_each_step_has_written() {
    let logged = |name: &str, grace_period: u32, requests: &[GenerateRequest]| {
        let policy = KvPolicy { replay_log: true, grace_period, chunk_size: 7, ..KvPolicy::new(name, 40) };
        let generator = open(GeneratorOptions { kv_policy: Some(policy), ..in_format_of(name, options(64)) });
        generator.generate_all(requests, |_| {}).into_iter().for_each(|response| drop(response.unwrap()));
        let log = generator.take_slot_log();
        assert!(generator.take_slot_log().is_empty(), "it is taken once");
        log
    };
    let requests = [greedy(&prompt(1, 100), 20), greedy(&prompt(2, 30), 50)];
    for name in names() {
        let log = logged(name, 0, &requests);
        let of = |number: u64| log.iter().filter(move |call| call.sequence == number).cloned().collect::<Vec<_>>();
        for (number, request) in requests.iter().enumerate() {
            let calls = of(number as u64);
            // The same steps alone, and all tokens but the last of the answer.
            let mut alone = logged(name, 0, std::slice::from_ref(request));
            alone.iter_mut().for_each(|call| call.sequence = number as u64);
            assert_eq!(calls, alone, "{name}");
            let mut position = 0;
            for call in &calls {
                assert_eq!(call.position, position, "{name}");
                position += u64::from(call.rows);
                for slots in &call.slots {
                    assert_eq!(slots.len(), 2 * call.rows as usize, "{name}: two heads");
                }
            }
            assert_eq!(position, [119, 79][number], "{name}");
            let first: Vec<u32> = (0..calls[0].rows).flat_map(|slot| [slot, slot]).collect();
            assert!(calls[0].slots.iter().all(|slots| *slots == first), "{name}: free slots in order");
        }
    }
    // A ring behind the first 5 tokens, an eighth of the slots.
    let log = logged("lastrec", 0, &requests[..1]);
    let written: Vec<u32> = log.iter().flat_map(|call| call.slots[0].iter().step_by(2).copied()).collect();
    let expected = (0..40).chain((0..79).map(|turn| 5 + turn % 35));
    assert_eq!(written, expected.collect::<Vec<_>>());
}

#[test]
fn the_first_message_of_a_chat_stays() {
    let message = |role: &str, text: String| serde_json::json!({"role": role, "content": text});
    let system = message("system", "Be brief.".into());
    let chat = |messages: Vec<serde_json::Value>, generation: bool| {
        Prompt::Chat(Chat { add_generation_prompt: generation, ..Chat::new(messages) })
    };
    for name in ["smart-lastrec", "lastrec"] {
        let policy = KvPolicy { replay_log: true, protect_first_message: true, ..KvPolicy::new(name, 100) };
        let generator = open(GeneratorOptions { kv_policy: Some(policy), ..options(64) });
        let first = generator.tokens(&chat(vec![system.clone()], false)).unwrap().len() as u32;
        let long = "word ".repeat(60);
        let prompt = chat(vec![system.clone(), message("user", long)], true);
        let tokens = generator.tokens(&prompt).unwrap().len();
        assert!(first < 50 && tokens > 200, "{first} tokens of {tokens}");
        generator.generate(&GenerateRequest { prompt, ..greedy(&[], 10) }).unwrap();
        let log = generator.take_slot_log();
        let evicted = log.iter().filter(|call| call.position >= 100).flat_map(|call| call.slots[0].iter());
        assert_eq!(evicted.min(), Some(&first), "{name}: all but the first message leave");
    }
}

// ---- sessions ------------------------------------------------------------------------------------------------------

fn turn(generator: &Generator, tokens: &[u32]) -> (Vec<u32>, usize) {
    let request = GenerateRequest { session: Some("anna".into()), ..greedy(tokens, 10) };
    let response = generator.generate(&request).unwrap();
    (response.choices[0].tokens.clone(), response.cached_tokens as usize)
}

/// Four turns, of which the first has more tokens than there are slots. `between` is called after each. Returns the answers.
fn four_turns(generator: &mut Generator, mut between: impl FnMut(&mut Generator)) -> Vec<Vec<u32>> {
    let mut conversation = prompt(1, 100);
    let mut answers = Vec::new();
    for number in 0..4 {
        let (answer, cached) = turn(generator, &conversation);
        // The last token of an answer is not computed.
        let expected = if number == 0 { 0 } else { conversation.len() - 31 };
        assert_eq!(cached, expected, "turn {number}");
        conversation.extend(&answer);
        conversation.extend(prompt(10 + number, 30));
        answers.push(answer);
        between(generator);
    }
    answers
}

#[test]
fn a_session_goes_on_where_it_was_in_every_tier() {
    for name in names() {
        let open = |options| with(name, 40, options);
        let expected = four_turns(&mut open(options(64)), |_| {});
        assert_eq!(four_turns(&mut open(options(64)), |_| {}), expected, "{name}: resident");
        let host = GeneratorOptions { host_bytes: 32 << 20, ..options(64) };
        let unload = |generator: &mut Generator| {
            assert_eq!(generator.unload(&["anna"]).unwrap(), 1);
            assert_eq!(generator.kv_stats().resident_owners, 0);
        };
        assert_eq!(four_turns(&mut open(host), unload), expected, "{name}: from host memory");
        let folder = Folder::new();
        let on_disk = || GeneratorOptions { store: Some(EngineStore::new(folder.path().join("store"))), ..options(64) };
        assert_eq!(four_turns(&mut open(on_disk()), unload), expected, "{name}: from disk");
        assert_eq!(open(on_disk()).forget(&["anna", "bert"]).unwrap(), 1);
        let mut generator = Some(open(on_disk()));
        let restart = |generator: &mut Generator| {
            // The store belongs to one process and one generator at a time.
            *generator = open(options(64));
            *generator = open(on_disk());
        };
        assert_eq!(four_turns(generator.as_mut().unwrap(), restart), expected, "{name}: after restarts");
        drop(generator);
        // Another policy has slots of its own.
        let other = if name == "lastrec" { "smart-lastrec" } else { "lastrec" };
        assert_eq!(turn(&with(other, 40, on_disk()), &prompt(1, 100)).1, 0);
    }
}

#[test]
fn a_session_with_room_for_all_answers_as_without_a_policy() {
    for name in ["lastrec", "smart-lastrec", "h2o"] {
        let generator = with(name, 300, options(64));
        let mut conversation = prompt(1, 50);
        for number in 0..3 {
            let (answer, _) = turn(&generator, &conversation);
            assert_eq!(answer, oracle(&conversation, 10), "{name}, turn {number}");
            conversation.extend(answer);
            conversation.extend(prompt(number, 20));
            generator.unload(&["anna"]).unwrap();
        }
    }
}

#[test]
fn a_turn_that_is_edited_or_sent_again_goes_on_from_the_one_before() {
    for name in names() {
        let generator = with(name, 40, GeneratorOptions { host_bytes: 32 << 20, ..options(64) });
        let mut first = prompt(1, 100);
        first.extend(turn(&generator, &first).0);
        let after_first = first.len() - 1;
        let second: Vec<u32> = [first.clone(), prompt(2, 30)].concat();
        let answer = turn(&generator, &second);
        assert_eq!(answer.1, after_first);
        assert_eq!(turn(&generator, &second), answer, "{name}: sent again");
        let edited: Vec<u32> = [first.clone(), prompt(3, 30)].concat();
        assert_eq!(turn(&generator, &edited).1, after_first, "{name}: edited");
        // What was before the first turn's end is not there as it was.
        let mut other = second.clone();
        other[5] = (other[5] + 1) % 200;
        let anew = turn(&generator, &other);
        assert_eq!(anew.1, 0, "{name}: edited at its beginning");
        assert_eq!(anew.0, tokens(&with(name, 40, options(64)), &greedy(&other, 10)), "{name}");
        generator.forget(&["anna"]).unwrap();
        assert_eq!(turn(&generator, &second).1, 0, "{name}: forgotten");
    }
}
