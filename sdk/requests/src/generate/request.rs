//! A request as a line of JSON: its fields have the names of `GenerateRequest`'s.

use pagoda::engine::{Chat, Prompt};
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Result};
use serde_json::Value;

use super::answering::set_field;
use crate::fields::{flag, items, object, once, plain, wholes};
use crate::words::did_you_mean;

const FIELDS: [&str; 37] = [
    "id",
    "prompt",
    "messages",
    "tools",
    "add_generation_prompt",
    "variables",
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "logit_bias",
    "forced_eos",
    "ignore_eos",
    "stop",
    "stop_tokens",
    "include_stop",
    "skip_special",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "n",
    "echo",
    "session",
    "priority",
    "timeout",
    "context_end",
    "kv_policy",
    "max_draft",
    "grammar",
    "beams",
];

/// The fields that belong to `messages`.
const OF_MESSAGES: [&str; 3] = ["tools", "add_generation_prompt", "variables"];

/// The `id` of a line, if it has one, also where another field is wrong: an error can then name it.
pub fn id(line: &str) -> Option<Value> {
    let members = object(line, "").ok()?;
    let (_, value) = members.iter().find(|(name, _)| name == "id")?;
    read_id(value).ok()
}

/// Reads a line. What it does not say is as in `defaults`.
pub fn parse(line: &str, defaults: &GenerateRequest) -> Result<GenerateRequest> {
    read(&object(line, r#"{"prompt": "Once upon a time", "max_new_tokens": 32}"#)?, defaults)
}

/// Reads the members of an object. What they do not say is as in `defaults`.
pub fn read(members: &[(String, Json)], defaults: &GenerateRequest) -> Result<GenerateRequest> {
    let mut request = defaults.clone();
    let mut chat = Chat { add_generation_prompt: true, ..Chat::default() };
    let (mut prompt, mut messages) = (None, false);
    let mut seen: Vec<&str> = Vec::new();
    for (name, value) in members {
        once(&mut seen, name, name)?;
        if !FIELDS.contains(&name.as_str()) {
            return Err(Error::invalid(name, format!("no such field{}", did_you_mean(name, &FIELDS))));
        }
        if *value == Json::Null {
            // As if it were not there.
            seen.pop();
            continue;
        }
        match name.as_str() {
            "id" => drop(read_id(value)?),
            "prompt" => prompt = Some(read_prompt(name, value)?),
            "messages" => (chat.messages, messages) = (read_messages("messages", value)?, true),
            "tools" => chat.tools = Some(plain(name, value)?),
            "add_generation_prompt" => chat.add_generation_prompt = flag(name, value)?,
            "variables" => match plain(name, value)? {
                Value::Object(variables) => chat.variables = variables,
                _ => return Err(Error::invalid(name, format!("{value} is not an object"))),
            },
            _ => drop(set_field(&mut request, name, value)?),
        }
    }
    request.prompt = match (prompt, messages) {
        (Some(prompt), false) => prompt,
        (None, true) => chat.into(),
        (Some(_), true) => return Err(Error::invalid("messages", "given, and `prompt` too: send one of them")),
        (None, false) => {
            return Err(Error::invalid("prompt", "missing: send `prompt`, a text or a list of tokens, or `messages`"));
        }
    };
    match seen.iter().find(|name| OF_MESSAGES.contains(name) && !messages) {
        Some(name) => Err(Error::invalid(*name, "given without `messages`, which it belongs to")),
        None => Ok(request),
    }
}

/// The messages of a chat: objects with a role.
pub fn read_messages(path: &str, value: &Json) -> Result<Vec<Value>> {
    let messages = items(path, value, "messages", |path, value| {
        let message = plain(path, value)?;
        match message.get("role") {
            Some(Value::String(_)) => Ok(message),
            Some(_) => Err(Error::invalid(format!("{path}.role"), "not a text such as \"user\"")),
            None => Err(Error::invalid(
                path,
                format!("{value} is not a message such as {{\"role\": \"user\", \"content\": \"Hello\"}}"),
            )),
        }
    })?;
    if messages.is_empty() {
        return Err(Error::invalid(path, "an empty list: send one message or more"));
    }
    Ok(messages)
}

fn read_id(value: &Json) -> Result<Value> {
    match value {
        Json::Text(_) | Json::Whole(_) => plain("id", value),
        _ => Err(Error::invalid("id", format!("{value} is neither a text nor a whole number"))),
    }
}

/// A text or a list of tokens.
pub fn read_prompt(path: &str, value: &Json) -> Result<Prompt> {
    match value {
        Json::Text(text) => Ok(text.as_str().into()),
        Json::List(list) if list.is_empty() => {
            Err(Error::invalid(path, "an empty list: a model continues at least one token"))
        }
        Json::List(_) => Ok(wholes::<u32>(path, value, "tokens")?.into()),
        _ => Err(Error::invalid(path, format!("{value} is neither a text nor a list of tokens"))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pagoda::engine::{BeamOptions, ContextEnd, EarlyStop, Grammar};
    use serde_json::json;

    use super::*;

    fn read(line: &str) -> Result<GenerateRequest> {
        parse(line, &GenerateRequest { top_k: Some(7), seed: Some(1), ..GenerateRequest::default() })
    }

    #[test]
    fn every_field_is_read() {
        let request = read(
            r#"{"id": "a", "prompt": [1, 2], "max_new_tokens": 8, "min_new_tokens": 2, "do_sample": true, "temperature": 1,
            "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5,
            "no_repeat_ngram_size": 3, "logit_bias": {"42": -5}, "forced_eos": 9, "ignore_eos": true, "stop": "\n",
            "stop_tokens": [3], "include_stop": true, "skip_special": false, "seed": 18446744073709551615, "logprobs": 2,
            "prompt_logprobs": 0, "n": 2, "echo": true, "session": "s", "priority": -1, "timeout": 1.5, "top_k": null,
            "context_end": "stop", "kv_policy": {"name": "lastrec", "chunk_size": 8, "protect": 4, "grace_period": 2,
            "keep_initial_fraction": 0.25, "normalise": true, "score_share": 1, "protect_first_message": true},
            "grammar": {"regex": "a"}, "max_draft": 5,
            "beams": {"width": 4, "length_penalty": 0, "early_stop": "never"}}"#,
        )
        .unwrap();
        assert_eq!(request.prompt, vec![1, 2].into());
        assert_eq!((request.max_new_tokens, request.min_new_tokens, request.do_sample), (Some(8), Some(2), Some(true)));
        assert_eq!((request.temperature, request.top_k, request.top_p), (Some(1.0), Some(7), Some(0.5)));
        assert_eq!((request.min_p, request.repetition_penalty), (Some(0.25), Some(1.5)));
        assert_eq!((request.presence_penalty, request.frequency_penalty), (-1.0, 0.5));
        assert_eq!((request.no_repeat_ngram_size, request.logit_bias), (Some(3), vec![(42, -5.0)]));
        assert_eq!((request.forced_eos, request.ignore_eos, request.stop), (Some(9), true, vec!["\n".to_owned()]));
        assert_eq!((request.stop_tokens, request.include_stop, request.skip_special), (vec![3], true, Some(false)));
        assert_eq!((request.seed, request.logprobs, request.prompt_logprobs), (Some(u64::MAX), Some(2), Some(0)));
        assert_eq!((request.n, request.echo, request.session.as_deref()), (Some(2), true, Some("s")));
        assert_eq!((request.priority, request.timeout), (-1, Some(Duration::from_millis(1500))));
        assert_eq!(request.max_draft, Some(5));
        assert_eq!((request.context_end, request.grammar), (ContextEnd::Stop, Some(Grammar::Regex("a".into()))));
        let beams = BeamOptions { width: 4, length_penalty: 0.0, early_stop: EarlyStop::Never };
        assert_eq!(request.beams, Some(beams));
        assert_eq!(read(r#"{"prompt": "a", "beams": 3}"#).unwrap().beams, Some(BeamOptions::new(3)));
        let policy = request.kv_policy.unwrap();
        assert_eq!((policy.name.as_str(), policy.cache_length, policy.chunk_size), ("lastrec", 0, 8));
        assert_eq!((policy.protect, policy.grace_period, policy.keep_initial_fraction), (Some(4), 2, 0.25));
        assert_eq!((policy.normalise, policy.score_share, policy.protect_first_message), (true, 1.0, true));
        let named = read(r#"{"prompt": "a", "kv_policy": "h2o"}"#).unwrap().kv_policy.unwrap();
        assert_eq!((named.name.as_str(), named.cache_length, named.chunk_size), ("h2o", 0, 64));
    }

    #[test]
    fn messages_are_a_chat() {
        let line = r#"{"messages": [{"role": "user", "content": "hi"}], "tools": [1], "variables": {"a": 1.5}}"#;
        let Prompt::Chat(chat) = read(line).unwrap().prompt else { panic!("no chat") };
        assert_eq!(chat.messages, [json!({"role": "user", "content": "hi"})]);
        assert_eq!((chat.tools, chat.add_generation_prompt), (Some(json!([1])), true));
        assert_eq!(chat.variables["a"], json!(1.5));
    }

    #[test]
    fn errors_name_the_place() {
        for (line, message) in [
            ("{", "request: not JSON: EOF while parsing an object at column 1"),
            ("[1]", "request: a list of 1 is not an object such as"),
            ("{}", "prompt: missing"),
            (r#"{"prompt": null}"#, "prompt: missing"),
            (r#"{"promt": "a"}"#, "promt: no such field; did you mean `prompt`?"),
            (r#"{"prompt": "a", "prompt": "b"}"#, "prompt: is there twice"),
            (r#"{"prompt": 7}"#, "prompt: 7 is neither a text nor a list of tokens"),
            (r#"{"prompt": [1, -1]}"#, "prompt[1]: -1 is not a whole number from 0 to 4294967295"),
            (r#"{"prompt": "a", "messages": [{"role": "user"}]}"#, "messages: given, and `prompt` too"),
            (r#"{"messages": "hi"}"#, "messages: \"hi\" is not a list of messages"),
            (r#"{"messages": []}"#, "messages: an empty list"),
            (r#"{"messages": [{"content": "hi"}]}"#, "messages[0]: an object is not a message such as"),
            (r#"{"messages": [{"role": 1}]}"#, "messages[0].role: not a text"),
            (r#"{"messages": [{"role": "a", "role": "b"}]}"#, "messages[0].role: is there twice"),
            (r#"{"prompt": "a", "tools": []}"#, "tools: given without `messages`"),
            (r#"{"prompt": "a", "temperature": "hot"}"#, "temperature: \"hot\" is not a number"),
            (r#"{"prompt": "a", "stop": [1]}"#, "stop[0]: 1 is not a text"),
            (r#"{"prompt": "a", "echo": 1}"#, "echo: 1 is neither true nor false"),
            (r#"{"prompt": "a", "logit_bias": {"x": 1}}"#, "logit_bias.x: the name is no token"),
            (r#"{"prompt": "a", "logit_bias": [[1]]}"#, "logit_bias[0]: a list of 1 is not a pair"),
            (r#"{"prompt": "a", "timeout": 0}"#, "timeout: 0 is not a number of seconds above 0"),
            (r#"{"prompt": "a", "context_end": "end"}"#, "context_end: \"end\" is neither"),
            (r#"{"prompt": "a", "kv_policy": 7}"#, "kv_policy: 7 is neither a name such as \"lastrec\" nor an object"),
            (r#"{"prompt": "a", "kv_policy": {}}"#, "kv_policy.name: missing"),
            (r#"{"prompt": "a", "kv_policy": {"name": 7}}"#, "kv_policy.name: 7 is not a text"),
            (
                r#"{"prompt": "a", "kv_policy": {"protct": 7}}"#,
                "kv_policy.protct: no such option; did you mean `protect`?",
            ),
            (r#"{"prompt": "a", "kv_policy": {"name": "a", "name": "b"}}"#, "kv_policy.name: is there twice"),
            (r#"{"prompt": "a", "beams": "4"}"#, "beams: \"4\" is neither a number of beams nor an object such as"),
            (r#"{"prompt": "a", "beams": {}}"#, "beams.width: missing"),
            (r#"{"prompt": "a", "beams": {"with": 4}}"#, "beams.with: no such option; did you mean `width`?"),
            (r#"{"prompt": "a", "beams": {"width": 4, "early_stop": 1}}"#, "beams.early_stop: 1 is neither true nor"),
            (r#"{"prompt": "a", "id": [1]}"#, "id: a list of 1 is neither a text nor a whole number"),
        ] {
            let error = read(line).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{line}\n{error}\n{message}");
        }
    }

    #[test]
    fn the_id_is_known_where_another_field_is_wrong() {
        assert_eq!(id(r#"{"id": "a", "prompt": 7}"#), Some(json!("a")));
        assert_eq!(id(r#"{"prompt": 7}"#), None);
        assert_eq!(id("{"), None);
    }
}
