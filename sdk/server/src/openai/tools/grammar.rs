//! The grammar of an answer with calls, in Lark's syntax.

use pagoda::text::Tokenizer;
use pagoda::{Error, Result};
use serde_json::{Value, json};

use super::form::{ARGS, CLOSE, Form, MISTRAL, OPEN};

/// What the names of the rules of arguments begin with.
const ARGUMENTS: &str = "arguments-";

/// A tool, as far as a grammar needs it.
pub struct Tool {
    /// Its place in the request, which its rules are numbered by.
    pub at: usize,
    /// Its name.
    pub name: String,
    /// The schema of its arguments.
    pub schema: Value,
}

/// How many calls an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// Text with any number of calls in it, or with one at most.
    Any {
        /// More than one.
        several: bool,
    },
    /// Calls alone: one or more, or one.
    Only {
        /// More than one.
        several: bool,
    },
}

/// The grammar of answers with calls of these tools.
pub fn of(form: Form, calls: Calls, tools: &[Tool], tokenizer: &Tokenizer) -> String {
    let mark = lark(form.mark(), tokenizer);
    let body = tools.iter().map(|tool| format!("body-{}", tool.at)).collect::<Vec<_>>().join(" | ");
    let mut lines = match calls {
        Calls::Only { several } => {
            let more = form.between().filter(|_| several);
            let more = more.map(|between| format!(" ({} call)*", lark(between, tokenizer)));
            vec![format!("start: call{}", more.unwrap_or_default()), format!("call: {mark} body")]
        }
        Calls::Any { several } => {
            let several = several && form.between().is_some();
            any(form.mark(), &mark, if several { "*" } else { "?" })
        }
    };
    lines.push(format!("body: {body}"));
    for tool in tools {
        let (at, head, tail) = (tool.at, lark(&form.head(&tool.name), tokenizer), lark(form.tail(), tokenizer));
        lines.push(format!("body-{at}: {head} {ARGUMENTS}{at} {tail}"));
        lines.push(format!("{ARGUMENTS}{at}: %json {}", tool.schema));
    }
    lines.join("\n")
}

/// Which tool's schema was refused, and why, if that is what an error of the grammar says: `at 7(14): …: reason`, and then the
/// lines of the grammar around that one.
pub fn refused(message: &str) -> Option<(usize, &str)> {
    let (first, lines) = message.split_once('\n')?;
    let (line, reason) = first.strip_prefix("at ")?.split_once(": failed to compile JSON schema: ")?;
    let (line, _) = line.split_once('(')?;
    let rule = format!("{line} | {ARGUMENTS}");
    let found = lines.lines().find_map(|line| line.trim_start().strip_prefix(&rule)?.split_once(':'));
    Some((found?.0.parse().ok()?, reason))
}

/// Text in which a mark begins a call.
fn any(text: &str, mark: &str, repeat: &str) -> Vec<String> {
    if text.is_empty() {
        // An answer that begins as a call is one.
        vec!["start: body | TEXT?".into(), r"TEXT: /\s*[^\s{](.|\n)*/".into()]
    } else if mark.starts_with('<') {
        // A special token is never a part of text.
        vec![format!("start: (TEXT? {mark} body){repeat} TEXT?"), r"TEXT: /(.|\n)+/".into()]
    } else {
        let regex = text.replace('[', r"\[").replace(']', r"\]");
        vec![
            format!("start: (until body){repeat} TEXT?"),
            format!(r"until[lazy]: /(.|\n)*/ {mark}"),
            format!(r"TEXT: /(.|\n)+/ & ~/(.|\n)*{regex}(.|\n)*/"),
        ]
    }
}

/// A text in Lark's syntax. Marks that are special tokens of this vocabulary are these tokens.
fn lark(text: &str, tokenizer: &Tokenizer) -> String {
    let special = |mark: &str| tokenizer.token_id(mark).filter(|&id| tokenizer.is_special(id));
    let found =
        [OPEN, CLOSE, MISTRAL, ARGS].into_iter().find_map(|mark| Some((text.find(mark)?, mark, special(mark)?)));
    match found {
        Some((at, mark, id)) => {
            let (before, after) = (lark(&text[..at], tokenizer), lark(&text[at + mark.len()..], tokenizer));
            format!("{before} <[{id}]> {after}").trim().to_owned()
        }
        None if text.is_empty() => String::new(),
        // A string of JSON is one of Lark, but for this character.
        None => Value::from(text).to_string().replace('\x7f', "\\u007f"),
    }
}

/// The schema of a tool's arguments. Arguments are an object, whether the schema says so or not.
///
/// # Errors
/// INVALID_ARGUMENT about `path` if the schema is none, or of something else.
pub fn schema(path: &str, parameters: Option<&Value>) -> Result<Value> {
    let mut schema = match parameters {
        // OpenAI: a function without parameters.
        None | Some(Value::Null) => return Ok(compact(json!({"type": "object", "additionalProperties": false}))),
        Some(Value::Object(schema)) => schema.clone(),
        Some(other) => return Err(Error::invalid(path, format!("{other} is not a JSON Schema: expected an object"))),
    };
    let is_object = match schema.get("type") {
        None => true,
        Some(Value::String(word)) => word == "object",
        Some(Value::Array(words)) => words.iter().any(|word| word == "object"),
        Some(_) => false,
    };
    if !is_object {
        let message = format!("{}: arguments are an object, so it has to be \"object\"", schema["type"]);
        return Err(Error::invalid(format!("{path}.type"), message));
    }
    schema.insert("type".into(), "object".into());
    Ok(compact(Value::Object(schema)))
}

/// Any object.
pub fn any_object() -> Value {
    compact(json!({"type": "object"}))
}

/// Without the white space that JSON allows but templates do not write: a model that is unsure would write it without end.
fn compact(schema: Value) -> Value {
    let Value::Object(mut schema) = schema else { return schema };
    let format = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
    schema.entry("x-guidance").or_insert(format);
    Value::Object(schema)
}

#[cfg(test)]
mod tests {
    use pagoda::engine::{Grammar, GrammarCompiler};

    use super::*;

    const FORMS: [Form; 4] = [Form::Hermes, Form::Llama, Form::MistralList, Form::MistralNames];

    /// The vocabulary of the tiny model, with these special tokens besides.
    fn tokenizer(special: &[&str]) -> Tokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/generate/llama/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let first = Tokenizer::from_file(path).unwrap().vocab_size();
        for (at, content) in special.iter().enumerate() {
            let flags = json!({"id": first + at, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false});
            json["added_tokens"].as_array_mut().unwrap().push(flags);
        }
        Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap()
    }

    fn tools() -> Vec<Tool> {
        let add = json!({"properties": {"a": {"$ref": "#/$defs/number"}}, "required": ["a"],
            "additionalProperties": false, "$defs": {"number": {"type": "integer"}}});
        let tool = |at, name: &str, schema: Option<&Value>| Tool {
            at,
            name: name.into(),
            schema: self::schema("s", schema).unwrap(),
        };
        vec![
            tool(0, "add", Some(&add)),
            tool(2, "now", None),
            tool(3, "a \"b\"\x7f", Some(&json!({"type": ["object", "null"]}))),
        ]
    }

    fn compiler(tokenizer: &Tokenizer) -> GrammarCompiler {
        let eos = tokenizer.token_id("<|im_end|>").unwrap();
        GrammarCompiler::new(tokenizer, tokenizer.vocab_size(), &[eos]).unwrap()
    }

    /// Whether an answer is this text: its tokens are allowed one by one, and then it may end.
    fn takes(form: Form, calls: Calls, tokenizer: &Tokenizer, compiler: &GrammarCompiler, text: &str) -> bool {
        let eos = tokenizer.token_id("<|im_end|>").unwrap();
        let state = compiler.compile(&Grammar::Lark(of(form, calls, &tools(), tokenizer)), 0).unwrap();
        tokenizer.encode(text, false).unwrap().into_iter().chain([eos]).all(|token| {
            let allowed = state.next().unwrap().allows(token);
            state.took(token);
            allowed
        })
    }

    fn call(form: Form, name: &str, arguments: &str) -> String {
        format!("{}{}{arguments}{}", form.mark(), form.head(name), form.tail())
    }

    #[test]
    fn answers_are_calls_that_fit_their_schemas() {
        let only = Calls::Only { several: true };
        for tokenizer in [tokenizer(&[]), tokenizer(&[OPEN, CLOSE, MISTRAL, ARGS])] {
            let compiler = compiler(&tokenizer);
            for form in FORMS {
                let takes = |calls, text: &str| takes(form, calls, &tokenizer, &compiler, text);
                let (add, now) = (call(form, "add", r#"{"a": 17}"#), call(form, "now", "{}"));
                assert!(takes(only, &add) && takes(only, &now), "{form:?}");
                assert!(takes(only, &call(form, "a \"b\"\x7f", r#"{"any": [{}]}"#)), "{form:?}");
                for wrong in ["{}", r#"{"a": "x"}"#, r#"{"a": 1, "b": 2}"#, "7"] {
                    assert!(!takes(only, &call(form, "add", wrong)), "{form:?} {wrong}");
                }
                assert!(!takes(only, &call(form, "other", "{}")) && !takes(only, "") && !takes(only, "text"));
                assert!(!takes(only, &add[..add.len() - 1]) && !takes(only, &format!("{add} ")));
                let both = format!("{add}{}{now}", form.between().unwrap_or("\n"));
                assert_eq!(takes(only, &both), form.between().is_some());
                assert!(!takes(Calls::Only { several: false }, &both));
            }
        }
    }

    #[test]
    fn text_is_free_until_a_call_begins() {
        let any = Calls::Any { several: true };
        for tokenizer in [tokenizer(&[]), tokenizer(&[OPEN, CLOSE, MISTRAL, ARGS])] {
            let compiler = compiler(&tokenizer);
            for form in FORMS {
                let takes = |calls, text: &str| takes(form, calls, &tokenizer, &compiler, text);
                let (add, wrong) = (call(form, "add", r#"{"a": 1}"#), call(form, "add", "{}"));
                for text in ["", "Hello\n", " é < <tool [T", "a {\"name\": 7}"] {
                    assert!(takes(any, text), "{form:?} {text:?}");
                }
                assert!(takes(any, &add) && !takes(any, &wrong), "{form:?}");
                if form.mark().is_empty() {
                    continue;
                }
                assert!(takes(any, &format!("So: {add}")) && !takes(any, &format!("So: {wrong}")), "{form:?}");
                assert!(takes(any, &format!("{add} and more")) && !takes(any, &format!("{add} {wrong}")), "{form:?}");
                let twice = format!("a{add}b{add}c");
                assert_eq!(takes(any, &twice), form.between().is_some(), "{form:?}");
                assert!(!takes(Calls::Any { several: false }, &twice), "{form:?}");
                assert!(!takes(any, form.mark()), "{form:?}");
            }
        }
    }

    #[test]
    fn the_tool_of_a_refused_schema_is_known() {
        let tokenizer = tokenizer(&[]);
        let mut tools = tools();
        tools[1].schema["type"] = "strange".into();
        let lark = of(Form::Hermes, Calls::Only { several: true }, &tools, &tokenizer);
        let error = compiler(&tokenizer).compile(&Grammar::Lark(lark), 0).err().unwrap();
        assert_eq!(refused(error.message()), Some((tools[1].at, "Invalid type: strange")));
        assert_eq!(refused("it has 7 bytes"), None);
    }

    #[test]
    fn arguments_are_objects() {
        for (parameters, message) in [
            (json!([1]), "p: [1] is not a JSON Schema"),
            (json!(true), "p: true is not a JSON Schema"),
            (json!({"type": "string"}), "p.type: \"string\": arguments are an object"),
            (json!({"type": ["string"]}), "p.type: [\"string\"]: arguments are an object"),
        ] {
            let error = schema("p", Some(&parameters)).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
        assert_eq!(
            schema("p", Some(&json!({"type": ["object", "null"], "x-guidance": {}}))).unwrap(),
            json!({"type": "object", "x-guidance": {}})
        );
    }
}
