//! The fields that both kinds of requests have.

use pagoda::engine::Grammar;
use pagoda::json::Json;
use pagoda::{Error, GenerateRequest, Result};
use pagoda_requests::fields::{flag, once, plain, text, whole};
use pagoda_requests::generate::set_field;
use pagoda_requests::words::did_you_mean;

/// OpenAI's fields that say how a prompt is answered. Their names are the generator's.
const ANSWERING: [&str; 8] =
    ["temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias"];

/// Pagoda's own fields, beside OpenAI's.
const EXTENSIONS: [&str; 19] = [
    "session",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "do_sample",
    "forced_eos",
    "ignore_eos",
    "stop_tokens",
    "include_stop",
    "skip_special",
    "priority",
    "timeout",
    "context_end",
    "prompt_logprobs",
    "kv_policy",
    "max_draft",
    "grammar",
];

/// Fields that change nothing in the answer.
const IGNORED: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"];

/// What a request says, beside its prompt.
#[derive(Default)]
pub struct Common {
    /// The name of the model.
    pub model: String,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub include_usage: bool,
    /// How it is answered. The prompt is not set.
    pub answering: GenerateRequest,
}

/// Reads the members of an object. What both kinds of requests have goes to the result; `own` reads the other fields, and
/// returns false for one that it does not know. `names` are those that it knows.
pub fn read(
    members: &[(String, Json)],
    names: &[&str],
    mut own: impl FnMut(&str, &Json) -> Result<bool>,
) -> Result<Common> {
    let mut common = Common::default();
    let mut seen: Vec<&str> = Vec::new();
    for (name, value) in members {
        once(&mut seen, name, name)?;
        if *value == Json::Null || IGNORED.contains(&name.as_str()) {
            continue;
        }
        match name.as_str() {
            "model" => common.model = text(name, value)?,
            "stream" => common.stream = flag(name, value)?,
            "stream_options" => common.include_usage = read_stream_options(value)?,
            "response_format" => {
                let grammar = read_response_format(value)?;
                common.answering.grammar = grammar.or(common.answering.grammar.take());
            }
            // Any 64 bits: OpenAI's seeds may be negative.
            "seed" => common.answering.seed = Some(whole::<i64>(name, value).map(|seed| seed as u64)?),
            known if ANSWERING.contains(&known) || EXTENSIONS.contains(&known) => {
                set_field(&mut common.answering, name, value)?;
            }
            _ if own(name, value)? => {}
            _ => {
                let basic = ["model", "stream", "stream_options", "response_format"];
                let known: Vec<&str> = [&basic, names, &ANSWERING, &EXTENSIONS].concat();
                let near = did_you_mean(name, &known);
                // The list of all names would be a wall of text.
                let near = if near.starts_with("; did") { near } else { String::new() };
                return Err(Error::invalid(name, format!("no such field{near}")));
            }
        }
    }
    if common.model.is_empty() {
        return Err(Error::invalid("model", "missing: GET /v1/models lists the names"));
    }
    Ok(common)
}

fn read_stream_options(value: &Json) -> Result<bool> {
    let Json::Object(members) = value else {
        return Err(Error::invalid("stream_options", format!("{value} is not an object")));
    };
    let mut include_usage = false;
    for (name, value) in members {
        match name.as_str() {
            "include_usage" => include_usage = flag("stream_options.include_usage", value)?,
            // Padding against observers of lengths: there is none.
            "include_obfuscation" => drop(flag("stream_options.include_obfuscation", value)?),
            _ => return Err(Error::invalid(format!("stream_options.{name}"), "no such field")),
        }
    }
    Ok(include_usage)
}

/// The grammar of the answers, if they are not any text.
fn read_response_format(value: &Json) -> Result<Option<Grammar>> {
    const PATH: &str = "response_format.type";
    let Json::Object(members) = value else {
        return Err(Error::invalid(
            "response_format",
            format!("{value} is not an object such as {{\"type\": \"text\"}}"),
        ));
    };
    let word = members.iter().find(|(name, _)| name == "type").map(|(_, value)| text(PATH, value)).transpose()?;
    match word.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::JsonSchema(r#"{"type": "object"}"#.into()))),
        Some("json_schema") => {
            let found = members.iter().find(|(name, _)| name == "json_schema").map(|(_, value)| value);
            read_json_schema(found.unwrap_or(&Json::Null)).map(Some)
        }
        Some(word) => {
            let message = format!("{word:?} is neither \"text\" nor \"json_object\" nor \"json_schema\"");
            Err(Error::invalid(PATH, message))
        }
        None => Err(Error::invalid(PATH, "missing: expected \"text\", \"json_object\" or \"json_schema\"")),
    }
}

/// `{"name": …, "schema": {…}, "strict": true}`. An answer keeps to the schema whether `strict` is set or not.
fn read_json_schema(value: &Json) -> Result<Grammar> {
    const PATH: &str = "response_format.json_schema";
    let Json::Object(members) = value else {
        return Err(Error::invalid(PATH, format!("{value} is not an object with a name and a schema")));
    };
    match members.iter().find(|(name, _)| name == "schema") {
        Some((_, schema)) => Ok(Grammar::JsonSchema(plain(&format!("{PATH}.schema"), schema)?.to_string())),
        None => Err(Error::invalid(format!("{PATH}.schema"), "missing: send the JSON Schema of the answer")),
    }
}
