//! Streams of the old names: the new text of each token, then `[DONE]`.

use pagoda::engine::Event;
use serde::Serialize;

use crate::events::{Lines, Protocol};
use crate::failure::Failure;

/// The text of a chat's answer.
#[derive(Serialize)]
pub struct ChatText {
    role: &'static str,
    text: String,
}

impl ChatText {
    /// Of the model.
    pub fn new(text: String) -> Self {
        Self { role: "assistant", text }
    }
}

#[derive(Serialize)]
struct Part<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    text: &'a str,
    /// Which answer it belongs to, if there are several.
    #[serde(skip_serializing_if = "is_first")]
    index: u32,
}

fn is_first(index: &u32) -> bool {
    *index == 0
}

/// A stream.
pub struct OldStream {
    request_id: Option<String>,
    role: Option<&'static str>,
}

impl OldStream {
    /// Of `/completion`.
    pub fn completion(request_id: String) -> Self {
        Self { request_id: Some(request_id), role: None }
    }

    /// Of `/chat`.
    pub fn chat() -> Self {
        Self { request_id: None, role: Some("assistant") }
    }
}

impl Protocol for OldStream {
    fn event(&mut self, _: usize, event: Event, lines: &mut Lines) {
        match event {
            Event::Token(token) if !token.text.is_empty() => {
                let request_id = self.request_id.as_deref();
                lines.json(&Part { request_id, role: self.role, text: &token.text, index: token.choice });
            }
            Event::Token(_) | Event::End(Ok(_)) => {}
            Event::End(Err(error)) => lines.json(&Failure::from(error).object()),
        }
    }

    fn end(&mut self, lines: &mut Lines) {
        lines.done();
    }
}
