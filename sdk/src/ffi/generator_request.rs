//! `pagoda_generate_request`, read.

use std::ffi::c_char;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::args::{self, Versioned};
use super::generator_options::{pagoda_kv_policy, read_policy};
use super::handle::Object;
use super::run::pagoda_cancel;
use crate::engine::{BeamOptions, Chat, ContextEnd, EarlyStop, GenerateRequest, Grammar, Prompt};
use crate::error::{Error, Result};
use crate::runtime::Cancel;

/// What happens if prompt and answer do not fit into the model's context.
pub type pagoda_context_end = i32;

/// The request is rejected.
pub const PAGODA_CONTEXT_END_REFUSE: pagoda_context_end = 0;
/// The answer ends where the context does, as if `max_new_tokens` were less.
pub const PAGODA_CONTEXT_END_STOP: pagoda_context_end = 1;

/// What is added to the logit of a token. Start from PAGODA_LOGIT_BIAS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_logit_bias {
    /// The size of this struct.
    pub struct_size: u32,
    /// The token.
    pub token: u32,
    /// What is added; finite. -1e30 bans the token.
    pub bias: f32,
}

/// When a beam search ends that has as many finished answers as beams: `early_stopping` of transformers.
pub type pagoda_early_stop = i32;

/// When no beam has a better score at its length than the worst of them.
pub const PAGODA_EARLY_STOP_WHEN_UNLIKELY: pagoda_early_stop = 0;
/// At once.
pub const PAGODA_EARLY_STOP_WHEN_FULL: pagoda_early_stop = 1;
/// When no beam can get a better score at any length than the worst of them.
pub const PAGODA_EARLY_STOP_NEVER: pagoda_early_stop = 2;

/// A beam search. Start from PAGODA_BEAM_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_beam_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of beams, 1 to 16; default 4.
    pub width: i32,
    /// The score of an answer is the sum of its log probabilities over its number of tokens to this power; default 1. Above 0
    /// long answers get better scores, below 0 short ones.
    pub length_penalty: f32,
    /// When the search ends; default PAGODA_EARLY_STOP_WHEN_UNLIKELY.
    pub early_stop: pagoda_early_stop,
}

/// A request for text. Start from PAGODA_GENERATE_REQUEST_INIT, which sets `struct_size` and the defaults. The request
/// has one of `prompt`, `tokens` and `messages`.
///
/// Where the default of a number is -1, the number is not given: it is as `generation` in the model's pagoda.json says,
/// or, if that does not say either, as the comment of the field says.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generate_request {
    /// The size of this struct.
    pub struct_size: u32,
    /// The maximum number of tokens of an answer; default -1: as many as the context has room for.
    pub max_new_tokens: i32,
    /// The number of tokens before which no end-of-sequence token is taken; default -1: 0.
    pub min_new_tokens: i32,
    /// 1: tokens are drawn. 0: the most likely one is taken. Default -1: drawn if `temperature` is given and not 0.
    pub do_sample: i32,
    /// What logits are divided by; 0: the most likely token is taken. Default -1: 1.
    pub temperature: f32,
    /// The number of most likely tokens that are drawn from; 0: all. Default -1: all.
    pub top_k: i32,
    /// The probability that the tokens drawn from have together, 0 to 1; default -1: 1.
    pub top_p: f32,
    /// The least probability of a token that is drawn, relative to the most likely one, 0 to 1; default -1: 0.
    pub min_p: f32,
    /// The penalty of tokens in the prompt and in the answer so far, above 0; default -1: 1, which is none.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens that the answer has, -2 to 2; default 0.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens as often as the answer has them, -2 to 2; default 0.
    pub frequency_penalty: f32,
    /// No sequence of so many tokens occurs twice; 0: any may. Default -1: 0.
    pub no_repeat_ngram_size: i32,
    /// The token that the last of `max_new_tokens` is forced to be; default -1: none is forced.
    pub forced_eos: i32,
    /// 1: end-of-sequence tokens do not end the answer; default 0.
    pub ignore_eos: i32,
    /// 1: the answer's text has the stop text that ended it; default 0.
    pub include_stop: i32,
    /// 1, the default: the answer's text leaves special tokens out.
    pub skip_special: i32,
    /// The log probabilities of the answer's tokens, and of so many most likely tokens in their places; default -1:
    /// none.
    pub logprobs: i32,
    /// The same of the prompt's tokens; default -1: none. The prompt is then computed as a whole.
    pub prompt_logprobs: i32,
    /// The number of answers; default 1.
    pub n: i32,
    /// 1: the text of an answer begins with the prompt; default 0.
    pub echo: i32,
    /// Requests of higher priority run first; default 0. Requests of one priority run in order of arrival.
    pub priority: i32,
    /// What happens if prompt and answer do not fit into the model's context; default PAGODA_CONTEXT_END_REFUSE.
    pub context_end: pagoda_context_end,
    /// 1: the seed of the draws is `seed`; 0, the default: another one for each request.
    pub has_seed: i32,
    /// With `messages`: 1, the default: the prompt ends before an answer of the model; 0: after the last message.
    pub add_generation_prompt: i32,
    /// The seed, if `has_seed` is 1. The same request with the same seed gets the same tokens.
    pub seed: u64,
    /// The time limit in microseconds; default 0: none. The answer then has what was generated until then.
    pub timeout_us: u64,
    /// What the text follows, as a text; NULL = `tokens` or `messages`. The special tokens that the model's tokenizer
    /// puts before a text are added.
    pub prompt: *const c_char,
    /// What the text follows, as tokens; NULL = `prompt` or `messages`.
    pub tokens: *const u32,
    /// How many tokens there are; default 0.
    pub token_count: usize,
    /// What the text follows, as the messages of a chat; NULL = `prompt` or `tokens`. JSON: an array of objects with
    /// `role` and `content`, and whatever else the model's chat template takes.
    pub messages: *const c_char,
    /// With `messages`: the tools that the model may call, JSON; NULL = none.
    pub tools: *const c_char,
    /// With `messages`: more variables of the chat template, a JSON object; NULL = none.
    pub variables: *const c_char,
    /// Texts that end the answer, `stop_count` of them; NULL = none. The answer does not have them.
    pub stop: *const *const c_char,
    /// How many texts `stop` has; default 0.
    pub stop_count: usize,
    /// Tokens that end the answer, beside the model's end-of-sequence tokens, `stop_token_count` of them; NULL = none.
    pub stop_tokens: *const u32,
    /// How many tokens `stop_tokens` has; default 0.
    pub stop_token_count: usize,
    /// What is added to the logits of tokens, `logit_bias_count` of them, each token once; NULL = none.
    pub logit_bias: *const pagoda_logit_bias,
    /// How many elements `logit_bias` has; default 0.
    pub logit_bias_count: usize,
    /// The conversation that the request belongs to; NULL = none. Its keys and values are kept, in the store too. Send
    /// the whole conversation as the prompt: only what is new is computed. Requests of one session run one at a time.
    pub session: *const c_char,
    /// Cancels the request when triggered; NULL = none. The answer then has what was generated until then.
    pub cancel: *const pagoda_cancel,
    /// Which tokens stay in the slots of the request's sequences; NULL, the default: as the generator was opened. The generator
    /// must have been opened with a policy that needs as much of the model: with "h2o" that is "lastrec", "smart-lastrec", "h2o" and
    /// "h2o-orig". `cache_length` stays the generator's: leave it 0.
    pub kv_policy: *const pagoda_kv_policy,
    /// What the answer has to look like, JSON; NULL = any text. `{"json_schema": {...}}`: JSON that is valid by this JSON
    /// Schema; `{"regex": "[0-9]+"}`: a text that matches as a whole; `{"choice": ["yes", "no"]}`: one of these texts;
    /// `{"lark": "start: ..."}`: a text of this grammar.
    pub grammar: *const c_char,
    /// The maximum number of tokens that are guessed for one step, by what followed the same tokens earlier in the prompt or in
    /// the answer, 0 to 64. The answer is the same, sooner where much of it repeats the prompt. Default -1: as the generator was
    /// opened.
    pub max_draft: i32,
    /// A beam search, of which the answers are the `n` best, the best first; NULL, the default: none. There are fewer answers
    /// where fewer are found. Nothing is drawn, and the request has no session. With `_generate_async` no token comes
    /// before the search has ended: then those of the first answer come, then those of the second, and so on.
    pub beams: *const pagoda_beam_options,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_beam_options {
    const FIRST_SIZE: usize = 16;
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_logit_bias {
    const FIRST_SIZE: usize = 12;
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_generate_request {
    const FIRST_SIZE: usize = 224;
}

/// A request, and the field of the header that has its prompt.
pub(super) struct ReadRequest {
    pub(super) request: GenerateRequest,
    pub(super) prompt: PromptField,
}

/// `prompt`, `tokens` or `messages`.
#[derive(Clone, Copy)]
pub(super) struct PromptField(&'static str);

impl PromptField {
    /// An error about a part of the request, in the names of the header.
    pub(super) fn about(self, error: Error) -> Error {
        let part = match error.argument() {
            None => return error,
            Some(argument) if argument.starts_with("options.") => return error,
            Some("timeout") => "timeout_us".to_owned(),
            Some(part) => match part.strip_prefix("prompt") {
                Some(place) if place.is_empty() || place.starts_with('[') => format!("{}{place}", self.0),
                _ => part.to_owned(),
            },
        };
        error.about(format!("request.{part}"))
    }
}

/// # Safety
/// As for `pagoda_generator_generate`.
pub(super) unsafe fn read_request(request: *const pagoda_generate_request) -> Result<ReadRequest> {
    if request.is_null() {
        return Err(Error::invalid("request", "NULL, where a request is needed"));
    }
    // SAFETY: by contract.
    let request = unsafe { args::options(request, NO_REQUEST, "request")? };
    // SAFETY: by contract.
    unsafe { read(&request) }.map_err(|error| args::within("request", error))
}

/// # Safety
/// As for `pagoda_generator_generate`.
unsafe fn read(request: &pagoda_generate_request) -> Result<ReadRequest> {
    // SAFETY: by contract.
    let ((field, prompt), stop, stop_tokens, logit_bias, session, kv_policy, grammar, beams) = unsafe {
        (
            read_prompt(request)?,
            args::texts(request.stop, request.stop_count, "stop", "stop_count")?,
            args::values(request.stop_tokens, request.stop_token_count, "stop_tokens", "stop_token_count")?,
            args::structs(request.logit_bias, request.logit_bias_count, NO_BIAS, "logit_bias", "logit_bias_count")?,
            args::optional_text(request.session, "session")?,
            read_policy(request.kv_policy, "kv_policy")?,
            args::optional_text(request.grammar, "grammar")?,
            read_beams(request.beams)?,
        )
    };
    let read = GenerateRequest {
        prompt,
        max_new_tokens: optional(request.max_new_tokens, "max_new_tokens")?,
        min_new_tokens: optional(request.min_new_tokens, "min_new_tokens")?,
        do_sample: match request.do_sample {
            -1 => None,
            given => Some(args::flag(given, "do_sample")?),
        },
        temperature: optional_real(request.temperature),
        top_k: optional(request.top_k, "top_k")?,
        top_p: optional_real(request.top_p),
        min_p: optional_real(request.min_p),
        repetition_penalty: optional_real(request.repetition_penalty),
        presence_penalty: request.presence_penalty,
        frequency_penalty: request.frequency_penalty,
        no_repeat_ngram_size: optional(request.no_repeat_ngram_size, "no_repeat_ngram_size")?,
        logit_bias: logit_bias.iter().map(|element| (element.token, element.bias)).collect(),
        forced_eos: optional(request.forced_eos, "forced_eos")?,
        ignore_eos: args::flag(request.ignore_eos, "ignore_eos")?,
        stop: stop.into_iter().map(str::to_owned).collect(),
        stop_tokens: stop_tokens.to_vec(),
        include_stop: args::flag(request.include_stop, "include_stop")?,
        skip_special: Some(args::flag(request.skip_special, "skip_special")?),
        seed: args::flag(request.has_seed, "has_seed")?.then_some(request.seed),
        logprobs: optional(request.logprobs, "logprobs")?,
        prompt_logprobs: optional(request.prompt_logprobs, "prompt_logprobs")?,
        n: Some(args::count(request.n, "n")?),
        echo: args::flag(request.echo, "echo")?,
        session: session.map(str::to_owned),
        priority: request.priority,
        timeout: (request.timeout_us > 0).then(|| Duration::from_micros(request.timeout_us)),
        cancel: read_cancel(request.cancel)?,
        context_end: match request.context_end {
            PAGODA_CONTEXT_END_REFUSE => ContextEnd::Refuse,
            PAGODA_CONTEXT_END_STOP => ContextEnd::Stop,
            other => return Err(args::unknown("context_end", other, "PAGODA_CONTEXT_END_...")),
        },
        kv_policy,
        max_draft: optional(request.max_draft, "max_draft")?,
        grammar: grammar.map(|text| Grammar::from_json(&json(text, "grammar")?)).transpose()?,
        beams,
    };
    Ok(ReadRequest { request: read, prompt: PromptField(field) })
}

/// The prompt, and the field that has it.
///
/// # Safety
/// As for `pagoda_generator_generate`.
unsafe fn read_prompt(request: &pagoda_generate_request) -> Result<(&'static str, Prompt)> {
    let fields = [
        ("prompt", !request.prompt.is_null()),
        ("tokens", !request.tokens.is_null() || request.token_count > 0),
        ("messages", !request.messages.is_null()),
    ];
    let mut given = fields.iter().filter(|(_, given)| *given).map(|(field, _)| *field);
    let Some(field) = given.next() else {
        return Err(Error::invalid("prompt", "NULL, and so are tokens and messages: set one of them"));
    };
    if let Some(other) = given.next() {
        return Err(Error::invalid(other, format!("{field} has a prompt already: set one of them")));
    }
    for (part, pointer) in [("tools", request.tools), ("variables", request.variables)] {
        if field != "messages" && !pointer.is_null() {
            return Err(Error::invalid(part, format!("only a chat has them, and the prompt is in {field}: pass NULL")));
        }
    }
    // SAFETY: by contract.
    let prompt = unsafe {
        match field {
            "prompt" => Prompt::Text(args::text(request.prompt, "prompt")?.to_owned()),
            "tokens" => Prompt::Tokens(args::tokens(request.tokens, request.token_count)?.to_vec()),
            _ => Prompt::Chat(read_chat(request)?),
        }
    };
    Ok((field, prompt))
}

/// # Safety
/// As for `pagoda_generator_generate`.
unsafe fn read_chat(request: &pagoda_generate_request) -> Result<Chat> {
    // SAFETY: by contract.
    let (messages, tools, variables) = unsafe {
        (
            args::text(request.messages, "messages")?,
            args::optional_text(request.tools, "tools")?,
            args::optional_text(request.variables, "variables")?,
        )
    };
    let messages: Value = json(messages, "messages")?;
    let Value::Array(messages) = messages else {
        return Err(Error::invalid("messages", format!("{}, where an array of messages is needed", kind(&messages))));
    };
    let variables = match variables.map(|text| json(text, "variables")).transpose()? {
        None => Map::new(),
        Some(Value::Object(variables)) => variables,
        Some(other) => {
            let message = format!("{}, where an object with the variables is needed", kind(&other));
            return Err(Error::invalid("variables", message));
        }
    };
    Ok(Chat {
        messages,
        tools: tools.map(|text| json(text, "tools")).transpose()?,
        add_generation_prompt: args::flag(request.add_generation_prompt, "add_generation_prompt")?,
        variables,
    })
}

fn json(text: &str, argument: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| Error::invalid(argument, format!("this is not JSON: {error}")))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// # Safety
/// As for `pagoda_generator_generate`.
unsafe fn read_beams(beams: *const pagoda_beam_options) -> Result<Option<BeamOptions>> {
    if beams.is_null() {
        return Ok(None);
    }
    let defaults = pagoda_beam_options {
        struct_size: size_of::<pagoda_beam_options>() as u32,
        width: 4,
        length_penalty: 1.0,
        early_stop: PAGODA_EARLY_STOP_WHEN_UNLIKELY,
    };
    // SAFETY: by contract.
    let beams = unsafe { args::options(beams, defaults, "beams")? };
    let early_stop = match beams.early_stop {
        PAGODA_EARLY_STOP_WHEN_UNLIKELY => EarlyStop::WhenUnlikely,
        PAGODA_EARLY_STOP_WHEN_FULL => EarlyStop::WhenFull,
        PAGODA_EARLY_STOP_NEVER => EarlyStop::Never,
        other => return Err(args::unknown("beams.early_stop", other, "PAGODA_EARLY_STOP_...")),
    };
    let width = args::count(beams.width, "beams.width")?;
    Ok(Some(BeamOptions { width, length_penalty: beams.length_penalty, early_stop }))
}

fn read_cancel(cancel: *const pagoda_cancel) -> Result<Option<Arc<Cancel>>> {
    if cancel.is_null() { Ok(None) } else { Cancel::get(cancel, "cancel").map(Some) }
}

/// A number that -1 leaves out.
fn optional(value: i32, argument: &str) -> Result<Option<u32>> {
    match u32::try_from(value) {
        Ok(given) => Ok(Some(given)),
        Err(_) if value == -1 => Ok(None),
        Err(_) => Err(Error::invalid(argument, format!("{value} is neither -1, which leaves it out, nor 0 or more"))),
    }
}

/// A real number that -1 leaves out. None of those that can be given is negative.
fn optional_real(value: f32) -> Option<f32> {
    (value != -1.0).then_some(value)
}

const NO_BIAS: pagoda_logit_bias =
    pagoda_logit_bias { struct_size: size_of::<pagoda_logit_bias>() as u32, token: 0, bias: 0.0 };

const NO_REQUEST: pagoda_generate_request = pagoda_generate_request {
    struct_size: size_of::<pagoda_generate_request>() as u32,
    max_new_tokens: -1,
    min_new_tokens: -1,
    do_sample: -1,
    temperature: -1.0,
    top_k: -1,
    top_p: -1.0,
    min_p: -1.0,
    repetition_penalty: -1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    no_repeat_ngram_size: -1,
    forced_eos: -1,
    ignore_eos: 0,
    include_stop: 0,
    skip_special: 1,
    logprobs: -1,
    prompt_logprobs: -1,
    n: 1,
    echo: 0,
    priority: 0,
    context_end: PAGODA_CONTEXT_END_REFUSE,
    has_seed: 0,
    add_generation_prompt: 1,
    seed: 0,
    timeout_us: 0,
    prompt: std::ptr::null(),
    tokens: std::ptr::null(),
    token_count: 0,
    messages: std::ptr::null(),
    tools: std::ptr::null(),
    variables: std::ptr::null(),
    stop: std::ptr::null(),
    stop_count: 0,
    stop_tokens: std::ptr::null(),
    stop_token_count: 0,
    logit_bias: std::ptr::null(),
    logit_bias_count: 0,
    session: std::ptr::null(),
    cancel: std::ptr::null(),
    kv_policy: std::ptr::null(),
    grammar: std::ptr::null(),
    max_draft: -1,
    beams: std::ptr::null(),
};
