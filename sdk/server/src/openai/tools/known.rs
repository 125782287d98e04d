//! Calls in an answer whose grammar is known: their arguments are read while they come.

use super::form::Form;
use super::{Function, Piece, ToolCall, may_become, push_text};

/// Reads an answer as it comes. What does not keep to the grammar, as the beginning of a call that a limit has cut, stays text.
#[derive(Clone, Debug)]
pub struct KnownCalls {
    form: Form,
    /// What the calls of each tool begin with, and its name.
    heads: Vec<(String, String)>,
    held: String,
    state: State,
    /// Whether something was said since the last call.
    has_text: bool,
    has_calls: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// Text, or a call that begins.
    Text,
    /// The arguments of a call.
    Arguments(Object),
    /// What comes after them.
    Tail,
}

impl KnownCalls {
    /// For calls of these tools.
    pub fn new(form: Form, names: &[String]) -> Self {
        let head = |name: &String| (format!("{}{}", form.mark(), form.head(name)), name.clone());
        let heads = names.iter().map(head).collect();
        Self { form, heads, held: String::new(), state: State::Text, has_text: false, has_calls: false }
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
        match &mut self.state {
            State::Text => self.text_or_call(is_end, pieces),
            State::Arguments(object) => {
                let end = object.end(&self.held);
                let arguments: String = self.held.drain(..end.unwrap_or(self.held.len())).collect();
                if !arguments.is_empty() {
                    pieces.push(Piece::Arguments(arguments));
                }
                if end.is_some() {
                    self.state = State::Tail;
                }
                end.is_some()
            }
            State::Tail => {
                let tail = self.form.tail();
                if let Some(rest) = self.held.strip_prefix(tail) {
                    self.held = rest.to_owned();
                } else if tail.starts_with(&self.held) {
                    // A limit may have cut it: the call is whole.
                    return false;
                }
                self.state = State::Text;
                true
            }
        }
    }

    fn text_or_call(&mut self, is_end: bool, pieces: &mut Vec<Piece>) -> bool {
        let mark = self.form.mark();
        let at = if mark.is_empty() {
            // Such a call is the whole answer.
            let blank = self.held.len() - self.held.trim_start().len();
            let is_first = !self.has_text && !self.has_calls;
            if is_first && blank == self.held.len() && !is_end {
                return false;
            }
            Some(blank).filter(|&at| is_first && self.held[at..].starts_with('{'))
        } else {
            self.held.find(mark)
        };
        let Some(at) = at else {
            let keep = if is_end || mark.is_empty() { 0 } else { may_become(&self.held, &[mark]) };
            self.say(self.held.len() - keep, is_end, pieces);
            return false;
        };
        self.say(at, false, pieces);
        let at = self.held.find(|c: char| !c.is_whitespace()).filter(|_| !self.has_text).unwrap_or(0);
        let begun = &self.held[at..];
        if let Some((head, name)) = self.heads.iter().find(|(head, _)| begun.starts_with(head.as_str())) {
            let function = Function { name: name.clone(), arguments: String::new() };
            pieces.push(Piece::Call(ToolCall::new(function)));
            self.held.drain(..at + head.len());
            (self.has_text, self.has_calls) = (false, true);
            self.state = State::Arguments(Object::default());
            return true;
        }
        let may_be_call = !is_end && self.heads.iter().any(|(head, _)| head.starts_with(begun));
        if !may_be_call {
            let end = if is_end { self.held.len() } else { at + mark.len().max(1) };
            self.say(end, true, pieces);
        }
        !may_be_call && !self.held.is_empty()
    }

    /// Text of so many bytes. White space before and after calls is none. `even_blank`: it is, if there are no calls.
    fn say(&mut self, bytes: usize, even_blank: bool, pieces: &mut Vec<Piece>) {
        let is_blank = self.held[..bytes].trim().is_empty();
        if bytes == 0 || (is_blank && !self.has_text && (self.has_calls || !even_blank)) {
            return;
        }
        self.has_text = true;
        let text = self.held.drain(..bytes).collect();
        push_text(pieces, text);
    }
}

/// Finds the end of an object of JSON in pieces.
#[derive(Clone, Debug, Default)]
struct Object {
    depth: usize,
    in_text: bool,
    is_escaped: bool,
}

impl Object {
    /// The bytes up to the end of the object, if it is in this piece. Pieces come without gaps, each once.
    fn end(&mut self, piece: &str) -> Option<usize> {
        for (at, byte) in piece.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_text => self.is_escaped = true,
                b'"' => self.in_text = !self.in_text,
                _ if self.in_text => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMS: [Form; 4] = [Form::Hermes, Form::Llama, Form::MistralList, Form::MistralNames];

    /// The text, and the calls as `name(arguments)`, the same in pieces of every size.
    fn read(form: Form, text: &str) -> (String, Vec<String>) {
        let of = |size: usize| {
            let mut reader = KnownCalls::new(form, &["add".into(), "now".into()]);
            let (mut said, mut calls) = (String::new(), Vec::<ToolCall>::new());
            let mut take = |pieces: Vec<Piece>| {
                for piece in pieces {
                    match piece {
                        Piece::Text(text) => said.push_str(&text),
                        Piece::Call(call) => calls.push(call),
                        Piece::Arguments(more) => calls.last_mut().unwrap().push(&more),
                    }
                }
            };
            let characters: Vec<char> = text.chars().collect();
            characters.chunks(size).for_each(|chunk| take(reader.push(&chunk.iter().collect::<String>(), false)));
            take(reader.push("", true));
            assert_eq!(reader.has_calls(), !calls.is_empty());
            let called = |call: ToolCall| format!("{}({})", call.function.name, call.function.arguments);
            (said, calls.into_iter().map(called).collect())
        };
        let whole = of(text.chars().count().max(1));
        (1..6).for_each(|size| assert_eq!(of(size), whole, "{text:?} in pieces of {size}"));
        whole
    }

    fn call(form: Form, name: &str, arguments: &str) -> String {
        format!("{}{}{arguments}{}", form.mark(), form.head(name), form.tail())
    }

    #[test]
    fn calls_are_found_in_every_form() {
        let arguments = r#"{"a": [1, {"b": "}\"]\\"}], "é": "{"}"#;
        for form in FORMS {
            let first = call(form, "add", arguments);
            let (said, calls) = read(form, &first);
            assert_eq!((said.as_str(), calls), ("", vec![format!("add({arguments})")]));
            if let Some(between) = form.between() {
                let (said, calls) = read(form, &format!("{first}{between}{}", call(form, "now", "{}")));
                assert_eq!((said.as_str(), calls), ("", vec![format!("add({arguments})"), "now({})".into()]));
            }
            if !form.mark().is_empty() {
                let (said, calls) = read(form, &format!("So: <tool [T \n{first}"));
                assert_eq!((said.as_str(), calls.len()), ("So: <tool [T \n", 1));
            }
        }
    }

    #[test]
    fn what_was_cut_is_read_as_far_as_it_goes() {
        for form in FORMS {
            let whole = call(form, "add", r#"{"a": 1}"#);
            let (head, tail) = (form.mark().len() + form.head("add").len(), form.tail().len());
            for end in 0..=whole.len() {
                let (said, calls) = read(form, &whole[..end]);
                if end < head {
                    assert_eq!((said.as_str(), calls.len()), (&whole[..end], 0));
                } else {
                    let arguments = &whole[head..end.min(whole.len() - tail)];
                    assert_eq!((said.as_str(), calls), ("", vec![format!("add({arguments})")]));
                }
            }
        }
    }

    #[test]
    fn text_without_calls_stays_text() {
        for form in FORMS {
            for text in ["", " ", "Hello", " 2 < 3 and [T", "<tool_call>x", "[TOOL_CALLS]other", "{x", "é<tool_calé"]
            {
                assert_eq!(read(form, text), (text.to_owned(), Vec::new()), "{form:?} {text:?}");
            }
        }
    }

    #[test]
    fn arguments_are_not_held_back() {
        let mut reader = KnownCalls::new(Form::Hermes, &["add".into()]);
        let head = format!("{}{}", Form::Hermes.mark(), Form::Hermes.head("add"));
        assert!(matches!(reader.push(&head, false)[..], [Piece::Call(_)]));
        assert_eq!(reader.push("{\"a", false), [Piece::Arguments("{\"a".into())]);
        assert_eq!(reader.push("\": 1}}\n", false), [Piece::Arguments("\": 1}".into())]);
        assert_eq!(reader.push("</tool_call>", false), []);
    }
}
