//! The objects of `/v1/completions`.

use std::sync::Arc;

use pagoda::GenerateResponse;
use pagoda::engine::{Choice, Event, Token};
use pagoda::text::Tokenizer;
use serde::Serialize;

use super::answer::{Head, Usage, finish_reason};
use super::logprobs::CompletionLogprobs;
use super::streams::Sent;
use crate::events::{Lines, Protocol};
use crate::failure::Failure;
use crate::models::Served;

const OBJECT: &str = "text_completion";

/// A whole answer.
#[derive(Serialize)]
pub struct Completion {
    #[serde(flatten)]
    head: Head,
    choices: Vec<CompletionChoice<'static>>,
    usage: Usage,
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: usize,
    text: std::borrow::Cow<'a, str>,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl Completion {
    /// Of the responses to all prompts, in their order. `echo`: log probabilities have those of the prompt, too.
    pub fn new(
        served: &Served,
        responses: Vec<GenerateResponse>,
        logprobs: bool,
        echo: bool,
        tokenizer: &Tokenizer,
    ) -> Self {
        let mut usage = Usage::default();
        let mut choices = Vec::new();
        for mut response in responses {
            usage.add(&response);
            for choice in std::mem::take(&mut response.choices) {
                choices.push(CompletionChoice {
                    index: choices.len(),
                    logprobs: logprobs.then(|| all_logprobs(&response, &choice, echo, tokenizer)),
                    text: choice.text.into(),
                    finish_reason: Some(finish_reason(choice.finish_reason)),
                });
            }
        }
        Self { head: Head::new("cmpl", OBJECT, served), choices, usage }
    }
}

fn all_logprobs(response: &GenerateResponse, choice: &Choice, echo: bool, tokenizer: &Tokenizer) -> CompletionLogprobs {
    let mut all = CompletionLogprobs::default();
    let mut offset = 0;
    if echo {
        for (&token, found) in response.prompt_tokens.iter().zip(&response.prompt_logprobs) {
            offset = all.push(token, found.as_ref(), offset, tokenizer);
        }
    }
    for (&token, found) in choice.tokens.iter().zip(&choice.logprobs) {
        offset = all.push(token, Some(found), offset, tokenizer);
    }
    all
}

/// A part of a stream.
#[derive(Serialize)]
struct Chunk<'a> {
    #[serde(flatten)]
    head: &'a Head,
    choices: &'a [CompletionChoice<'a>],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

/// A stream of chunks.
pub struct CompletionStream {
    head: Head,
    n: usize,
    /// The texts that answers begin with, of each prompt.
    echoed: Vec<String>,
    /// The offset of the next token of each answer, in characters.
    offsets: Vec<usize>,
    sent: Sent,
    include_usage: bool,
    tokenizer: Arc<Tokenizer>,
}

impl CompletionStream {
    /// Of `n` answers to each prompt, which begin with `echoed`.
    pub fn new(served: &Served, n: usize, echoed: Vec<String>, include_usage: bool, tokenizer: Arc<Tokenizer>) -> Self {
        let lengths: Vec<usize> = echoed.iter().map(String::len).collect();
        let offsets = echoed.iter().flat_map(|text| std::iter::repeat_n(text.chars().count(), n)).collect();
        let head = Head::new("cmpl", OBJECT, served);
        Self { head, n, sent: Sent::new(n, &lengths), echoed, offsets, include_usage, tokenizer }
    }

    fn chunk(&self, choice: CompletionChoice, lines: &mut Lines) {
        lines.json(&Chunk { head: &self.head, choices: &[choice], usage: self.include_usage.then_some(None) });
    }

    fn token(&mut self, prompt: usize, token: &Token, lines: &mut Lines) {
        let index = self.sent.token(prompt, token);
        let logprobs = token.logprobs.as_ref().map(|found| {
            let mut logprobs = CompletionLogprobs::default();
            self.offsets[index] = logprobs.push(token.id, Some(found), self.offsets[index], &self.tokenizer);
            logprobs
        });
        if token.text.is_empty() && logprobs.is_none() && token.finish_reason.is_none() {
            return;
        }
        let finish_reason = token.finish_reason.map(finish_reason);
        self.chunk(CompletionChoice { index, text: token.text.as_str().into(), logprobs, finish_reason }, lines);
    }
}

impl Protocol for CompletionStream {
    fn begin(&mut self, lines: &mut Lines) {
        for (prompt, text) in self.echoed.iter().enumerate().filter(|(_, text)| !text.is_empty()) {
            for index in prompt * self.n..(prompt + 1) * self.n {
                let text = text.as_str().into();
                self.chunk(CompletionChoice { index, text, logprobs: None, finish_reason: None }, lines);
            }
        }
    }

    fn event(&mut self, prompt: usize, event: Event, lines: &mut Lines) {
        match event {
            Event::Token(token) => self.token(prompt, &token, lines),
            Event::End(Ok(response)) => {
                for rest in self.sent.rest(prompt, &response) {
                    let finish_reason = Some(finish_reason(rest.finish_reason));
                    let text = rest.text.into();
                    self.chunk(CompletionChoice { index: rest.index, text, logprobs: None, finish_reason }, lines);
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
