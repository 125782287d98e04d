//! Answers with a grammar.

use std::time::Duration;

use pagoda::engine::{FinishReason, GenerateRequest, Generator, GeneratorOptions, Grammar, GrammarCompiler};
use pagoda::text::Tokenizer;
use pagoda_test_support::Random;
use serde_json::Value;

use super::cases::{VOCAB, folder, greedy, on_gpu, open, options, oracle, oracle_logits, prompt, stepped, tokens};

const PERSON: &str = r##"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 6},
    "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": {"type": "array", "maxItems": 2,
    "items": {"enum": ["a\"b", "ü", "日本"]}}, "parent": {"$ref": "#/$defs/none"}}, "required": ["name", "age"],
    "additionalProperties": false, "$defs": {"none": {"type": "null"}}}"##;

/// Draws tokens until the grammar ends.
fn drawn(prompt: &[u32], seed: u64, grammar: Grammar) -> GenerateRequest {
    GenerateRequest {
        do_sample: Some(true),
        temperature: Some(1.5),
        seed: Some(seed),
        max_new_tokens: Some(200),
        grammar: Some(grammar),
        ..GenerateRequest::new(prompt.to_vec())
    }
}

fn schema(text: &str) -> Grammar {
    Grammar::JsonSchema(text.into())
}

fn is_person(text: &str) -> bool {
    let Ok(Value::Object(person)) = serde_json::from_str(text) else { return false };
    let tags = |tags: &Value| {
        let tags = tags.as_array().unwrap();
        tags.len() <= 2 && tags.iter().all(|tag| ["a\"b", "ü", "日本"].contains(&tag.as_str().unwrap()))
    };
    person.keys().all(|key| ["name", "age", "tags", "parent"].contains(&key.as_str()))
        && person["name"].as_str().is_some_and(|name| name.chars().count() <= 6)
        && person["age"].as_u64().is_some_and(|age| age <= 150)
        && person.get("tags").is_none_or(tags)
        && person.get("parent").is_none_or(Value::is_null)
}

#[test]
fn answers_are_what_their_grammar_says() {
    let generator = open(options(64));
    let of_regex = |text: &str| {
        text.len() == 10
            && text.bytes().enumerate().all(|(at, byte)| match at {
                4 | 7 => byte == b'-',
                _ => byte.is_ascii_digit(),
            })
    };
    let nested = |text: &str| {
        let mut depth = 0;
        text.chars().all(|c| {
            depth += if c == '(' { 1 } else { -1 };
            depth >= 0
        }) && depth == 0
    };
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let cases: [(Grammar, Check<'_>); 4] = [
        (schema(PERSON), &is_person),
        (Grammar::Regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}".into()), &of_regex),
        (Grammar::Choice(vec!["yes".into(), "no \"thanks\"".into(), "vielleicht\n".into()]), &|text| {
            ["yes", "no \"thanks\"", "vielleicht\n"].contains(&text)
        }),
        (Grammar::Lark("start: \"(\" start \")\" | \"()\"".into()), &nested),
    ];
    for (grammar, is_valid) in cases {
        let mut texts = std::collections::HashSet::new();
        for seed in 0..24 {
            let response = generator.generate(&drawn(&prompt(seed, 8), seed, grammar.clone())).unwrap();
            let choice = &response.choices[0];
            if choice.finish_reason == FinishReason::Length {
                assert!(choice.missing.as_ref().is_some_and(|next| next.starts_with("next is ")), "{choice:?}");
                continue;
            }
            assert_eq!((choice.finish_reason, &choice.missing), (FinishReason::Stop, &None));
            assert!(is_valid(&choice.text), "{} gave {:?}", grammar.kind(), choice.text);
            texts.insert(choice.text.clone());
        }
        assert!(texts.len() > 1, "{} always gave {texts:?}", grammar.kind());
    }
}

/// The likeliest tokens among those that can be part of five letters from a to c, found without a grammar.
fn five_letters(start: &[u32], tokenizer: &Tokenizer) -> Vec<u32> {
    let (mut sequence, mut letters) = (start.to_vec(), 0);
    while letters < 5 {
        let fits = |&token: &u32| {
            tokenizer.token_bytes(token).is_some_and(|bytes| {
                !tokenizer.is_special(token)
                    && !bytes.is_empty()
                    && bytes.len() <= 5 - letters
                    && bytes.iter().all(|byte| (b'a'..=b'c').contains(byte))
            })
        };
        let logits = oracle_logits(&sequence);
        let likeliest = |a: &u32, b: &u32| logits[*a as usize].total_cmp(&logits[*b as usize]);
        let token = (0..VOCAB as u32).rev().filter(fits).max_by(likeliest).unwrap();
        letters += tokenizer.token_bytes(token).unwrap().len();
        sequence.push(token);
    }
    sequence.split_off(start.len())
}

#[test]
fn the_likeliest_allowed_token_is_taken() {
    let tokenizer = Tokenizer::from_file(folder().join("tokenizer.json")).unwrap();
    let generator = open(options(64));
    for seed in 0..8 {
        let prompt = prompt(seed, 5 + seed as usize);
        let request = GenerateRequest { grammar: Some(Grammar::Regex("[abc]{5}".into())), ..greedy(&prompt, 20) };
        let mut found = tokens(&generator, &request);
        found.pop();
        assert_eq!(found, five_letters(&prompt, &tokenizer));
    }
}

#[test]
fn others_in_the_batch_change_nothing() {
    let request = |n: u64| match n % 3 {
        0 => greedy(&prompt(n, 20), 24),
        1 => GenerateRequest { top_k: Some(4), ..drawn(&prompt(n, 20), n, schema(PERSON)) },
        _ => GenerateRequest { grammar: Some(Grammar::Regex("(ab|cd)+e".into())), ..greedy(&prompt(n, 20), 24) },
    };
    let alone: Vec<_> = {
        let generator = open(options(64));
        (0..12).map(|n| tokens(&generator, &request(n))).collect()
    };
    // A pool in which some have to leave and come back.
    let generator = open(GeneratorOptions { max_stretch: 0.0, ..stepped(if on_gpu() { 64 } else { 12 }) });
    let limited = |n| GenerateRequest { max_new_tokens: Some(60), ..request(n) };
    let streams: Vec<_> = (0..12).map(|n| generator.stream(&limited(n)).unwrap()).collect();
    while generator.step().unwrap() {}
    for (n, (stream, alone)) in streams.into_iter().zip(alone).enumerate() {
        let tokens = stream.response().unwrap().choices[0].tokens.clone();
        let same = tokens.len().min(60).min(alone.len());
        assert_eq!(tokens[..same], alone[..same], "request {n}");
    }
    assert_eq!(tokens(&generator_of(64), &greedy(&prompt(0, 20), 24)), oracle(&prompt(0, 20), 24));
}

fn generator_of(pages: u32) -> Generator {
    open(options(pages))
}

#[test]
fn tokens_that_are_forced_need_no_step_each() {
    let text = "a text that is known from its first letter to its last one".to_owned();
    let generator = open(stepped(64));
    let plain = GenerateRequest { grammar: Some(Grammar::Choice(vec![text.clone()])), ..greedy(&[1, 2, 3], 200) };
    // A byte is spelt by one token only if no longer token begins with it.
    let stream = generator.stream(&plain).unwrap();
    while generator.step().unwrap() {}
    let response = stream.response().unwrap();
    assert_eq!(response.choices[0].text, text);
    let (tokens, steps) = (response.choices[0].tokens.len() as u64, generator.stats().steps);
    assert!(steps < tokens, "{tokens} tokens took {steps} steps");

    // Each token has log probabilities, which need a step.
    let with_logprobs = GenerateRequest { logprobs: Some(2), ..plain };
    let stream = generator.stream(&with_logprobs).unwrap();
    while generator.step().unwrap() {}
    let response = stream.response().unwrap();
    assert_eq!(response.choices[0].text, text);
    assert_eq!(response.choices[0].logprobs.len(), response.choices[0].tokens.len());
    let logits = oracle_logits(&[&[1, 2, 3], &response.choices[0].tokens[..5]].concat());
    let (max, token) = (logits.iter().copied().fold(f32::MIN, f32::max), response.choices[0].tokens[5] as usize);
    let total: f32 = logits.iter().map(|logit| (logit - max).exp()).sum();
    let expected = logits[token] - max - total.ln();
    assert!((response.choices[0].logprobs[5].logprob - expected).abs() < 1e-3, "{:?}", response.choices[0].logprobs[5]);
}

#[test]
fn a_grammar_ends_an_answer_whatever_else_the_request_says() {
    let generator = open(options(64));
    let choice = Grammar::Choice(vec!["abc".into()]);
    for request in [
        GenerateRequest { ignore_eos: true, ..drawn(&[5], 1, choice.clone()) },
        GenerateRequest { min_new_tokens: Some(100), ..drawn(&[5], 1, choice.clone()) },
        GenerateRequest { forced_eos: Some(1), max_new_tokens: Some(20), ..drawn(&[5], 1, choice.clone()) },
        GenerateRequest { no_repeat_ngram_size: Some(1), ..drawn(&prompt(1, 300), 1, choice.clone()) },
    ] {
        let response = generator.generate(&request).unwrap();
        assert_eq!((response.choices[0].text.as_str(), response.choices[0].finish_reason), ("abc", FinishReason::Stop));
    }
    let cut = GenerateRequest { forced_eos: Some(1), max_new_tokens: Some(2), ..drawn(&[5], 1, schema(PERSON)) };
    let response = generator.generate(&cut).unwrap();
    assert_eq!(response.choices[0].finish_reason, FinishReason::Length);
    assert!(response.choices[0].missing.is_some());
}

#[test]
fn several_answers_and_a_conversation_keep_to_the_grammar() {
    let generator = open(options(64));
    let several = GenerateRequest { n: Some(4), ..drawn(&prompt(3, 40), 7, schema(PERSON)) };
    let response = generator.generate(&several).unwrap();
    let valid = |text: &str, reason| reason == FinishReason::Length || is_person(text);
    assert!(response.choices.iter().all(|choice| valid(&choice.text, choice.finish_reason)), "{response:?}");
    let distinct: std::collections::HashSet<_> = response.choices.iter().map(|choice| &choice.text).collect();
    assert!(distinct.len() > 1, "{response:?}");

    let mut history = prompt(4, 30);
    for turn in 0..3 {
        let request = GenerateRequest {
            session: Some("a conversation".into()),
            max_new_tokens: Some(60),
            ..drawn(&history, turn, Grammar::Regex("[0-9]{3}".into()))
        };
        let response = generator.generate(&request).unwrap();
        assert_eq!(response.choices[0].text.len(), 3, "{response:?}");
        assert!(turn == 0 || response.cached_tokens as usize >= history.len() - 12, "{response:?}");
        history.extend(&response.choices[0].tokens);
        history.extend([7, 8]);
    }
}

#[test]
fn what_can_not_be_a_grammar_is_refused_at_once() {
    let generator = open(options(64));
    let refused = |grammar: Grammar, argument: &str, part: &str| {
        let error = generator.generate(&drawn(&[1], 1, grammar)).unwrap_err();
        assert_eq!((error.status().name(), error.argument()), ("INVALID_ARGUMENT", Some(argument)), "{error}");
        assert!(error.message().contains(part), "{error}");
    };
    refused(schema("{"), "grammar.json_schema", "it is not JSON");
    refused(schema(r#"{"type": "strange"}"#), "grammar.json_schema", "strange");
    refused(schema(r#"{"type": "string", "minLength": 5, "maxLength": 2}"#), "grammar.json_schema", "");
    refused(schema(r#"{"enum": []}"#), "grammar.json_schema", "");
    refused(schema(r##"{"$ref": "#/$defs/missing"}"##), "grammar.json_schema", "missing");
    refused(Grammar::Regex("(".into()), "grammar.regex", "");
    refused(Grammar::Choice(vec![]), "grammar.choice", "no text to choose");
    refused(Grammar::Lark("begin: \"a\"".into()), "grammar.lark", "start");
    refused(Grammar::Regex("a".repeat(2 << 20)), "grammar.regex", "1048576");
    assert_eq!(generator.stats().waiting, 0);
}

/// Requests with and without grammars, in a pool too small for all of them, some of them cancelled.
#[test]
fn cancelled_answers_with_grammars_leave_nothing_behind() {
    let generator = open(options(16));
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let generator = &generator;
            scope.spawn(move || {
                let mut random = Random(thread + 1);
                for round in 0..12 {
                    let prompt = prompt(random.below(50) as u64, 1 + random.below(40));
                    let grammar = [schema(PERSON), Grammar::Regex("(a|b)*c".into())][random.below(2)].clone();
                    let mut request = GenerateRequest { max_new_tokens: Some(40), ..drawn(&prompt, round, grammar) };
                    if random.below(3) == 0 {
                        request.grammar = None;
                    }
                    let mut stream = generator.stream(&request).unwrap();
                    if random.below(3) == 0 {
                        for _ in 0..random.below(6) {
                            stream.next();
                        }
                        continue;
                    }
                    let choice = stream.response().unwrap().choices[0].clone();
                    let is_whole = choice.finish_reason == FinishReason::Stop && request.grammar.is_some();
                    if matches!(&request.grammar, Some(Grammar::JsonSchema(_))) && is_whole {
                        assert!(is_person(&choice.text), "{choice:?}");
                    }
                }
            });
        }
    });
    // A dropped stream ends with the next step.
    while generator.stats().running + generator.stats().waiting > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    generator.clear(true).unwrap();
    let kv = generator.kv_stats();
    assert_eq!((kv.free_pages, kv.shared_pages, kv.resident_owners), (16, 0, 0), "{kv:?}");
}

/// Any tokens that a grammar allows. `None` if there were too many.
fn any_text(
    compiler: &GrammarCompiler,
    tokenizer: &Tokenizer,
    grammar: &Grammar,
    random: &mut Random,
) -> Option<Vec<u8>> {
    let state = compiler.compile(grammar, random.below(3)).unwrap();
    let (mut text, mut allowed) = (Vec::new(), Vec::new());
    for _ in 0..400 {
        let next = state.next().unwrap();
        allowed.clear();
        allowed.extend((0..VOCAB as u32).filter(|&token| next.allows(token)));
        // Where it may end, it does so soon.
        let ends = allowed.contains(&EOS) && (allowed.len() == 1 || random.below(4) == 0);
        if ends {
            return Some(text);
        }
        let token = loop {
            let token = allowed[random.below(allowed.len())];
            if token != EOS {
                break token;
            }
        };
        text.extend(tokenizer.token_bytes(token).unwrap());
        state.took(token);
    }
    None
}

const EOS: u32 = 2;

/// Values of schemas that invite mistakes: what is drawn at random from the masks is always valid.
#[test]
fn no_draw_escapes_a_schema() {
    let samples: usize = std::env::var("PAGODA_GRAMMAR_SAMPLES").map_or(480, |samples| samples.parse().unwrap());
    let tokenizer = Tokenizer::from_file(folder().join("tokenizer.json")).unwrap();
    let compiler = GrammarCompiler::new(&tokenizer, VOCAB, &[EOS]).unwrap();
    let length = |value: &Value| value.as_str().unwrap().chars().count();
    type Check<'a> = &'a dyn Fn(&Value) -> bool;
    let cases: [(&str, Check<'_>); 8] = [
        (PERSON, &|value| is_person(&value.to_string())),
        (r#"{"type": "string", "minLength": 2, "maxLength": 4}"#, &|value| (2..=4).contains(&length(value))),
        (r#"{"type": "string", "pattern": "^[\\u00e0-\\u00ff\"\\\\]{1,3}$"}"#, &|value| {
            value.as_str().unwrap().chars().all(|c| ('\u{e0}'..='\u{ff}').contains(&c) || c == '"' || c == '\\')
        }),
        (r#"{"type": "integer", "exclusiveMinimum": -12, "maximum": 1005, "multipleOf": 5}"#, &|value| {
            // "-0" is a whole number, too.
            value.as_f64().is_some_and(|n| n > -12.0 && n <= 1005.0 && n % 5.0 == 0.0)
        }),
        (r#"{"type": "number", "minimum": -0.5, "exclusiveMaximum": 2.25}"#, &|value| {
            value.as_f64().is_some_and(|n| (-0.5..2.25).contains(&n))
        }),
        (
            r#"{"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "boolean"},
            "c": {"type": "null"}}, "additionalProperties": false}, "d": {"const": "\u0007"}}, "additionalProperties": false}"#,
            &|value| {
                let known = |value: &Value, names: &[&str]| {
                    value.as_object().unwrap().keys().all(|key| names.contains(&key.as_str()))
                };
                known(value, &["a", "d"])
                    && value.get("a").is_none_or(|a| known(a, &["b", "c"]) && a.get("b").is_none_or(Value::is_boolean))
                    && value.get("d").is_none_or(|d| d == "\u{7}")
            },
        ),
        (
            r##"{"$ref": "#/$defs/list", "$defs": {"list": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/list"}}}}"##,
            &|value| {
                fn nested(value: &Value) -> bool {
                    value.as_array().is_some_and(|list| list.len() <= 2 && list.iter().all(nested))
                }
                nested(value)
            },
        ),
        (
            r#"{"anyOf": [{"enum": ["\ud83d\ude00", "\n"]}, {"type": "array", "minItems": 1, "maxItems": 1, "items": {"const": 1e3}}]}"#,
            &|value| {
                value == "\u{1f600}"
                    || value == "\n"
                    || value.as_array().is_some_and(|list| list.len() == 1 && list[0].as_f64() == Some(1e3))
            },
        ),
    ];
    let mut random = Random(7);
    for (text, is_valid) in cases {
        let grammar = schema(text);
        let mut whole = 0;
        for _ in 0..samples / cases.len() {
            let Some(drawn) = any_text(&compiler, &tokenizer, &grammar, &mut random) else { continue };
            whole += 1;
            let value: Value = serde_json::from_slice(&drawn)
                .unwrap_or_else(|error| panic!("{text}: {error} in {:?}", String::from_utf8_lossy(&drawn)));
            assert!(is_valid(&value), "{text}: {value}");
        }
        assert!(whole * 4 > samples / cases.len(), "{text}: only {whole} drawn texts came to an end");
    }
}
