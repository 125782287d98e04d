//! The objects of `/v1/chat/completions`.

use pagoda::GenerateResponse;
use pagoda::engine::{Event, FinishReason, Token};
use pagoda::text::Tokenizer;
use serde::Serialize;
use std::sync::Arc;

use super::answer::{Head, Usage, finish_reason};
use super::logprobs::ChatLogprobs;
use super::streams::Sent;
use super::tools::{CallReader, Piece, ToolCall};
use crate::events::{Lines, Protocol};
use crate::failure::Failure;
use crate::models::Served;

/// A whole answer.
#[derive(Serialize)]
pub struct ChatCompletion {
    #[serde(flatten)]
    head: Head,
    choices: Vec<ChatChoice>,
    usage: Usage,
}

#[derive(Serialize)]
struct ChatChoice {
    index: usize,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    /// `null` if the answer is calls alone.
    content: Option<String>,
    refusal: Option<()>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

impl Message {
    fn new(text: String, tools: Option<&CallReader>) -> Self {
        let mut message = Self { role: "assistant", content: Some(text), refusal: None, tool_calls: Vec::new() };
        let (Some(tools), Some(text)) = (tools, &message.content) else { return message };
        let mut said = String::new();
        for piece in tools.clone().push(text, true) {
            match piece {
                Piece::Text(text) => said.push_str(&text),
                Piece::Call(call) => message.tool_calls.push(call),
                Piece::Arguments(more) => message.tool_calls.last_mut().expect("they follow a call").push(&more),
            }
        }
        message.content = Some(said).filter(|said| !said.is_empty() || message.tool_calls.is_empty());
        message
    }
}

/// The word for the end of an answer with calls.
const TOOL_CALLS: &str = "tool_calls";

fn reason(reason: FinishReason, has_calls: bool) -> &'static str {
    if has_calls && reason == FinishReason::Stop { TOOL_CALLS } else { finish_reason(reason) }
}

impl ChatCompletion {
    /// Of a response.
    pub fn new(
        served: &Served,
        response: GenerateResponse,
        logprobs: bool,
        tokenizer: &Tokenizer,
        tools: Option<&CallReader>,
    ) -> Self {
        let mut usage = Usage::default();
        usage.add(&response);
        let choices = response.choices.into_iter().enumerate().map(|(index, choice)| {
            let logprobs =
                logprobs.then(|| ChatLogprobs::new(choice.tokens.iter().copied().zip(&choice.logprobs), tokenizer));
            let message = Message::new(choice.text, tools);
            let finish_reason = reason(choice.finish_reason, !message.tool_calls.is_empty());
            ChatChoice { index, message, logprobs, finish_reason }
        });
        Self { head: Head::new("chatcmpl", "chat.completion", served), choices: choices.collect(), usage }
    }
}

/// A part of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: &'a [ChunkChoice<'a>],
    /// `null` before the last one, if it has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[NumberedCall<'a>; 1]>,
}

/// A call in a stream.
#[derive(Serialize)]
struct NumberedCall<'a> {
    index: usize,
    #[serde(flatten)]
    part: CallPart<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum CallPart<'a> {
    /// A whole call, or the beginning of one.
    Call(&'a ToolCall),
    /// More arguments of the last one.
    More { function: MoreArguments<'a> },
}

#[derive(Serialize)]
struct MoreArguments<'a> {
    arguments: &'a str,
}

impl<'a> NumberedCall<'a> {
    fn delta(number: usize, part: CallPart<'a>) -> Delta<'a> {
        Delta { tool_calls: Some([Self { index: number, part }]), ..Delta::default() }
    }
}

/// A stream of chunks.
pub struct ChatStream {
    head: Head,
    n: usize,
    sent: Sent,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
    /// What finds calls in each answer, and how many it has; none if the request has no tools.
    tools: Vec<(CallReader, usize)>,
}

impl ChatStream {
    /// Of `n` answers.
    pub fn new(
        served: &Served,
        n: usize,
        include_usage: bool,
        tokenizer: Arc<Tokenizer>,
        tools: Option<CallReader>,
    ) -> Self {
        let head = Head::new("chatcmpl", "chat.completion.chunk", served);
        let tools = tools.map_or_else(Vec::new, |tools| vec![(tools, 0); n]);
        Self { head, n, sent: Sent::new(n, &[0]), include_usage, tokenizer, tools }
    }

    /// Sends new text of an answer, or the calls that it is, and its end.
    fn text(
        &mut self,
        index: usize,
        text: &str,
        mut logprobs: Option<ChatLogprobs>,
        end: Option<FinishReason>,
        lines: &mut Lines,
    ) {
        let Some((tools, count)) = self.tools.get_mut(index) else {
            let delta =
                Delta { content: Some(text).filter(|text| !text.is_empty() || end.is_none()), ..Delta::default() };
            let finish_reason = end.map(finish_reason);
            return self.chunk(ChunkChoice { index, delta, logprobs, finish_reason }, lines);
        };
        let pieces = tools.push(text, end.is_some());
        let has_calls = tools.has_calls();
        let mut calls = *count;
        *count += pieces.iter().filter(|piece| matches!(piece, Piece::Call(_))).count();
        for piece in &pieces {
            let delta = match piece {
                Piece::Text(text) => Delta { content: Some(text), ..Delta::default() },
                Piece::Call(call) => {
                    calls += 1;
                    NumberedCall::delta(calls - 1, CallPart::Call(call))
                }
                Piece::Arguments(arguments) => {
                    NumberedCall::delta(calls - 1, CallPart::More { function: MoreArguments { arguments } })
                }
            };
            let logprobs = logprobs.take();
            self.chunk(ChunkChoice { index, delta, logprobs, finish_reason: None }, lines);
        }
        // Text that is held back has its probabilities, and the end its reason.
        if logprobs.is_some() || end.is_some() {
            let finish_reason = end.map(|end| reason(end, has_calls));
            self.chunk(ChunkChoice { index, delta: Delta::default(), logprobs, finish_reason }, lines);
        }
    }

    fn chunk(&self, choice: ChunkChoice, lines: &mut Lines) {
        lines.json(&Chunk { head: &self.head, choices: &[choice], usage: self.include_usage.then_some(None) });
    }

    fn token(&mut self, prompt: usize, token: &Token, lines: &mut Lines) {
        let index = self.sent.token(prompt, token);
        if token.text.is_empty() && token.logprobs.is_none() && token.finish_reason.is_none() {
            return;
        }
        let logprobs = token.logprobs.as_ref();
        let logprobs = logprobs.map(|found| ChatLogprobs::new([(token.id, found)].into_iter(), &self.tokenizer));
        self.text(index, &token.text, logprobs, token.finish_reason, lines);
    }
}

impl Protocol for ChatStream {
    fn begin(&mut self, lines: &mut Lines) {
        for index in 0..self.n {
            let delta = Delta { role: Some("assistant"), content: Some(""), ..Delta::default() };
            self.chunk(ChunkChoice { index, delta, logprobs: None, finish_reason: None }, lines);
        }
    }

    fn event(&mut self, prompt: usize, event: Event, lines: &mut Lines) {
        match event {
            Event::Token(token) => self.token(prompt, &token, lines),
            Event::End(Ok(response)) => {
                for rest in self.sent.rest(prompt, &response) {
                    self.text(rest.index, rest.text, None, Some(rest.finish_reason), lines);
                }
            }
            Event::End(Err(error)) => lines.json(&Failure::from(error).object()),
        }
    }

    fn end(&mut self, lines: &mut Lines) {
        if self.include_usage {
            lines.json(&Chunk { head: &self.head, choices: &[], usage: Some(Some(self.sent.usage)) });
        }
        lines.done();
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::tools::FoundCalls;
    use super::*;

    #[test]
    fn calls_are_objects_beside_the_text() {
        let tools = CallReader::Found(FoundCalls::new(&json!([{"type": "function", "function": {"name": "add"}}])));
        let of = |text: &str| serde_json::to_value(Message::new(text.to_owned(), Some(&tools))).unwrap();
        let call = r#"<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>"#;
        let said = of(call);
        assert_eq!((&said["role"], &said["content"]), (&json!("assistant"), &Value::Null));
        let first = &said["tool_calls"][0];
        assert_eq!((&first["type"], &first["function"]["name"]), (&json!("function"), &json!("add")));
        assert_eq!(first["function"]["arguments"], json!(r#"{"a":1}"#));
        assert!(first["id"].as_str().unwrap().starts_with("call_"));
        assert_eq!(of(&format!("So: {call}"))["content"], json!("So: "));
        let plain = of("Hello");
        assert_eq!((&plain["content"], plain.get("tool_calls")), (&json!("Hello"), None));
        let without = Message::new(call.to_owned(), None);
        assert_eq!((without.content.as_deref(), without.tool_calls.len()), (Some(call), 0));
        assert_eq!((reason(FinishReason::Stop, true), reason(FinishReason::Length, true)), ("tool_calls", "length"));
    }
}
