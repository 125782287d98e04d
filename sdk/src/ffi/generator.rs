//! `pagoda_generator`: a language model, served.

use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use std::sync::Arc;

use super::args::{self, Versioned};
use super::engine_options::about_model;
use super::error::{ErrorObject, PAGODA_STATUS_OK, pagoda_error, pagoda_status};
use super::generator_options::{pagoda_generator_options, read_options};
use super::generator_request::{PromptField, ReadRequest, pagoda_generate_request, read_request};
use super::generator_response::{ResponseObject, pagoda_generate_response, pagoda_generate_token, with_token};
use super::handle::{Kind, Object, Table};
use super::kv::{self, pagoda_kv_stats};
use super::model::{pagoda_provider, provider_number};
use super::{boundary, c_text, caught, freeing};
use crate::engine::{EngineProvider, Event, GenerateResponse, Generator, GeneratorStats};
use crate::error::{Error, Result};

/// A generator: an open model folder of a language model, with the keys and values of its sequences. Requests of
/// concurrent callers run together by continuous batching. Any number of threads may use a handle at the same time.
pub struct pagoda_generator {
    _private: [u8; 0],
}

/// The state of a generator, and counters since it was opened. Start from PAGODA_GENERATOR_STATS_INIT, which sets
/// `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_generator_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Answers that ended with a stop or at their length.
    pub answered: u64,
    /// Answers that were cancelled or exceeded their time limit.
    pub ended_early: u64,
    /// Answers that failed, and requests that were rejected.
    pub failed: u64,
    /// Steps.
    pub steps: u64,
    /// Rows that were computed.
    pub computed_tokens: u64,
    /// Tokens of prompts whose keys and values were cached.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Sequences that were preempted because pages ran out.
    pub preemptions: u64,
    /// Sequences that wait.
    pub waiting: u64,
    /// Sequences that run.
    pub running: u64,
    /// Microseconds that the steps took in all.
    pub step_us: u64,
    /// Microseconds of them that the model took.
    pub model_us: u64,
    /// Tokens that were guessed and computed.
    pub drafted_tokens: u64,
    /// Those of them that were right.
    pub accepted_tokens: u64,
    /// Steps of a sequence with such tokens.
    pub drafts: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_generator_stats {
    const FIRST_SIZE: usize = 104;
}

/// Called for each token of an asynchronous request, in their order, on a thread of Pagoda. `token` and what it points
/// to are valid during the call only. It may trigger the cancel of the request; tokens that were generated before that
/// still follow.
pub type pagoda_token_callback =
    Option<unsafe extern "C" fn(user_data: *mut c_void, token: *const pagoda_generate_token)>;

/// Called once when an asynchronous request has ended, after its last token, on a thread of Pagoda. Tokens of other
/// requests wait until it returns: it must not wait for requests of the generator. It may free the generator.
///
/// `status` is PAGODA_STATUS_OK, or says why there is no response; `error` then has the message, and is freed after the
/// callback returns. The callback owns `response`: it frees or keeps it.
pub type pagoda_generate_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        status: pagoda_status,
        response: *mut pagoda_generate_response,
        error: *const pagoda_error,
    ),
>;

impl Object for Generator {
    type C = pagoda_generator;
    const KIND: Kind = Kind::Generator;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Generator> = Table::new();
        &TABLE
    }
}

/// Opens a model folder of a language model, and checks all its files. `options` may be NULL.
///
/// Ownership: the caller frees the generator. Threads: any. Errors: NOT_FOUND for a missing file; UNSUPPORTED for a
/// folder of another format or kind; MODEL for a file that was changed or truncated, and for a tokenizer or a template
/// that can not be read; INVALID_ARGUMENT; INVALID_HANDLE; CAPACITY; BUSY if another process has the store open; IO.
///
/// # Safety
/// `folder` is a C string, `options` of the size that it says with what it points to good; `generator` and `error` may
/// be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_open(
    folder: *const c_char,
    options: *const pagoda_generator_options,
    generator: *mut *mut pagoda_generator,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_open", error, || {
            let out = args::out(generator, "generator")?;
            let (folder, options) = (args::text(folder, "folder")?, read_options(options)?);
            let opened = Generator::open(folder, options).map_err(about_model)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Answers a request, and waits for the end of all its answers. A request that was cancelled or exceeded its time limit
/// is no error: the answers have what was generated until then, and their `finish_reason` says so.
///
/// Ownership: the caller keeps the arguments and frees the response. Threads: any number at once; concurrent requests
/// run together. Errors: INVALID_HANDLE; INVALID_ARGUMENT for an invalid request, and for one that does not fit into
/// the model's context or the limits of the options; CAPACITY if too many answers wait, or the sequence is larger than
/// the pool; UNSUPPORTED for a chat where the model has no template; RUNTIME if the model fails. A failed request does
/// not affect other requests.
///
/// # Safety
/// `request` is of the size that it says, its lists as long as it says, and its texts C strings; `response` and `error`
/// may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_generate(
    generator: *const pagoda_generator,
    request: *const pagoda_generate_request,
    response: *mut *mut pagoda_generate_response,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_generate", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(response, "response")?);
            let ReadRequest { request, prompt } = read_request(request)?;
            let answered = generator.generate(&request).map_err(|error| prompt.about(error))?;
            out.write(ResponseObject::into_handle(answered)?);
            Ok(())
        })
    }
}

/// Starts to answer a request, and returns at once. `token_callback` is called for each token, and may be NULL;
/// `callback` is called once, at the end. An error in the request itself is returned at once, and neither is called.
/// When this returns, all arguments may be freed. With PAGODA_DRIVER_CALLER the request proceeds in
/// pagoda_generator_step.
///
/// Ownership: the caller keeps the arguments; `user_data` must be valid until `callback` returns. Threads: any. Errors:
/// those of pagoda_generator_generate; those that occur later go to the callback.
///
/// # Safety
/// As for `pagoda_generator_generate`; the callbacks may be called with `user_data` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_generate_async(
    generator: *const pagoda_generator,
    request: *const pagoda_generate_request,
    token_callback: pagoda_token_callback,
    callback: pagoda_generate_callback,
    user_data: *mut c_void,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_generate_async", error, || {
            let generator = Generator::get(generator, "generator")?;
            let ReadRequest { request, prompt } = read_request(request)?;
            let callback = callback.ok_or_else(|| Error::invalid("callback", "NULL, where a function is needed"))?;
            let receiver = Receiver { token_callback, callback, user_data, prompt };
            let started = generator.generate_async(&request, move |event| receiver.receive(event));
            started.map_err(|error| prompt.about(error))
        })
    }
}

/// Runs one step of a generator with PAGODA_DRIVER_CALLER: the model once, for all sequences that run. `more` receives
/// 1 if there is more to do, else 0. A request that waits for the store is more to do.
///
/// Ownership: the caller keeps the arguments. Threads: any; one step runs at a time. Errors: INVALID_HANDLE;
/// INVALID_ARGUMENT for a NULL; UNSUPPORTED if the generator runs its steps itself. A failure of the model is an error
/// of the requests.
///
/// # Safety
/// `more` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_step(
    generator: *const pagoda_generator,
    more: *mut i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_step", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(more, "more")?);
            out.write(generator.step()?.into());
            Ok(())
        })
    }
}

/// Writes the tokens of the prompt of a request to `tokens`, as a request with it would have them. `count` receives
/// their number. With `tokens` NULL and `capacity` 0 only `count` is written. The other fields of the request are
/// checked, and not used.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; CAPACITY if they
/// do not fit, and then nothing is written; UNSUPPORTED for a chat where the model has no template; MODEL for a text
/// that the model's vocabulary can not spell.
///
/// # Safety
/// `request` is as for `pagoda_generator_generate`; `tokens` has room for `capacity` elements; `count` and `error` may
/// be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_tokenize(
    generator: *const pagoda_generator,
    request: *const pagoda_generate_request,
    tokens: *mut u32,
    capacity: usize,
    count: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_tokenize", error, || {
            let generator = Generator::get(generator, "generator")?;
            let ReadRequest { request, prompt } = read_request(request)?;
            args::write_tokens(tokens, capacity, count, || {
                generator.tokens(&request.prompt).map_err(|error| prompt.about(error))
            })
        })
    }
}

/// Writes the text of tokens to `buffer`; with `skip_special` 1 without special tokens. `length` receives the number of
/// bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is written. Bytes that are not UTF-8 become
/// U+FFFD, and a NUL becomes a backslash and a 0. A token that the vocabulary does not have has no text.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; CAPACITY if the
/// text does not fit, and then nothing is written; MODEL if the tokenizer fails.
///
/// # Safety
/// `tokens` has `token_count` elements; `buffer` has room for `capacity` bytes; `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_detokenize(
    generator: *const pagoda_generator,
    tokens: *const u32,
    token_count: usize,
    skip_special: i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_detokenize", error, || {
            let generator = Generator::get(generator, "generator")?;
            let (tokens, skip_special) =
                (args::tokens(tokens, token_count)?, args::flag(skip_special, "skip_special")?);
            let text = generator.tokenizer().decode(tokens, skip_special)?;
            args::write_text(buffer, capacity, length, || c_text(&text))
        })
    }
}

/// Removes all data of sessions: their keys and values, in the pool, in host memory and in the store. Pages that they
/// share with others stay. `forgotten` receives the number of sessions that were known.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
/// of one of the sessions runs; IO. After an error some sessions may be removed: repeat the call.
///
/// # Safety
/// `sessions` has `session_count` elements, which are C strings; `forgotten` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_forget(
    generator: *const pagoda_generator,
    sessions: *const *const c_char,
    session_count: usize,
    forgotten: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_forget", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(forgotten, "forgotten")?);
            out.write(generator.forget(&args::sessions(sessions, session_count)?)?);
            Ok(())
        })
    }
}

/// Evicts the keys and values of sessions from the pool to host memory and the store. Without either they are lost, and
/// must be computed again. `unloaded` receives the number of sessions that had any in the pool.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
/// of one of the sessions runs; IO.
///
/// # Safety
/// `sessions` has `session_count` elements, which are C strings; `unloaded` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_unload(
    generator: *const pagoda_generator,
    sessions: *const *const c_char,
    session_count: usize,
    unloaded: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_unload", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(unloaded, "unloaded")?);
            out.write(generator.unload(&args::sessions(sessions, session_count)?)?);
            Ok(())
        })
    }
}

/// Starts to load the keys and values of sessions from host memory and the store into the pool, and returns at once, so
/// that the next request of these sessions need not wait. Stops when the pool is full. `started` receives the number of
/// sessions that are being loaded.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
///
/// # Safety
/// `sessions` has `session_count` elements, which are C strings; `started` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_prefetch(
    generator: *const pagoda_generator,
    sessions: *const *const c_char,
    session_count: usize,
    started: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_prefetch", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(started, "started")?);
            out.write(generator.prefetch(&args::sessions(sessions, session_count)?)?);
            Ok(())
        })
    }
}

/// Drops all sessions, and all prefixes that no request uses now, from the pool; with `stored` 1 from host memory and
/// the store, too. `cleared` receives the number of histories that there were.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
/// runs; IO.
///
/// # Safety
/// `cleared` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_clear(
    generator: *const pagoda_generator,
    stored: i32,
    cleared: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_clear", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out(cleared, "cleared")?);
            out.write(generator.clear(args::flag(stored, "stored")?)?);
            Ok(())
        })
    }
}

/// Sets whether tokens are guessed where requests allow it (`max_draft`), from the next step on: 1, as when the generator was
/// opened, or 0. With `clear` 1 the next step also forgets how good guesses were and what they cost, and counts them from 0
/// again.
///
/// Ownership: the caller keeps the generator. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_set_speculation(
    generator: *const pagoda_generator,
    on: i32,
    clear: i32,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_set_speculation", error, || {
            let generator = Generator::get(generator, "generator")?;
            let (on, clear) = (args::flag(on, "on")?, args::flag(clear, "clear")?);
            generator.set_speculation(on);
            if clear {
                generator.clear_speculation();
            }
            Ok(())
        })
    }
}

/// Gets where the model runs: PAGODA_PROVIDER_CPU with `device_id` -1, or PAGODA_PROVIDER_CUDA with the number of the
/// GPU. Also writes to `buffer` why PAGODA_PROVIDER_AUTO chose the CPU; "" in all other cases. `length` receives the
/// number of bytes with the NUL. With `buffer` NULL and `capacity` 0 the text is not written.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL;
/// CAPACITY if the text does not fit, and then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `provider`, `device_id`, `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_provider(
    generator: *const pagoda_generator,
    provider: *mut pagoda_provider,
    device_id: *mut i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_provider", error, || {
            let generator = Generator::get(generator, "generator")?;
            let (out_provider, out_device) = (args::out(provider, "provider")?, args::out(device_id, "device_id")?);
            let EngineProvider { provider, device_id, reason } = generator.provider();
            args::write_text(buffer, capacity, length, || c_text(&reason))?;
            out_provider.write(provider_number(provider));
            out_device.write(device_id.map_or(-1, u32::cast_signed));
            Ok(())
        })
    }
}

/// Writes the pagoda.json of the model to `buffer`: its special tokens, defaults of generation, limits and version, as
/// JSON. `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is
/// written.
///
/// Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
/// if the text does not fit, and then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_info(
    generator: *const pagoda_generator,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_info", error, || {
            let generator = Generator::get(generator, "generator")?;
            args::write_text(buffer, capacity, length, || c_text(generator.folder().json()))
        })
    }
}

/// Gets the state and the counters of a generator.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_get_stats(
    generator: *const pagoda_generator,
    stats: *mut pagoda_generator_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_get_stats", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out_struct(stats, "stats")?);
            out.write(&stats_of(&generator.stats()));
            Ok(())
        })
    }
}

/// Gets the statistics of the cache of keys and values. Owners are sequences and sessions.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_generator_get_kv_stats(
    generator: *const pagoda_generator,
    stats: *mut pagoda_kv_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_generator_get_kv_stats", error, || {
            let (generator, out) = (Generator::get(generator, "generator")?, args::out_struct(stats, "stats")?);
            out.write(&kv::stats_of(&generator.kv_stats()));
            Ok(())
        })
    }
}

/// Frees a generator. NULL is allowed. Asynchronous requests that wait or run are cancelled, and their callbacks called
/// first; the pool is written to the store if there is one. This waits for both. If another thread is in a call with the
/// handle, that call goes on to its end and does the waiting instead. In a callback of the generator, the other
/// callbacks are called after it returns.
///
/// Ownership: takes the generator. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_generator_free(generator: *mut pagoda_generator) -> pagoda_status {
    freeing("pagoda_generator_free", || Generator::remove(generator, "generator"))
}

fn stats_of(stats: &GeneratorStats) -> pagoda_generator_stats {
    pagoda_generator_stats {
        struct_size: size_of::<pagoda_generator_stats>() as u32,
        answered: stats.answered,
        ended_early: stats.ended_early,
        failed: stats.failed,
        steps: stats.steps,
        computed_tokens: stats.computed_tokens,
        cached_tokens: stats.cached_tokens,
        generated_tokens: stats.generated_tokens,
        preemptions: stats.preemptions,
        waiting: stats.waiting,
        running: stats.running,
        step_us: stats.step_us,
        model_us: stats.model_us,
        drafted_tokens: stats.drafted_tokens,
        accepted_tokens: stats.accepted_tokens,
        drafts: stats.drafts,
    }
}

/// The callbacks of an asynchronous request.
struct Receiver {
    token_callback: pagoda_token_callback,
    callback: unsafe extern "C" fn(*mut c_void, pagoda_status, *mut pagoda_generate_response, *const pagoda_error),
    user_data: *mut c_void,
    prompt: PromptField,
}

// SAFETY: the header says that the callbacks are called on another thread.
unsafe impl Send for Receiver {}

impl Receiver {
    fn receive(&self, event: Event) {
        match (event, self.token_callback) {
            (Event::Token(token), Some(callback)) => {
                // SAFETY: the caller gave the two for such calls; what is passed lives during it.
                with_token(token, |token| unsafe { callback(self.user_data, std::ptr::from_ref(token)) });
            }
            (Event::Token(_), None) => {}
            (Event::End(outcome), _) => self.end(outcome),
        }
    }

    fn end(&self, outcome: Result<GenerateResponse>) {
        let outcome = outcome.map_err(|error| self.prompt.about(error));
        let made = caught("pagoda_generator_generate_async, when done", || ResponseObject::into_handle(outcome?));
        match made {
            // SAFETY: the caller gave the two for this call, which happens once.
            Ok(response) => unsafe { (self.callback)(self.user_data, PAGODA_STATUS_OK, response, null_mut()) },
            Err(error) => {
                let status = error.status() as pagoda_status;
                let handle = ErrorObject::into_handle(error);
                // SAFETY: as above.
                unsafe { (self.callback)(self.user_data, status, null_mut(), handle) };
                if let Err(error) = ErrorObject::remove(handle, "error") {
                    log::error!("a pagoda_generate_callback freed its error, which it must not: {error}");
                }
            }
        }
    }
}
