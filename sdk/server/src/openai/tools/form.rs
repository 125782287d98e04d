//! How a model writes a call.

use pagoda::Generator;
use serde_json::Value;

/// The marks of the forms. In some vocabularies they are special tokens.
pub const OPEN: &str = "<tool_call>";
pub const CLOSE: &str = "</tool_call>";
pub const MISTRAL: &str = "[TOOL_CALLS]";
pub const ARGS: &str = "[ARGS]";
pub const LLAMA: &str = "<|python_tag|>";

/// The form that a grammar gives calls: the one that the model was trained with, as far as its template says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `<tool_call>{"name", "arguments"}</tool_call>`, with line breaks inside: also for models whose template says nothing.
    Hermes,
    /// `{"name", "parameters"}`, which is the whole answer.
    Llama,
    /// `[TOOL_CALLS][{"name", "arguments"}]`
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{…}`
    MistralNames,
}

impl Form {
    /// That of a model.
    pub fn of(generator: &Generator) -> Self {
        let template = generator.folder().chat_template();
        Self::of_template(&template.ok().flatten().unwrap_or_default())
    }

    fn of_template(template: &str) -> Self {
        let has = |text: &str| template.contains(text);
        match () {
            () if has(OPEN) => Self::Hermes,
            () if has(MISTRAL) && has(ARGS) => Self::MistralNames,
            () if has(MISTRAL) => Self::MistralList,
            () if has(r#""parameters": "#) => Self::Llama,
            () => Self::Hermes,
        }
    }

    /// What each call begins with; empty if calls have no mark.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Hermes => OPEN,
            Self::Llama => "",
            Self::MistralList | Self::MistralNames => MISTRAL,
        }
    }

    /// What stands between the mark and the arguments of a call.
    pub fn head(self, name: &str) -> String {
        let quoted = Value::from(name);
        match self {
            Self::Hermes => format!("\n{{\"name\": {quoted}, \"arguments\": "),
            Self::Llama => format!("{{\"name\": {quoted}, \"parameters\": "),
            Self::MistralList => format!("[{{\"name\": {quoted}, \"arguments\": "),
            Self::MistralNames => format!("{name}{ARGS}"),
        }
    }

    /// What comes after the arguments.
    pub fn tail(self) -> &'static str {
        match self {
            Self::Hermes => "}\n</tool_call>",
            Self::Llama => "}",
            Self::MistralList => "}]",
            Self::MistralNames => "",
        }
    }

    /// What stands between two calls, if an answer may have several.
    pub fn between(self) -> Option<&'static str> {
        match self {
            Self::Hermes => Some("\n"),
            Self::MistralNames => Some(""),
            Self::Llama | Self::MistralList => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_tells_the_form() {
        let of = |name: &str| {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/templates");
            Form::of_template(&std::fs::read_to_string(format!("{path}/{name}.jinja")).unwrap())
        };
        assert_eq!((of("hermes"), of("qwen3"), of("llama3")), (Form::Hermes, Form::Hermes, Form::Llama));
        assert_eq!(Form::of_template("{{ messages[0].content }}"), Form::Hermes);
        assert_eq!(Form::of_template("[AVAILABLE_TOOLS] [TOOL_CALLS] ["), Form::MistralList);
        assert_eq!(Form::of_template("[TOOL_CALLS] + name + [ARGS]"), Form::MistralNames);
    }
}
