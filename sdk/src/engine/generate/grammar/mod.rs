//! Grammars: what an answer has to look like.
//!
//! The crate llguidance knows which tokens a grammar allows next. `compiler` gives it the model's vocabulary and compiles
//! grammars, `state` follows one answer, and `worker` computes the masks of a step's answers while the model runs.

mod compiler;
mod state;
mod worker;

pub use compiler::GrammarCompiler;
pub use state::{GrammarState, NextTokens};
pub(super) use worker::MaskWorker;

use serde_json::Value;

use crate::error::{Error, Result};

/// What an answer has to look like. Only tokens that it allows are taken, so that an answer is valid, or ends too early: then
/// [`Choice::missing`](super::Choice::missing) says what comes next.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Grammar {
    /// A JSON value that is valid by this JSON Schema, which is JSON itself. `{"type": "object"}` is any object. `$ref` may
    /// name what the schema has, as in `#/$defs/part`.
    JsonSchema(String),
    /// A text that matches this regular expression as a whole. It has no anchors, look-around or back references.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar in Lark's syntax, with the additions of llguidance. Its first rule is `start`.
    Lark(String),
}

impl Grammar {
    /// Reads `{"json_schema": {…}}`, `{"regex": "[0-9]+"}`, `{"choice": ["yes", "no"]}` or `{"lark": "start: …"}`. It is not
    /// compiled yet.
    ///
    /// # Errors
    /// INVALID_ARGUMENT about `grammar` and the part that is none.
    pub fn from_json(value: &Value) -> Result<Self> {
        let members = value.as_object().filter(|members| members.len() == 1);
        let Some((kind, value)) = members.and_then(|members| members.iter().next()) else {
            let message = "expected an object with one member: json_schema, regex, choice or lark";
            return Err(Error::invalid("grammar", message));
        };
        let place = format!("grammar.{kind}");
        let text = |place: &str, value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            _ => Err(Error::invalid(place, format!("{value} is not a text"))),
        };
        match (kind.as_str(), value) {
            ("json_schema", schema) => Ok(Self::JsonSchema(schema.to_string())),
            ("regex", regex) => text(&place, regex).map(Self::Regex),
            ("lark", lark) => text(&place, lark).map(Self::Lark),
            ("choice", Value::Array(texts)) => {
                let texts = texts.iter().enumerate().map(|(at, one)| text(&format!("{place}[{at}]"), one));
                texts.collect::<Result<_>>().map(Self::Choice)
            }
            ("choice", _) => Err(Error::invalid(place, format!("{value} is not a list of texts"))),
            _ => Err(Error::invalid(place, "no such kind of grammar: expected json_schema, regex, choice or lark")),
        }
    }

    /// The name of its kind, e.g. `json_schema`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "lark",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Grammar> {
        Grammar::from_json(&serde_json::from_str(json).unwrap())
    }

    #[test]
    fn every_kind_is_read() {
        assert_eq!(read(r#"{"regex": "a+"}"#).unwrap(), Grammar::Regex("a+".into()));
        assert_eq!(read(r#"{"choice": ["a", "b"]}"#).unwrap(), Grammar::Choice(vec!["a".into(), "b".into()]));
        assert_eq!(read(r#"{"lark": "start: \"a\""}"#).unwrap(), Grammar::Lark("start: \"a\"".into()));
        // Keys keep their order, in which an answer has them.
        let schema = r#"{"type":"object","properties":{"b":{},"a":{}}}"#;
        assert_eq!(read(&format!(r#"{{"json_schema": {schema}}}"#)).unwrap(), Grammar::JsonSchema(schema.into()));
    }

    #[test]
    fn errors_name_the_place() {
        for (json, message) in [
            ("7", "grammar: expected an object with one member"),
            ("{}", "grammar: expected an object with one member"),
            (r#"{"regex": "a", "lark": "b"}"#, "grammar: expected an object with one member"),
            (r#"{"regexp": "a"}"#, "grammar.regexp: no such kind of grammar"),
            (r#"{"regex": 1}"#, "grammar.regex: 1 is not a text"),
            (r#"{"choice": "a"}"#, "grammar.choice: \"a\" is not a list of texts"),
            (r#"{"choice": ["a", 1]}"#, "grammar.choice[1]: 1 is not a text"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.starts_with(message), "{json}\n{error}\n{message}");
        }
    }
}
