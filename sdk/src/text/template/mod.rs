//! Chat templates: messages to a prompt.
//!
//! Models bring them as Jinja templates that are written for, and tried with, Python's transformers. They are rendered here
//! as there, to the character: by `minijinja`, with what Python does differently done over.

mod clock;
mod python;
mod source;

use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde_json::Map;

use crate::error::{Error, Result, Status};

/// Steps that a template may take. A conversation of 1,000 messages takes some 100,000.
const FUEL: u64 = 10_000_000;

/// The longest text that a template may give.
const MAX_BYTES: usize = 64 << 20;

/// The name of the one template in its environment, which errors of `minijinja` mention.
const NAME: &str = "chat template";

/// What is put behind the final message to find its end. That of transformers, with the space, so that a template that cuts
/// off spaces does here what it does there.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// A chat template, as model folders have it in `chat_template.jinja` or `tokenizer_config.json`.
///
/// It gives what `apply_chat_template` of Python's transformers gives for the same template and messages, to the character.
/// It is `Send` and `Sync`: any number of threads may render at the same time.
///
/// A template is code from a model's author. It sees nothing but its input, and it ends: steps, nesting and output are
/// limited.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: Vec<(String, String)>,
    /// Whether the template can read a message's content.
    reads_content: bool,
}

/// What a chat template is rendered with.
#[derive(Clone, Copy, Debug, Default)]
pub struct ChatInput<'a> {
    /// The conversation: objects with `role`, `content` and whatever else the template knows. A content is a text, or a list of
    /// parts such as `{"type": "text", "text": …}` where the template takes those.
    pub messages: &'a [serde_json::Value],
    /// Functions that the model may call, as a list of JSON schemas.
    pub tools: Option<&'a serde_json::Value>,
    /// Whether the prompt ends with the beginning of the assistant's message.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends with the final message's content, for the model to go on with it.
    pub continue_final_message: bool,
    /// More variables of the template, such as `enable_thinking` or `documents`.
    pub extra: Option<&'a Map<String, serde_json::Value>>,
}

impl ChatTemplate {
    /// Reads a template. `tokens` are the special tokens by the names that templates have for them, such as `bos_token`.
    ///
    /// # Errors
    /// `Model` where it is not a template, with the line.
    pub fn new(source: &str, tokens: &[(String, String)]) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.expect("the default delimiters are valid"));
        environment = python::environment(environment);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, source::prepare(source)).map_err(|error| {
            let what = "It has to be a Jinja template as transformers takes it; correct it or export the model again";
            Error::new(Status::Model, format!("the chat template can not be read: {}. {what}", describe(&error)))
        })?;
        Ok(Self { environment, tokens: tokens.to_vec(), reads_content: source.contains("content") })
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// `InvalidArgument` where the template refuses the conversation, with its own words, or where it fails over it, with the
    /// line. `Capacity` where it reaches a limit.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String> {
        self.render_at(input, clock::Time::now())
    }

    fn render_at(&self, input: &ChatInput<'_>, now: clock::Time) -> Result<String> {
        if let Some(index) = input.messages.iter().position(|message| !message.is_object()) {
            let what = "a message is an object with a role and a content";
            return Err(Error::invalid(
                format!("messages[{index}]"),
                format!("{} is not a message: {what}", input.messages[index]),
            ));
        }
        if input.tools.is_some_and(|tools| !tools.is_array()) {
            return Err(Error::invalid("tools", "not a list: tools are a list of JSON schemas"));
        }
        let mut messages: Vec<serde_json::Value> = input.messages.iter().map(with_reasoning).collect();
        let continued = if input.continue_final_message { Some(self.tag(&mut messages)?) } else { None };

        let mut context: Vec<(&str, Value)> = Vec::new();
        context.extend(self.tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))));
        context.push(("strftime_now", Value::from_function(move |format: &str| now.format(format))));
        context.push(("documents", Value::from(())));
        context
            .extend(input.extra.into_iter().flatten().map(|(name, value)| (name.as_str(), python::from_json(value))));
        context.push(("messages", messages.iter().map(python::from_json).collect()));
        context.push(("tools", input.tools.map_or(Value::from(()), python::from_json)));
        context.push(("add_generation_prompt", Value::from(input.add_generation_prompt)));

        let text = self.run(Value::from_pairs(context))?;
        match continued {
            Some(content) => cut(text, &content),
            None => Ok(text),
        }
    }

    fn run(&self, context: Value) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(|error| failed(&error))?;
        let mut text = Limited(Vec::new());
        template.render_captured_to(context, &mut text).map_err(|error| failed(&error))?;
        String::from_utf8(text.0)
            .map_err(|error| Error::new(Status::Internal, format!("a chat template's text: {error}")))
    }

    /// Marks the end of the final message, and gives its content.
    fn tag(&self, messages: &mut [serde_json::Value]) -> Result<String> {
        let nothing = |what: &str| {
            Err(Error::invalid(
                "continue_final_message",
                format!("{what}; end the messages with the text to go on with"),
            ))
        };
        let Some(last) = messages.last_mut() else { return nothing("there are no messages") };
        if !self.reads_content {
            return nothing("the chat template does not read the content of messages");
        }
        let text = match last.get_mut("content") {
            Some(serde_json::Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
            content => content,
        };
        let Some(serde_json::Value::String(text)) = text else { return nothing("the final message has no text") };
        let content = text.clone();
        text.push_str(TAG);
        Ok(content)
    }
}

/// Cuts a prompt at the mark behind the final message.
fn cut(mut text: String, content: &str) -> Result<String> {
    let tag = TAG.trim_end();
    match text.rfind(tag).filter(|_| text.contains(python::strip(content))) {
        Some(at) if text[at..].starts_with(TAG) => text.truncate(at),
        // The template cuts off spaces behind a message.
        Some(at) => text.truncate(python::strip_end(&text[..at]).len()),
        None => {
            let what =
                "the chat template changes the final message, so its end can not be found; do not continue this one";
            return Err(Error::invalid("continue_final_message", what));
        }
    }
    Ok(text)
}

/// A message with its reasoning under the names that templates have for it, as transformers gives it to them.
fn with_reasoning(message: &serde_json::Value) -> serde_json::Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let names = ["reasoning_content", "thinking", "reasoning"];
    let Some(reasoning) = names.iter().filter_map(|name| fields.get(*name)).find(|value| !value.is_null()) else {
        return message.clone();
    };
    let mut aliased = Map::new();
    aliased.insert("thinking".to_owned(), reasoning.clone());
    aliased.extend(fields.clone());
    aliased.insert("reasoning_content".to_owned(), reasoning.clone());
    serde_json::Value::Object(aliased)
}

fn failed(error: &minijinja::Error) -> Error {
    if let Some(message) = python::raised(error) {
        return Error::invalid("messages", format!("the chat template refuses the conversation: {message}"));
    }
    if error.kind() == ErrorKind::OutOfFuel {
        let what = "Shorten the conversation, or correct the template";
        return Error::new(Status::Capacity, format!("the chat template takes more than {FUEL} steps. {what}"));
    }
    if let ErrorKind::WriteFailure = error.kind() {
        let what = "Shorten the conversation, or correct the template";
        return Error::new(Status::Capacity, format!("the chat template gives more than {MAX_BYTES} bytes. {what}"));
    }
    let what = "Check that the messages have the roles and fields that this model's template expects";
    Error::invalid("messages", format!("the chat template fails: {}. {what}", describe(error)))
}

/// What was wrong, with the line, from the innermost error that knows one.
fn describe(error: &minijinja::Error) -> String {
    let what = match error.detail() {
        Some(detail) => format!("{} ({detail})", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("line {line}: {what}"),
        None => what,
    }
}

/// A buffer with an end.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use serde_json::{Value, json};

    use super::*;

    /// The time in the files of `tests/data/templates`.
    const NOW: clock::Time = clock::Time {
        year: 2026,
        month: 3,
        day: 7,
        hour: 15,
        minute: 4,
        second: 9,
        microsecond: 120,
        weekday: 6,
        yearday: 66,
    };

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(source, &[("bos_token".to_owned(), "<s>".to_owned())]).unwrap()
    }

    fn render(source: &str) -> Result<String> {
        template(source).render(&ChatInput::default())
    }

    fn read(path: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    /// Whether the outcome of a case is the expected one.
    fn agrees(template: &ChatTemplate, case: &Value, expected: &Value) -> std::result::Result<(), String> {
        let flag = |name: &str| case[name].as_bool().unwrap_or(false);
        let input = ChatInput {
            messages: case["messages"].as_array().unwrap(),
            tools: case.get("tools"),
            add_generation_prompt: flag("add_generation_prompt"),
            continue_final_message: flag("continue_final_message"),
            extra: case.get("extra").and_then(Value::as_object),
        };
        let got = template.render_at(&input, NOW);
        let is_right = match (&got, expected) {
            (Ok(text), Value::String(expected)) => text == expected,
            (Err(error), Value::Object(expected)) => match &expected["error"] {
                Value::String(message) => {
                    error.message() == format!("the chat template refuses the conversation: {message}")
                }
                error => error.is_null(),
            },
            _ => false,
        };
        if is_right { Ok(()) } else { Err(format!("got {got:?}\nexpected {expected}")) }
    }

    /// Every template in `tests/data/templates`, and in the folder that `PAGODA_TEMPLATES` names, against transformers.
    #[test]
    fn templates_give_what_transformers_gives() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates");
        let inputs = read(&here.join("cases.json"));
        let tokens = inputs["tokens"].as_object().unwrap().iter();
        let tokens: Vec<_> = tokens.map(|(name, token)| (name.clone(), token.as_str().unwrap().to_owned())).collect();
        let more = std::env::var_os("PAGODA_TEMPLATES").map(PathBuf::from);
        let files = [here].into_iter().chain(more).flat_map(|folder| std::fs::read_dir(folder).unwrap());
        let (mut templates, mut cases, mut wrong) = (0, 0, Vec::new());
        for path in files.map(|file| file.unwrap().path()) {
            if path.extension().is_none_or(|extension| extension != "jinja") {
                continue;
            }
            templates += 1;
            let source = std::fs::read_to_string(&path).unwrap();
            let template = ChatTemplate::new(&source, &tokens).unwrap_or_else(|error| panic!("{path:?}: {error}"));
            let expected = read(&path.with_extension("json"));
            for case in inputs["cases"].as_array().unwrap() {
                cases += 1;
                let name = case["name"].as_str().unwrap();
                let outcome = agrees(&template, case, &expected["expected"][name]);
                wrong.extend(outcome.err().map(|what| format!("{path:?} {name:?}\n{what}")));
            }
        }
        assert!(wrong.is_empty(), "{} of {cases} cases differ:\n{}", wrong.len(), wrong.join("\n\n"));
        assert!(templates >= 16 && cases >= 700, "{templates} templates, {cases} cases");
    }

    #[test]
    fn what_a_template_raises_is_passed_on() {
        let error = render("\n{{ raise_exception('Roles must alternate: ' ~ none) }}").unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("messages")));
        assert_eq!(error.message(), "the chat template refuses the conversation: Roles must alternate: None");
        let nested =
            "{% macro m() %}{{ raise_exception('inside') }}{% endmacro %}{% for x in [1] %}{{ m() }}{% endfor %}";
        assert!(render(nested).unwrap_err().message().ends_with("refuses the conversation: inside"));
    }

    #[test]
    fn errors_name_the_line() {
        let error = ChatTemplate::new("a\n{% if x %}\n{% endfor %}", &[]).unwrap_err();
        assert_eq!(error.status(), Status::Model);
        assert!(error.message().contains("line 3"), "{error}");
        for (source, line) in [
            ("\n\n{{ messages[0].content }}", "line 3"),
            ("{%- for x in messages[\n1:\n] -%}{% endfor %}\n{{ 'a' + 1 }}", "line 4"),
            ("\n{% for x in none %}{% endfor %}", "line 2"),
            ("\r\n\r\n{{ nothing | tojson }}", "line 3"),
            ("{% include 'other' %}", "line 1"),
        ] {
            let error = render(source).unwrap_err();
            assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("messages")));
            assert!(error.message().contains(line), "{source} {error}");
        }
    }

    #[test]
    fn templates_that_do_not_end_are_stopped() {
        let long = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert_eq!(render(long).unwrap_err().status(), Status::Capacity);
        let large = "{% for a in range(9) %}{{ 'x' * 90000000 }}{% endfor %}";
        assert_eq!(render(large).unwrap_err().status(), Status::Capacity);
        let deep = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        assert_eq!(render(deep).unwrap_err().status(), Status::InvalidArgument);
        let nested = "{% set ns = namespace(x=[]) %}{% for a in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}";
        assert!(render(&format!("{nested}{{{{ ns.x | tojson }}}}")).unwrap_err().message().contains("levels"));
        assert!(render(&format!("{nested}{{{{ ns.x }}}}")).unwrap_err().message().contains("levels"));
    }

    #[test]
    fn input_that_is_no_conversation_is_refused() {
        let template = template("{{ messages | length }}{{ bos_token }}");
        let error =
            template.render(&ChatInput { messages: &[json!({"role": "user"}), json!("Hi")], ..ChatInput::default() });
        assert_eq!(error.unwrap_err().argument(), Some("messages[1]"));
        let error = template.render(&ChatInput { tools: Some(&json!({})), ..ChatInput::default() });
        assert_eq!(error.unwrap_err().argument(), Some("tools"));
        assert_eq!(template.render(&ChatInput::default()).unwrap(), "0<s>");
    }

    #[test]
    fn a_message_that_the_template_changes_is_not_continued() {
        let messages = [json!({"role": "assistant", "content": "One, two "})];
        let input = ChatInput { messages: &messages, continue_final_message: true, ..ChatInput::default() };
        assert_eq!(template("<{{ messages[0].content }}>").render(&input).unwrap(), "<One, two ");
        assert_eq!(template("<{{ messages[0].content | trim }}>").render(&input).unwrap(), "<One, two");
        for source in
            ["{{ messages[0].content | upper }}", "{{ messages[0].content | length }}", "{{ messages[0].role }}"]
        {
            let error = template(source).render(&input).unwrap_err();
            assert_eq!(error.argument(), Some("continue_final_message"), "{source}");
        }
    }

    #[test]
    fn threads_share_one() {
        let template = template("{% for m in messages %}{{ m.content }}{% endfor %}");
        std::thread::scope(|scope| {
            for number in 0..4 {
                let template = &template;
                scope.spawn(move || {
                    let messages = vec![json!({"content": number}); 50];
                    let input = ChatInput { messages: &messages, ..ChatInput::default() };
                    assert_eq!(template.render(&input).unwrap(), number.to_string().repeat(50));
                });
            }
        });
    }
}
