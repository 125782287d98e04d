//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use pagoda::engine::Chat;
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Result};
use pagoda_requests::fields::{flag, items, object, plain, whole};
use pagoda_requests::generate::read_messages;
use serde_json::Value;

use super::chat_objects::{ChatCompletion, ChatStream};
use super::common::{self, Common};
use super::messages::normalise;
use super::tools::{ToolChoice, ToolRequest};
use crate::failure::Failure;
use crate::gate::caller_of;
use crate::run::Running;
use crate::state::State;
use crate::{body, events, heavy, reply};

const NAMES: [&str; 9] = [
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
];

/// Answers a request.
pub async fn chat_completions(Shared(state): Shared<Arc<State>>, request: Request) -> Result<Response, Failure> {
    let caller = caller_of(&request);
    let text = body::read_text(request, &state.limits).await?;
    let Asked { common: mut asked, tools } = heavy::work(text.len(), || read(&text))?;
    state.models.wait(&asked.model).await;
    let (served, generator) = state.models.generator(&asked.model)?;
    let (n, logprobs) = (asked.answering.n.unwrap_or(1), asked.answering.logprobs.is_some());
    let tokenizer = generator.tokenizer();
    let calls = tools.prepare(&mut asked.answering, served.tool_form, tokenizer)?;
    let running = Running::start(&generator, vec![asked.answering], &state.running, state.tally(&served, caller))
        .map_err(|error| tools.explain(calls.as_ref(), error))?;
    if asked.stream {
        let stream = ChatStream::new(&served, n as usize, asked.include_usage, Arc::clone(tokenizer), calls);
        return Ok(events::response(running, stream));
    }
    let response = running.responses().await?.pop().unwrap_or_default();
    Ok(reply::json(StatusCode::OK, &ChatCompletion::new(&served, response, logprobs, tokenizer, calls.as_ref())))
}

/// A request.
struct Asked {
    common: Common,
    tools: ToolRequest,
}

fn read(body: &str) -> Result<Asked> {
    let members = object(body, r#"{"model": "…", "messages": [{"role": "user", "content": "Hello"}]}"#)?;
    let mut chat = Chat { add_generation_prompt: true, ..Chat::default() };
    let (mut most, mut most_completion) = (None, None);
    let (mut wants_logprobs, mut top) = (false, None);
    let mut tools = ToolRequest::default();
    let mut asked = common::read(&members, &NAMES, |name, value| {
        match name {
            "messages" => chat.messages = read_messages(name, value)?,
            "max_tokens" => most = Some(whole(name, value)?),
            "max_completion_tokens" => most_completion = Some(whole(name, value)?),
            "logprobs" => wants_logprobs = flag(name, value)?,
            "top_logprobs" => top = Some(whole(name, value)?),
            "tools" => chat.tools = Some(read_tools(value)?),
            "tool_choice" => tools.choice = ToolChoice::read(value)?,
            "add_generation_prompt" => chat.add_generation_prompt = flag(name, value)?,
            "chat_template_kwargs" => match plain(name, value)? {
                Value::Object(variables) => chat.variables = variables,
                _ => return Err(Error::invalid(name, format!("{value} is not an object"))),
            },
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    if chat.messages.is_empty() {
        return Err(Error::invalid("messages", "missing: send one message or more"));
    }
    if top.is_some() && !wants_logprobs {
        return Err(Error::invalid("top_logprobs", "given without `logprobs`: set it to true"));
    }
    normalise(&mut chat.messages)?;
    if tools.choice == ToolChoice::None {
        chat.tools = None;
    }
    tools.tools = chat.tools.clone();
    let given = |name: &str| members.iter().find(|(given, value)| given == name && *value != Json::Null);
    tools.has_grammar = given("grammar").is_some();
    if let Some((name, value)) = given("parallel_tool_calls") {
        tools.one_call = !flag(name, value)?;
    }
    let answering = std::mem::take(&mut asked.answering);
    asked.answering = GenerateRequest {
        prompt: chat.into(),
        max_new_tokens: most_completion.or(most),
        logprobs: wants_logprobs.then_some(top.unwrap_or(0)),
        ..answering
    };
    Ok(Asked { common: asked, tools })
}

fn read_tools(value: &Json) -> Result<Value> {
    let tools = items("tools", value, "tools", |path, tool| match plain(path, tool)? {
        tool @ Value::Object(_) => Ok(tool),
        _ => Err(Error::invalid(path, format!("{tool} is not a tool: expected an object"))),
    })?;
    Ok(Value::Array(tools))
}

#[cfg(test)]
mod tests {
    use pagoda::engine::Prompt;
    use serde_json::json;

    use super::*;

    #[test]
    fn every_field_is_read() {
        let asked = read(
            r#"{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": true,
            "stream_options": {"include_usage": true}, "max_tokens": 5, "max_completion_tokens": 7, "temperature": 0.5,
            "top_p": 0.9, "n": 2, "stop": ["a", "b"], "seed": -1, "presence_penalty": 1, "frequency_penalty": -1,
            "logit_bias": {"42": -100}, "logprobs": true, "top_logprobs": 3, "tools": [{"type": "function"}],
            "tool_choice": "auto", "response_format": {"type": "text"}, "user": "ada", "metadata": {}, "session": "s",
            "top_k": 4, "chat_template_kwargs": {"thinking": false}, "store": null}"#,
        )
        .unwrap()
        .common;
        assert_eq!((asked.model.as_str(), asked.stream, asked.include_usage), ("m", true, true));
        let request = asked.answering;
        let Prompt::Chat(chat) = &request.prompt else { panic!("no chat") };
        assert_eq!(chat.messages, [json!({"role": "user", "content": "hi"})]);
        assert_eq!((&chat.tools, chat.add_generation_prompt), (&Some(json!([{"type": "function"}])), true));
        assert_eq!(chat.variables["thinking"], json!(false));
        assert_eq!((request.max_new_tokens, request.n, request.seed), (Some(7), Some(2), Some(u64::MAX)));
        assert_eq!((request.temperature, request.top_p, request.top_k), (Some(0.5), Some(0.9), Some(4)));
        assert_eq!((request.presence_penalty, request.frequency_penalty), (1.0, -1.0));
        assert_eq!((request.logit_bias, request.logprobs), (vec![(42, -100.0)], Some(3)));
        assert_eq!((request.stop, request.session.as_deref()), (vec!["a".into(), "b".into()], Some("s")));
    }

    #[test]
    fn tools_can_be_left_out() {
        let body = r#"{"model": "m", "messages": [{"role": "user"}], "tools": [{}], "tool_choice": "none"}"#;
        let Prompt::Chat(chat) = read(body).unwrap().common.answering.prompt else { panic!("no chat") };
        assert_eq!(chat.tools, None);
    }

    #[test]
    fn errors_name_the_field() {
        const MESSAGES: &str = r#""model": "m", "messages": [{"role": "user", "content": "hi"}]"#;
        for (body, message) in [
            ("{".to_owned(), "request: not JSON: EOF"),
            ("[]".to_owned(), "request: a list of 0 is not an object such as"),
            (r#"{"model": "m"}"#.to_owned(), "messages: missing"),
            (r#"{"messages": [{"role": "user"}]}"#.to_owned(), "model: missing: GET /v1/models"),
            (format!(r#"{{{MESSAGES}, "temprature": 1}}"#), "temprature: no such field; did you mean `temperature`?"),
            (format!(r#"{{{MESSAGES}, "xyzzy": 1}}"#), "xyzzy: no such field"),
            (format!(r#"{{{MESSAGES}, "model": "m"}}"#), "model: is there twice"),
            (format!(r#"{{{MESSAGES}, "top_logprobs": 1}}"#), "top_logprobs: given without `logprobs`"),
            (format!(r#"{{{MESSAGES}, "tools": [1]}}"#), "tools[0]: 1 is not a tool"),
            (format!(r#"{{{MESSAGES}, "tool_choice": "any"}}"#), "tool_choice: \"any\" is no choice"),
            (format!(r#"{{{MESSAGES}, "parallel_tool_calls": 1}}"#), "parallel_tool_calls: 1 is neither true"),
            (
                format!(r#"{{{MESSAGES}, "response_format": {{"type": "json_schema"}}}}"#),
                "response_format.json_schema: null is not an object with a name and a schema",
            ),
            (
                format!(
                    r#"{{{MESSAGES}, "response_format": {{"type": "json_schema", "json_schema": {{"name": "a"}}}}}}"#
                ),
                "response_format.json_schema.schema: missing",
            ),
            (
                format!(r#"{{{MESSAGES}, "response_format": {{"type": "xml"}}}}"#),
                "response_format.type: \"xml\" is neither",
            ),
            (format!(r#"{{{MESSAGES}, "stream_options": {{"a": 1}}}}"#), "stream_options.a: no such field"),
            (format!(r#"{{{MESSAGES}, "max_tokens": -1}}"#), "max_tokens: -1 is not a whole number"),
        ] {
            let error = read(&body).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{body}\n{error}");
        }
    }
}
