//! What a request says about tools.

use pagoda::engine::Grammar;
use pagoda::json::Json;
use pagoda::text::Tokenizer;
use pagoda::{Error, GenerateRequest, Result, Status};
use pagoda_requests::fields::{plain, text};
use pagoda_requests::words::did_you_mean;
use serde_json::Value;

use super::CallReader;
use super::form::Form;
use super::found::FoundCalls;
use super::grammar::{self, Calls, Tool};
use super::known::KnownCalls;

/// Which tools the model calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// Those that it likes.
    #[default]
    Auto,
    /// None: it does not know of them.
    None,
    /// One or more.
    Required,
    /// The one of this name.
    Named(String),
}

const CHOICE: &str = "tool_choice";

impl ToolChoice {
    /// Reads `"auto"`, `"none"`, `"required"` or `{"type": "function", "function": {"name": "…"}}`.
    pub fn read(value: &Json) -> Result<Self> {
        if let Json::Text(_) = value {
            return match text(CHOICE, value)?.as_str() {
                "auto" => Ok(Self::Auto),
                "none" => Ok(Self::None),
                "required" => Ok(Self::Required),
                word => {
                    let expected = "expected \"auto\", \"none\", \"required\" or a function";
                    Err(Error::invalid(CHOICE, format!("{word:?} is no choice: {expected}")))
                }
            };
        }
        let choice = plain(CHOICE, value)?;
        match (choice["type"].as_str(), choice["function"]["name"].as_str()) {
            (Some("function"), Some(name)) => Ok(Self::Named(name.to_owned())),
            (Some(kind), _) if kind != "function" => {
                let message = format!("{kind:?}: this server takes choices of the type \"function\" only");
                Err(Error::new(Status::Unsupported, message).about(format!("{CHOICE}.type")))
            }
            _ => {
                let example = r#"{"type": "function", "function": {"name": "weather"}}"#;
                Err(Error::invalid(CHOICE, format!("{value} is neither a word nor an object such as {example}")))
            }
        }
    }
}

/// The tools of a request, and how they are called.
#[derive(Debug, Default)]
pub struct ToolRequest {
    /// The tools, as the client sent them: a list.
    pub tools: Option<Value>,
    /// Which are called.
    pub choice: ToolChoice,
    /// At most one call.
    pub one_call: bool,
    /// Whether the client sent a grammar of its own.
    pub has_grammar: bool,
}

impl ToolRequest {
    /// What reads the answers, if they may have calls. Answers that have to have calls, or whose calls have to keep to a schema,
    /// get a grammar.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for a choice of a tool that is not there, for a tool without a name, and for one without a schema.
    pub fn prepare(
        &self,
        request: &mut GenerateRequest,
        form: Form,
        tokenizer: &Tokenizer,
    ) -> Result<Option<CallReader>> {
        let tools = self.tools.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let calls = match &self.choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto => {
                let Some(all) = &self.tools else { return Ok(None) };
                // The client's own grammar has the last word on what may be written.
                if request.grammar.is_some() || !tools.iter().any(is_strict) {
                    return Ok(Some(CallReader::Found(FoundCalls::new(all))));
                }
                Calls::Any { several: !self.one_call }
            }
            ToolChoice::Required => Calls::Only { several: !self.one_call },
            ToolChoice::Named(_) => Calls::Only { several: false },
        };
        if tools.is_empty() {
            return Err(Error::invalid(CHOICE, "given without `tools`: send the tools that the model is to call"));
        }
        if self.has_grammar {
            return Err(Error::invalid("grammar", "given, and `tool_choice` asks for a call: send one of them"));
        }
        let tools = self.chosen(tools, calls)?;
        let names: Vec<String> = tools.iter().map(|tool| tool.name.clone()).collect();
        request.grammar = Some(Grammar::Lark(grammar::of(form, calls, &tools, tokenizer)));
        // The marks may be special tokens, and the reader needs them. No others can come.
        request.skip_special = Some(false);
        Ok(Some(CallReader::Known(KnownCalls::new(form, &names))))
    }

    /// The tools that may be called, with their schemas.
    fn chosen(&self, tools: &[Value], calls: Calls) -> Result<Vec<Tool>> {
        let mut names = Vec::new();
        let mut chosen = Vec::new();
        for (at, tool) in tools.iter().enumerate() {
            let (path, function) = function_of(at, tool);
            let Some(name) = function["name"].as_str().filter(|name| !name.is_empty()) else {
                return Err(Error::invalid(format!("{path}.name"), "missing: a tool is called by its name"));
            };
            names.push(name);
            if matches!(&self.choice, ToolChoice::Named(named) if named != name) {
                continue;
            }
            let keeps_schema = matches!(calls, Calls::Only { .. }) || is_strict(tool);
            let schema = match function.get("parameters") {
                parameters if keeps_schema => grammar::schema(&format!("{path}.parameters"), parameters)?,
                _ => grammar::any_object(),
            };
            chosen.push(Tool { at, name: name.to_owned(), schema });
        }
        match &self.choice {
            ToolChoice::Named(name) if chosen.is_empty() => {
                let near = did_you_mean(name, &names);
                Err(Error::invalid(format!("{CHOICE}.function.name"), format!("no tool is named {name:?}{near}")))
            }
            _ => Ok(chosen),
        }
    }

    /// The same error, about the tool whose schema was refused, if that is what it is.
    pub fn explain(&self, reader: Option<&CallReader>, error: Error) -> Error {
        if !matches!(reader, Some(CallReader::Known(_))) || error.argument() != Some("grammar.lark") {
            return error;
        }
        let tools = self.tools.as_ref().and_then(Value::as_array);
        let found = grammar::refused(error.message())
            .and_then(|(at, reason)| Some((function_of(at, tools?.get(at)?).0, reason.trim_end_matches('.'))));
        match found {
            Some((path, reason)) => Error::invalid(format!("{path}.parameters"), format!("{reason}; correct it")),
            None => Error::new(error.status(), error.message()).about("tools"),
        }
    }
}

/// A tool's function, and where it is. Some clients send functions alone.
fn function_of(at: usize, tool: &Value) -> (String, &Value) {
    match tool.get("function") {
        Some(function) => (format!("tools[{at}].function"), function),
        None => (format!("tools[{at}]"), tool),
    }
}

fn is_strict(tool: &Value) -> bool {
    function_of(0, tool).1["strict"] == true
}

#[cfg(test)]
mod tests {
    use pagoda_requests::fields::object;
    use serde_json::json;

    use super::*;

    fn choice(json: &str) -> Result<ToolChoice> {
        ToolChoice::read(&object(&format!("{{\"c\": {json}}}"), "").unwrap()[0].1)
    }

    #[test]
    fn choices_are_read() {
        assert_eq!(choice(r#""auto""#).unwrap(), ToolChoice::Auto);
        assert_eq!(choice(r#""none""#).unwrap(), ToolChoice::None);
        assert_eq!(choice(r#""required""#).unwrap(), ToolChoice::Required);
        let named = r#"{"type": "function", "function": {"name": "add"}}"#;
        assert_eq!(choice(named).unwrap(), ToolChoice::Named("add".into()));
        for (json, message) in [
            (r#""any""#, "tool_choice: \"any\" is no choice"),
            ("7", "tool_choice: 7 is neither a word nor an object such as"),
            (r#"{"type": "function"}"#, "tool_choice: an object is neither"),
            (r#"{"type": "custom"}"#, "tool_choice.type: \"custom\": this server takes"),
        ] {
            let error = choice(json).unwrap_err().to_string();
            assert!(error.starts_with(message), "{json}\n{error}");
        }
    }

    #[test]
    fn only_what_has_to_be_is_made_to_fit() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/generate/llama/tokenizer.json");
        let tokenizer = Tokenizer::from_file(path).unwrap();
        let prepare = |tools: Value, choice: ToolChoice, has_grammar: bool| {
            let asked = ToolRequest { tools: Some(tools), choice, one_call: false, has_grammar };
            let mut request = GenerateRequest::default();
            let reader = asked.prepare(&mut request, Form::Hermes, &tokenizer)?;
            Ok::<_, Error>((reader, request.grammar))
        };
        let add = |strict: bool| json!([{"type": "function", "function": {"name": "add", "strict": strict}}]);
        let named = |name: &str| ToolChoice::Named(name.into());
        assert!(matches!(prepare(add(false), ToolChoice::Auto, false), Ok((Some(CallReader::Found(_)), None))));
        assert!(matches!(prepare(add(true), ToolChoice::None, false), Ok((None, None))));
        for (tools, choice) in
            [(add(true), ToolChoice::Auto), (add(false), ToolChoice::Required), (add(false), named("add"))]
        {
            let prepared = prepare(tools, choice, false);
            assert!(matches!(prepared, Ok((Some(CallReader::Known(_)), Some(Grammar::Lark(_))))));
        }
        for (tools, choice, has_grammar, message) in [
            (json!([]), ToolChoice::Required, false, "tool_choice: given without `tools`"),
            (json!([{}]), ToolChoice::Required, false, "tools[0].name: missing"),
            (json!([{"function": {}}]), ToolChoice::Required, false, "tools[0].function.name: missing"),
            (add(false), named("ad"), false, "tool_choice.function.name: no tool is named \"ad\"; did you mean `add`?"),
            (add(false), ToolChoice::Required, true, "grammar: given, and `tool_choice` asks for a call"),
        ] {
            let error = prepare(tools, choice, has_grammar).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
