//! `pagoda_generate_response`: the answers to a request, and its tokens as they are generated.

use std::ffi::{CStr, c_char};
use std::ptr::null;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::engine::static_version;
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing};
use crate::engine::{Choice, FinishReason, GenerateResponse, Timings, Token, TokenLogprobs};
use crate::error::{Error, Result};

/// Why an answer ended.
pub type pagoda_finish_reason = i32;

/// It has not ended.
pub const PAGODA_FINISH_REASON_NONE: pagoda_finish_reason = 0;
/// An end-of-sequence token, a stop token, or a stop text.
pub const PAGODA_FINISH_REASON_STOP: pagoda_finish_reason = 1;
/// `max_new_tokens`, or the end of the context.
pub const PAGODA_FINISH_REASON_LENGTH: pagoda_finish_reason = 2;
/// It was cancelled.
pub const PAGODA_FINISH_REASON_CANCELLED: pagoda_finish_reason = 3;
/// Its time limit was exceeded.
pub const PAGODA_FINISH_REASON_TIMEOUT: pagoda_finish_reason = 4;

/// The answers to a request. Nothing in it changes. Any number of threads may use a handle at the same time.
pub struct pagoda_generate_response {
    _private: [u8; 0],
}

/// What a response has beside its answers. Start from PAGODA_GENERATE_INFO_INIT, which sets `struct_size`. The lists and
/// texts belong to the response and are valid until it is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generate_info {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of prompt tokens whose keys and values were cached, of the first answer.
    pub cached_tokens: u32,
    /// The number of rows that were computed for all answers.
    pub computed_tokens: u64,
    /// The number of answers.
    pub choice_count: usize,
    /// The tokens of the prompt.
    pub prompt_tokens: *const u32,
    /// How many there are.
    pub prompt_token_count: usize,
    /// How many tokens of the prompt have log probabilities: all of them if they were asked for, else 0.
    pub prompt_logprob_count: usize,
    /// The version of the model, as in its pagoda.json. The text is static: it is never freed.
    pub version: *const c_char,
}

/// One answer. Start from PAGODA_GENERATE_CHOICE_INIT, which sets `struct_size`. The lists and texts belong to the
/// response and are valid until it is freed.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generate_choice {
    /// The size of this struct.
    pub struct_size: u32,
    /// Why it ended.
    pub finish_reason: pagoda_finish_reason,
    /// Its text. A model can generate a NUL: then the text goes on after it.
    pub text: *const c_char,
    /// The number of bytes of the text, without the NUL at its end.
    pub text_length: usize,
    /// Its tokens. Those that ended it are the last ones.
    pub tokens: *const u32,
    /// How many there are.
    pub token_count: usize,
    /// How many tokens have log probabilities: all of them if they were asked for, else 0.
    pub logprob_count: usize,
    /// Nanoseconds from the request to its first step.
    pub queued_ns: u64,
    /// Nanoseconds from the request to the first token.
    pub first_token_ns: u64,
    /// Nanoseconds from the first token to the last.
    pub generation_ns: u64,
    /// What the request's grammar expects next, if the answer ended before it was valid; else NULL.
    pub missing: *const c_char,
    /// 1: the answer is of a beam search, and has a score.
    pub has_score: i32,
    /// Its score: the sum of its log probabilities over its number of tokens to the power of the length penalty. Penalties and
    /// `logit_bias` are part of it.
    pub score: f32,
}

/// What the model thought of a token, before anything that the request asked for. Start from
/// PAGODA_TOKEN_LOGPROBS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_token_logprobs {
    /// The size of this struct.
    pub struct_size: u32,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// Its place among all tokens, 1 for the most likely; 0: it has no probability, as the first token of a prompt.
    pub rank: u32,
    /// How many of the most likely tokens there are: as many as were asked for.
    pub top_count: usize,
    /// Those tokens, the most likely first.
    pub top_tokens: *const u32,
    /// Their log probabilities.
    pub top_logprobs: *const f32,
}

/// A token of an answer, as it is generated.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generate_token {
    /// The size of this struct.
    pub struct_size: u32,
    /// Which answer it belongs to.
    pub choice: u32,
    /// The token.
    pub id: u32,
    /// Why the answer ends with this token; PAGODA_FINISH_REASON_NONE if it does not.
    pub finish_reason: pagoda_finish_reason,
    /// The text that is new. Empty if the token ends inside a character, or if the text may begin a stop text.
    pub text: *const c_char,
    /// The number of bytes of the text, without the NUL at its end.
    pub text_length: usize,
    /// The log probabilities; NULL if they were not asked for.
    pub logprobs: *const pagoda_token_logprobs,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_generate_info {
    const FIRST_SIZE: usize = 56;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_generate_choice {
    const FIRST_SIZE: usize = 72;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_token_logprobs {
    const FIRST_SIZE: usize = 40;
}

/// A response and what C callers read of it, in C's form.
pub(super) struct ResponseObject {
    choices: Vec<ChoiceObject>,
    prompt_tokens: Vec<u32>,
    prompt_logprobs: Vec<Option<Logprobs>>,
    cached_tokens: u32,
    computed_tokens: u64,
    version: &'static CStr,
}

struct ChoiceObject {
    text: Text,
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    finish_reason: FinishReason,
    missing: Option<Text>,
    timings: Timings,
    score: Option<f32>,
}

struct Logprobs {
    logprob: f32,
    rank: u32,
    top_tokens: Vec<u32>,
    top_logprobs: Vec<f32>,
}

/// The bytes of a text, and a NUL.
struct Text(Vec<u8>);

impl Object for ResponseObject {
    type C = pagoda_generate_response;
    const KIND: Kind = Kind::GenerateResponse;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<ResponseObject> = Table::new();
        &TABLE
    }
}

/// Gets what a response has beside its answers.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `info` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generate_response_info(
    response: *const pagoda_generate_response,
    info: *mut pagoda_generate_info,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generate_response_info", error, || {
            let (object, out) = (ResponseObject::get(response, "response")?, args::out_struct(info, "info")?);
            out.write(&object.info());
            Ok(())
        })
    }
}

/// Gets an answer of a response, the first one with `index` 0.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
/// invalid `struct_size`, and an `index` out of range.
///
/// # Safety
/// `choice` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generate_response_choice(
    response: *const pagoda_generate_response,
    index: usize,
    choice: *mut pagoda_generate_choice,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generate_response_choice", error, || {
            let (object, out) = (ResponseObject::get(response, "response")?, args::out_struct(choice, "choice")?);
            out.write(&at(&object.choices, index, "index", "answers")?.describe());
            Ok(())
        })
    }
}

/// Gets the log probabilities of the token `index` of the answer `choice`. The lists belong to the response and are
/// valid until it is freed.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
/// invalid `struct_size`, a `choice` or an `index` out of range, and if they were not asked for.
///
/// # Safety
/// `logprobs` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generate_response_logprobs(
    response: *const pagoda_generate_response,
    choice: usize,
    index: usize,
    logprobs: *mut pagoda_token_logprobs,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generate_response_logprobs", error, || {
            let (object, out) = (ResponseObject::get(response, "response")?, args::out_struct(logprobs, "logprobs")?);
            let choice = at(&object.choices, choice, "choice", "answers")?;
            out.write(&at(&choice.logprobs, index, "index", "log probabilities")?.describe());
            Ok(())
        })
    }
}

/// Gets the log probabilities of the token `index` of the prompt. The first token has none: its `rank` is 0. The lists
/// belong to the response and are valid until it is freed.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an
/// invalid `struct_size`, an `index` out of range, and if they were not asked for.
///
/// # Safety
/// `logprobs` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generate_response_prompt_logprobs(
    response: *const pagoda_generate_response,
    index: usize,
    logprobs: *mut pagoda_token_logprobs,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generate_response_prompt_logprobs", error, || {
            let (object, out) = (ResponseObject::get(response, "response")?, args::out_struct(logprobs, "logprobs")?);
            let logprobs = at(&object.prompt_logprobs, index, "index", "log probabilities")?;
            out.write(&logprobs.as_ref().map_or(NO_LOGPROBS, Logprobs::describe));
            Ok(())
        })
    }
}

/// Frees a response. NULL is allowed.
///
/// Ownership: takes the response. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_generate_response_free(response: *mut pagoda_generate_response) -> pagoda_status {
    freeing("pagoda_generate_response_free", || ResponseObject::remove(response, "response"))
}

impl ResponseObject {
    /// A handle of the response.
    pub(super) fn into_handle(response: GenerateResponse) -> Result<*mut pagoda_generate_response> {
        let object = Self {
            choices: response.choices.into_iter().map(ChoiceObject::new).collect(),
            prompt_tokens: response.prompt_tokens,
            prompt_logprobs: response.prompt_logprobs.into_iter().map(|each| each.map(Logprobs::new)).collect(),
            cached_tokens: response.cached_tokens,
            computed_tokens: response.computed_tokens,
            version: static_version(&response.version),
        };
        Arc::new(object).insert()
    }

    fn info(&self) -> pagoda_generate_info {
        pagoda_generate_info {
            struct_size: size_of::<pagoda_generate_info>() as u32,
            cached_tokens: self.cached_tokens,
            computed_tokens: self.computed_tokens,
            choice_count: self.choices.len(),
            prompt_tokens: self.prompt_tokens.as_ptr(),
            prompt_token_count: self.prompt_tokens.len(),
            prompt_logprob_count: self.prompt_logprobs.len(),
            version: self.version.as_ptr(),
        }
    }
}

impl ChoiceObject {
    fn new(choice: Choice) -> Self {
        Self {
            text: Text::new(choice.text),
            tokens: choice.tokens,
            logprobs: choice.logprobs.into_iter().map(Logprobs::new).collect(),
            finish_reason: choice.finish_reason,
            missing: choice.missing.map(Text::new),
            timings: choice.timings,
            score: choice.score,
        }
    }

    fn describe(&self) -> pagoda_generate_choice {
        pagoda_generate_choice {
            struct_size: size_of::<pagoda_generate_choice>() as u32,
            finish_reason: number_of(self.finish_reason),
            text: self.text.as_ptr(),
            text_length: self.text.len(),
            tokens: self.tokens.as_ptr(),
            token_count: self.tokens.len(),
            logprob_count: self.logprobs.len(),
            queued_ns: self.timings.queued.as_nanos() as u64,
            first_token_ns: self.timings.first_token.as_nanos() as u64,
            generation_ns: self.timings.generation.as_nanos() as u64,
            missing: self.missing.as_ref().map_or(null(), |missing| missing.as_ptr()),
            has_score: self.score.is_some().into(),
            score: self.score.unwrap_or(0.0),
        }
    }
}

const NO_LOGPROBS: pagoda_token_logprobs = pagoda_token_logprobs {
    struct_size: size_of::<pagoda_token_logprobs>() as u32,
    logprob: 0.0,
    rank: 0,
    top_count: 0,
    top_tokens: null(),
    top_logprobs: null(),
};

impl Logprobs {
    fn new(logprobs: TokenLogprobs) -> Self {
        let (top_tokens, top_logprobs) = logprobs.top.into_iter().unzip();
        Self { logprob: logprobs.logprob, rank: logprobs.rank, top_tokens, top_logprobs }
    }

    fn describe(&self) -> pagoda_token_logprobs {
        pagoda_token_logprobs {
            logprob: self.logprob,
            rank: self.rank,
            top_count: self.top_tokens.len(),
            top_tokens: self.top_tokens.as_ptr(),
            top_logprobs: self.top_logprobs.as_ptr(),
            ..NO_LOGPROBS
        }
    }
}

/// Calls `receive` with a token in C's form, which is valid during the call only.
pub(super) fn with_token(token: Token, receive: impl FnOnce(&pagoda_generate_token)) {
    let text = Text::new(token.text);
    let logprobs = token.logprobs.map(Logprobs::new);
    let described = logprobs.as_ref().map(Logprobs::describe);
    receive(&pagoda_generate_token {
        struct_size: size_of::<pagoda_generate_token>() as u32,
        choice: token.choice,
        id: token.id,
        finish_reason: token.finish_reason.map_or(PAGODA_FINISH_REASON_NONE, number_of),
        text: text.as_ptr(),
        text_length: text.len(),
        logprobs: described.as_ref().map_or(null(), std::ptr::from_ref),
    });
}

impl Text {
    fn new(text: String) -> Self {
        let mut bytes = text.into_bytes();
        bytes.push(0);
        Self(bytes)
    }

    fn as_ptr(&self) -> *const c_char {
        self.0.as_ptr().cast()
    }

    fn len(&self) -> usize {
        self.0.len() - 1
    }
}

fn number_of(reason: FinishReason) -> pagoda_finish_reason {
    match reason {
        FinishReason::Stop => PAGODA_FINISH_REASON_STOP,
        FinishReason::Length => PAGODA_FINISH_REASON_LENGTH,
        FinishReason::Cancelled => PAGODA_FINISH_REASON_CANCELLED,
        FinishReason::Timeout => PAGODA_FINISH_REASON_TIMEOUT,
    }
}

fn at<'a, T>(list: &'a [T], index: usize, argument: &str, what: &str) -> Result<&'a T> {
    list.get(index).ok_or_else(|| {
        let message = match list.len() {
            0 => format!("there are no {what}: the request did not ask for them"),
            count => format!("{index} is beyond the {count} {what} that there are"),
        };
        Error::invalid(argument, message)
    })
}
