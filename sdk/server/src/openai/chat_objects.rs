//! The objects of `/v1/chat/completions`.

use pagoda::GenerateResponse;
use pagoda::engine::{Event, Token};
use pagoda::text::Tokenizer;
use serde::Serialize;
use std::sync::Arc;

use super::answer::{Head, Usage, finish_reason};
use super::logprobs::ChatLogprobs;
use super::streams::Sent;
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
    content: String,
    refusal: Option<()>,
}

impl ChatCompletion {
    /// Of a response.
    pub fn new(served: &Served, response: GenerateResponse, logprobs: bool, tokenizer: &Tokenizer) -> Self {
        let mut usage = Usage::default();
        usage.add(&response);
        let choices = response.choices.into_iter().enumerate().map(|(index, choice)| ChatChoice {
            index,
            logprobs: logprobs
                .then(|| ChatLogprobs::new(choice.tokens.iter().copied().zip(&choice.logprobs), tokenizer)),
            message: Message { role: "assistant", content: choice.text, refusal: None },
            finish_reason: finish_reason(choice.finish_reason),
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
}

/// A stream of chunks.
pub struct ChatStream {
    head: Head,
    n: usize,
    sent: Sent,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
}

impl ChatStream {
    /// Of `n` answers.
    pub fn new(served: &Served, n: usize, include_usage: bool, tokenizer: Arc<Tokenizer>) -> Self {
        let head = Head::new("chatcmpl", "chat.completion.chunk", served);
        Self { head, n, sent: Sent::new(n, &[0]), include_usage, tokenizer }
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
        let choice = ChunkChoice {
            index,
            delta: Delta { role: None, content: Some(token.text.as_str()) },
            logprobs: logprobs.map(|found| ChatLogprobs::new([(token.id, found)].into_iter(), &self.tokenizer)),
            finish_reason: token.finish_reason.map(finish_reason),
        };
        self.chunk(choice, lines);
    }
}

impl Protocol for ChatStream {
    fn begin(&mut self, lines: &mut Lines) {
        for index in 0..self.n {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            self.chunk(ChunkChoice { index, delta, logprobs: None, finish_reason: None }, lines);
        }
    }

    fn event(&mut self, prompt: usize, event: Event, lines: &mut Lines) {
        match event {
            Event::Token(token) => self.token(prompt, &token, lines),
            Event::End(Ok(response)) => {
                for rest in self.sent.rest(prompt, &response) {
                    let delta = Delta { role: None, content: Some(rest.text).filter(|text| !text.is_empty()) };
                    let finish_reason = Some(finish_reason(rest.finish_reason));
                    self.chunk(ChunkChoice { index: rest.index, delta, logprobs: None, finish_reason }, lines);
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
