//! Calls of tools in what a model says: the forms of Hermes and Qwen, of Llama 3, and of Mistral. What is not a whole call of a
//! tool that the request has stays text.

use serde_json::Value;

use super::form::{CLOSE, LLAMA, MISTRAL, OPEN};
use super::{Function, Piece, ToolCall, may_become, push_text};

/// Reads an answer as it comes. Text that may become a call is held back until it is known what it is.
#[derive(Clone, Debug)]
pub struct FoundCalls {
    /// The names of the tools.
    names: Vec<String>,
    held: String,
    /// Whether something was said that is no call.
    has_text: bool,
    has_calls: bool,
}

impl FoundCalls {
    /// For the tools of a request.
    pub fn new(tools: &Value) -> Self {
        let name = |tool: &Value| tool.get("function").unwrap_or(tool).get("name")?.as_str().map(str::to_owned);
        let names = tools.as_array().into_iter().flatten().filter_map(name).collect();
        Self { names, held: String::new(), has_text: false, has_calls: false }
    }

    /// Whether there was a call.
    pub fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// Takes new text. `is_end`: it is the last.
    pub fn push(&mut self, text: &str, is_end: bool) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(is_end, &mut pieces) {}
        pieces
    }

    /// Finds the next piece. Returns whether there may be another one.
    fn step(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> bool {
        let begun = self.held.trim_start();
        if begun.is_empty() && !self.has_text {
            if is_end && !self.has_calls {
                self.text(self.held.len(), pieces);
            }
            return false;
        }
        let is_whole_answer = !self.has_text
            && !self.has_calls
            && (begun.starts_with(['{', '[']) || begun.starts_with(LLAMA) || (!is_end && LLAMA.starts_with(begun)));
        if is_whole_answer {
            if is_end {
                self.rest(pieces);
            }
            return false;
        }
        if let Some(at) = self.held.find(MISTRAL) {
            self.before(at, pieces);
            if is_end {
                self.rest(pieces);
            }
            return false;
        }
        let Some(at) = self.held.find(OPEN) else {
            let keep = if is_end { 0 } else { may_become(&self.held, &[OPEN, MISTRAL]) };
            let end = self.held.len() - keep;
            // White space before a call is no text.
            if self.has_text || is_end || !self.held[..end].trim().is_empty() {
                self.text(end, pieces);
            }
            return false;
        };
        self.before(at, pieces);
        let (inner, after) = match self.held[OPEN.len()..].split_once(CLOSE) {
            Some((inner, after)) => (inner, after),
            // A stop string may have taken the end.
            None if is_end => (&self.held[OPEN.len()..], ""),
            None => return false,
        };
        let (call, end) = (self.calls(inner), self.held.len() - after.len());
        match call {
            Some(calls) if calls.len() == 1 => {
                self.held.drain(..end);
                self.add(calls, pieces);
            }
            _ => self.text(end, pieces),
        }
        !self.held.is_empty()
    }

    /// Text of so many bytes.
    fn text(&mut self, bytes: usize, pieces: &mut Vec<Piece>) {
        let text: String = self.held.drain(..bytes).collect();
        if text.is_empty() {
            return;
        }
        self.has_text = true;
        push_text(pieces, text);
    }

    /// Text before a call: white space alone is none.
    fn before(&mut self, bytes: usize, pieces: &mut Vec<Piece>) {
        if self.held[..bytes].trim().is_empty() {
            self.held.drain(..bytes);
        } else {
            self.text(bytes, pieces);
        }
    }

    /// All that is held is calls, or text.
    fn rest(&mut self, pieces: &mut Vec<Piece>) {
        let trimmed = self.held.trim();
        let calls = match trimmed.strip_prefix(MISTRAL) {
            Some(rest) => self.mistral(rest),
            None => self.calls(trimmed.strip_prefix(LLAMA).unwrap_or(trimmed)),
        };
        match calls {
            Some(calls) => {
                self.held.clear();
                self.add(calls, pieces);
            }
            None => self.text(self.held.len(), pieces),
        }
    }

    fn add(&mut self, calls: Vec<Function>, pieces: &mut Vec<Piece>) {
        self.has_calls = true;
        pieces.extend(calls.into_iter().map(|function| Piece::Call(ToolCall::new(function))));
    }

    /// `[{…}, {…}]`, or `NAME{…}` after each mark.
    fn mistral(&self, text: &str) -> Option<Vec<Function>> {
        if text.trim_start().starts_with(['[', '{']) {
            return self.calls(text);
        }
        let one = |part: &str| {
            let (name, arguments) = part.split_at(part.find('{')?);
            let name = name.split(['[', ' ']).next()?.trim();
            self.function(name, &serde_json::from_str(arguments.trim()).ok()?)
        };
        text.split(MISTRAL).map(one).collect()
    }

    /// Objects with semicolons or nothing between them, or a list of them.
    fn calls(&self, text: &str) -> Option<Vec<Function>> {
        let mut values = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
            match stream.next()?.ok()? {
                Value::Array(list) => values.extend(list),
                one => values.push(one),
            }
            rest = rest[stream.byte_offset()..].trim_start();
            rest = rest.strip_prefix(';').unwrap_or(rest).trim_start();
        }
        let one = |value: &Value| {
            let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
            self.function(value.get("name")?.as_str()?, arguments)
        };
        let calls: Option<Vec<Function>> = values.iter().map(one).collect();
        calls.filter(|calls| !calls.is_empty())
    }

    fn function(&self, name: &str, arguments: &Value) -> Option<Function> {
        // Some models write the object as a text.
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str(text).ok());
        let arguments = parsed.as_ref().unwrap_or(arguments);
        let is_call = arguments.is_object() && self.names.iter().any(|known| known == name);
        is_call.then(|| Function { name: name.to_owned(), arguments: arguments.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn reader() -> FoundCalls {
        FoundCalls::new(&json!([{"type": "function", "function": {"name": "add"}}, {"name": "now"}]))
    }

    /// The text, and the calls as `name(arguments)`, whole and in pieces of every size.
    fn read(text: &str) -> (String, Vec<String>) {
        let of = |size: usize| {
            let (mut reader, mut said, mut calls) = (reader(), String::new(), Vec::new());
            let characters: Vec<char> = text.chars().collect();
            let mut take = |pieces: Vec<Piece>| {
                for piece in pieces {
                    match piece {
                        Piece::Text(text) => said.push_str(&text),
                        Piece::Call(call) => calls.push(format!("{}({})", call.function.name, call.function.arguments)),
                        Piece::Arguments(_) => panic!("a call came in parts"),
                    }
                }
            };
            characters.chunks(size).for_each(|chunk| take(reader.push(&chunk.iter().collect::<String>(), false)));
            take(reader.push("", true));
            assert_eq!(reader.has_calls(), !calls.is_empty());
            (said, calls)
        };
        let whole = of(text.chars().count().max(1));
        (1..6).for_each(|size| assert_eq!(of(size), whole, "{text} in pieces of {size}"));
        whole
    }

    #[test]
    fn calls_are_found_in_every_form() {
        let add = || vec![r#"add({"a":1})"#.to_owned()];
        let both = || vec![r#"add({"a":1})"#.to_owned(), "now({})".to_owned()];
        for (text, said, calls) in [
            ("<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>", "", add()),
            ("\n<tool_call>{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>\n", "", add()),
            ("Let me see.<tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1}}</tool_call>", "Let me see.", add()),
            ("<tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1}}", "", add()),
            (
                "<tool_call>{\"name\":\"add\",\"arguments\":{\"a\":1}}</tool_call>\n<tool_call>{\"name\":\"now\",\"arguments\":{}}</tool_call>",
                "",
                both(),
            ),
            ("{\"name\": \"add\", \"parameters\": {\"a\": 1}}", "", add()),
            (
                "<|python_tag|>{\"name\":\"add\",\"parameters\":{\"a\":1}}; {\"name\":\"now\",\"parameters\":{}}",
                "",
                both(),
            ),
            (
                "[TOOL_CALLS][{\"name\":\"add\",\"arguments\":{\"a\":1}},{\"name\":\"now\",\"arguments\":{}}]",
                "",
                both(),
            ),
            ("[TOOL_CALLS]add[ARGS]{\"a\":1}[TOOL_CALLS]now{}", "", both()),
            ("[{\"name\":\"add\",\"arguments\":{\"a\":1}}]", "", add()),
        ] {
            assert_eq!(read(text), (said.to_owned(), calls), "{text}");
        }
    }

    #[test]
    fn what_is_no_call_stays_text() {
        for text in [
            "",
            " ",
            "2 < 3 and a[T] is <tool, so",
            "<tool_call>",
            "<tool_call>{\"name\":\"add\"}</tool_call> and more",
            "<tool_call>{\"name\":\"other\",\"arguments\":{}}</tool_call>",
            "<tool_call>{\"name\":\"add\",\"arguments\":[1]}</tool_call>",
            "{\"name\": \"add\"",
            "{\"a\": 1}",
            "[1, 2]",
            "[]",
            "[TOOL_CALLS]other{}",
            "[TOOL_CALLS] no call",
            "<|python_tag|>print(1)",
            "é<tool_calé",
        ] {
            assert_eq!(read(text), (text.to_owned(), Vec::new()), "{text}");
        }
    }

    #[test]
    fn text_is_not_held_back_longer_than_needed() {
        let mut reader = reader();
        assert_eq!(reader.push("Hello", false), [Piece::Text("Hello".into())]);
        assert_eq!(reader.push(" <tool", false), [Piece::Text(" ".into())]);
        assert_eq!(reader.push("s>", false), [Piece::Text("<tools>".into())]);
    }
}
