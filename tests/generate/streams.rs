//! What arrives, and how.

use std::sync::mpsc::channel;

use pagoda::engine::{Chat, Event, FinishReason, GenerateRequest, Prompt};

use super::cases::{greedy, open, options, prompt, stepped};

#[test]
fn a_stream_has_the_tokens_and_texts_of_the_response() {
    let generator = open(options(64));
    let request = GenerateRequest { n: Some(3), do_sample: Some(true), seed: Some(1), ..greedy(&prompt(1, 40), 60) };
    let response = generator.generate(&request).unwrap();
    let (mut ids, mut texts): ([Vec<u32>; 3], [String; 3]) = Default::default();
    let mut last = [None; 3];
    for token in generator.stream(&request).unwrap() {
        let token = token.unwrap();
        let choice = token.choice as usize;
        assert_eq!(last[choice], None, "nothing comes after the last token");
        ids[choice].push(token.id);
        texts[choice].push_str(&token.text);
        last[choice] = token.finish_reason;
    }
    for (choice, answer) in response.choices.iter().enumerate() {
        assert_eq!((&ids[choice], &texts[choice]), (&answer.tokens, &answer.text));
        assert_eq!(last[choice], Some(FinishReason::Length));
        let decoded = generator.tokenizer().decode(&answer.tokens, true).unwrap();
        assert_eq!(answer.text, decoded);
    }
}

#[test]
fn a_callback_gets_every_token_and_the_end() {
    let generator = open(options(64));
    let request = greedy(&prompt(1, 40), 20);
    let expected = generator.generate(&request).unwrap();
    let (sender, events) = channel();
    generator.generate_async(&request, move |event| sender.send(event).unwrap()).unwrap();
    let events: Vec<_> = events.into_iter().collect();
    let (end, tokens) = events.split_last().unwrap();
    let ids: Vec<_> =
        tokens.iter().map(|event| if let Event::Token(token) = event { token.id } else { panic!() }).collect();
    assert_eq!(ids, expected.choices[0].tokens);
    let Event::End(Ok(response)) = end else { panic!("{end:?}") };
    assert_eq!(response.choices[0].tokens, expected.choices[0].tokens);
}

#[test]
fn a_callback_that_panics_or_sends_requests_does_no_harm() {
    let generator = std::sync::Arc::new(open(options(64)));
    let (sender, done) = channel();
    generator.generate_async(&greedy(&prompt(1, 4), 3), |_| panic!("as the test wants it")).unwrap();
    let again = std::sync::Arc::clone(&generator);
    generator
        .generate_async(&greedy(&prompt(1, 4), 3), move |event| {
            if let Event::End(_) = event {
                let sender = sender.clone();
                again.generate_async(&greedy(&prompt(2, 4), 2), move |event| sender.send(event).unwrap()).unwrap();
            }
        })
        .unwrap();
    assert_eq!(done.into_iter().count(), 3);
}

#[test]
fn an_answer_ends_at_its_stops() {
    let generator = open(options(64));
    let request = greedy(&prompt(1, 40), 60);
    let whole = generator.generate(&request).unwrap().choices[0].clone();
    // A stop token: the answer has it, its text does not.
    let token = whole.tokens[7];
    let at = whole.tokens.iter().position(|&other| other == token).unwrap();
    let stopped = GenerateRequest { stop_tokens: vec![token], ..request.clone() };
    let answer = generator.generate(&stopped).unwrap().choices[0].clone();
    assert_eq!((&answer.tokens[..], answer.finish_reason), (&whole.tokens[..=at], FinishReason::Stop));
    assert_eq!(answer.text, generator.tokenizer().decode(&whole.tokens[..at], true).unwrap());
    // A stop text that begins inside a token's text and ends inside another's.
    let chars: Vec<_> = whole.text.char_indices().collect();
    let (from, to) = (chars[chars.len() / 2].0, chars[chars.len() / 2 + 3].0);
    let stop = whole.text[from..to].to_owned();
    let first = whole.text.find(&stop).unwrap();
    for include_stop in [false, true] {
        let request = GenerateRequest { stop: vec![stop.clone()], include_stop, ..request.clone() };
        let mut shown = String::new();
        for token in generator.stream(&request).unwrap() {
            shown.push_str(&token.unwrap().text);
            assert!(whole.text.starts_with(&shown), "no part of a stop text is shown and taken back");
        }
        assert_eq!(shown, whole.text[..if include_stop { first + stop.len() } else { first }]);
    }
    // An end-of-sequence token.
    let eos = generator.folder().tokens.eos[0];
    let biased = GenerateRequest {
        logit_bias: vec![(eos, 100.0)],
        ignore_eos: false,
        min_new_tokens: Some(4),
        ..request.clone()
    };
    let answer = generator.generate(&biased).unwrap().choices[0].clone();
    assert_eq!((answer.tokens.len(), answer.tokens[4], answer.finish_reason), (5, eos, FinishReason::Stop));
}

#[test]
fn echo_puts_the_prompt_before_the_answer() {
    let generator = open(options(64));
    let request = GenerateRequest { do_sample: Some(false), max_new_tokens: Some(5), ..GenerateRequest::new("Hello") };
    let plain = generator.generate(&request).unwrap();
    assert_eq!(plain.prompt_tokens, generator.tokens(&Prompt::from("Hello")).unwrap());
    let echoed = generator.generate(&GenerateRequest { echo: true, ..request }).unwrap();
    assert_eq!(echoed.choices[0].text, format!("Hello{}", plain.choices[0].text));
}

#[test]
fn a_caller_can_run_the_steps() {
    let generator = open(stepped(64));
    let expected = open(options(64)).generate(&greedy(&prompt(1, 40), 6)).unwrap();
    assert!(!generator.step().unwrap(), "there is nothing to do");
    // A blocking call runs the steps itself.
    let response = generator.generate(&greedy(&prompt(1, 40), 6)).unwrap();
    assert_eq!(response.choices[0].tokens, expected.choices[0].tokens);
    let error = open(options(64)).step().unwrap_err();
    assert_eq!(error.argument(), Some("options.driver"), "{error}");
}

#[test]
fn a_chat_is_rendered_by_the_models_template() {
    let generator = open(options(64));
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let chat = Chat::new(vec![message("user", "Hi"), message("assistant", "Yes?"), message("user", "Ho")]);
    let text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nHo<|im_end|>\n\
                <|im_start|>assistant\n";
    let tokens = generator.tokens(&Prompt::from(chat.clone())).unwrap();
    assert_eq!(tokens, generator.tokenizer().encode(text, false).unwrap());
    let request = GenerateRequest { max_new_tokens: Some(3), ..GenerateRequest::new(chat) };
    assert_eq!(generator.generate(&request).unwrap().prompt_tokens, tokens);
    // What the template can not do is the caller's error.
    let error = generator.generate(&GenerateRequest::new(Chat::new(Vec::new()))).err();
    assert!(error.is_none_or(|error| error.argument().is_some()));
}
