//! Tools: the calls that a model writes, and grammars that make it write them.

mod form;
mod found;
mod grammar;
mod known;
mod request;

pub use form::Form;
pub use request::{ToolChoice, ToolRequest};

use serde::Serialize;

use crate::unique::unique;
pub use found::FoundCalls;
use known::KnownCalls;

/// A call, as OpenAI has it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ToolCall {
    id: String,
    r#type: &'static str,
    function: Function,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Function {
    name: String,
    /// An object, as a text.
    arguments: String,
}

impl ToolCall {
    fn new(function: Function) -> Self {
        Self { id: format!("call_{}", unique()), r#type: "function", function }
    }

    /// Takes more of the arguments.
    pub fn push(&mut self, arguments: &str) {
        self.function.arguments.push_str(arguments);
    }
}

/// A part of an answer.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// Text.
    Text(String),
    /// A call.
    Call(ToolCall),
    /// More arguments of the last call.
    Arguments(String),
}

/// Reads an answer as it comes.
#[derive(Clone, Debug)]
pub enum CallReader {
    /// The model may have written anything.
    Found(FoundCalls),
    /// A grammar has made it write calls in one form.
    Known(KnownCalls),
}

impl CallReader {
    /// Whether there was a call.
    pub fn has_calls(&self) -> bool {
        match self {
            Self::Found(reader) => reader.has_calls(),
            Self::Known(reader) => reader.has_calls(),
        }
    }

    /// Takes new text. `is_end`: it is the last.
    pub fn push(&mut self, text: &str, is_end: bool) -> Vec<Piece> {
        match self {
            Self::Found(reader) => reader.push(text, is_end),
            Self::Known(reader) => reader.push(text, is_end),
        }
    }
}

/// Adds text to the last piece, if that is text.
fn push_text(pieces: &mut Vec<Piece>, text: String) {
    match pieces.last_mut() {
        Some(Piece::Text(before)) => before.push_str(&text),
        _ => pieces.push(Piece::Text(text)),
    }
}

/// The bytes at the end of a text that a mark may begin with.
fn may_become(text: &str, marks: &[&str]) -> usize {
    let longest = marks.iter().map(|mark| mark.len() - 1).max().unwrap_or(0).min(text.len());
    let begins = |&length: &usize| {
        let at = text.len() - length;
        text.is_char_boundary(at) && marks.iter().any(|mark| mark.len() > length && mark.starts_with(&text[at..]))
    };
    (1..=longest).rev().find(begins).unwrap_or(0)
}
