//! `pagoda_engine`: a model folder, served.

use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use super::args::{self, Versioned};
use super::engine_options::{about_options, pagoda_engine_options, pagoda_rank_request, read_options, read_request};
use super::error::{ErrorObject, PAGODA_OK, pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, c_text, freeing};
use crate::engine::{Engine, RankResponse};
use crate::error::{Error, Result};

/// A ranking engine: a model folder that is being served, with its tables and the keys and values of its users. Any
/// number of threads may use one handle at the same time.
pub struct pagoda_engine {
    _private: [u8; 0],
}

/// How a request was answered. Start from PAGODA_RANK_RESPONSE_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_rank_response {
    /// The size of this struct.
    pub struct_size: u32,
    /// How many other requests ran in the same batch.
    pub batched_with: u32,
    /// Rows of the history that were cached.
    pub cached_rows: u64,
    /// Rows of the history that were computed.
    pub computed_rows: u64,
    /// Nanoseconds from when it came to when its batch was put together.
    pub queue_ns: u64,
    /// Nanoseconds that ONNX Runtime ran.
    pub run_ns: u64,
}

/// What an engine did since it was opened. Start from PAGODA_RANK_STATS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_rank_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed, for whatever reason.
    pub failed: u64,
    /// Batches that ran.
    pub batches: u64,
    /// Rows of histories that were cached.
    pub cached_rows: u64,
    /// Rows of histories that were computed.
    pub computed_rows: u64,
    /// Requests that wait now.
    pub waiting: u64,
    /// Users whose events are remembered.
    pub remembered_users: u64,
    /// Bytes that those take.
    pub remembered_bytes: u64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_rank_response {
    const FIRST_SIZE: usize = 40;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_rank_stats {
    const FIRST_SIZE: usize = 72;
}

/// Called once when an asynchronous request has ended, on a thread of Pagoda's, or on the one that cancels it; it must
/// not wait for other requests of the engine, which may be answered on the same thread, and may free the engine.
/// `status` is PAGODA_OK or says why there are no scores; then `error` has the words, and is freed after the callback
/// returns. `scores` has a score for each candidate and task, those of the first candidate first. `scores` and
/// `response` are valid during the callback only.
pub type pagoda_rank_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        status: pagoda_status,
        scores: *const f32,
        score_count: usize,
        response: *const pagoda_rank_response,
        error: *const pagoda_error,
    ),
>;

impl Object for Engine {
    type C = pagoda_engine;
    const KIND: Kind = Kind::Engine;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Engine> = Table::new();
        &TABLE
    }
}

/// Opens a model folder, checks all its files, and runs the model once. `options` may be NULL.
///
/// Ownership: the caller frees the engine. Threads: any. Errors: NOT_FOUND for what is not there, UNSUPPORTED for a
/// folder of another format, MODEL for files that were changed or cut and for weights that are not finite,
/// INVALID_ARGUMENT, INVALID_HANDLE, CAPACITY, BUSY if another process has the store open, IO.
///
/// # Safety
/// `folder` is a C string, `options` of the size that it says with what it points to good; `engine` and `error` may be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_open(
    folder: *const c_char,
    options: *const pagoda_engine_options,
    engine: *mut *mut pagoda_engine,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_open", error, || {
            let out = args::out(engine, "engine")?;
            let (folder, options) = (args::text(folder, "folder")?, read_options(options)?);
            let opened = Engine::open(folder, options.clone()).map_err(|error| about_options(&options, error))?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Scores candidates and waits for it. `scores` gets a score for each candidate and task, those of the first candidate,
/// in the order of the tasks, then those of the next; `score_count`, how many it has room for, must be candidates x
/// tasks. `response` is NULL or gets how it went.
///
/// Ownership: takes nothing over. Threads: any number at once; requests that come at the same time may run together.
/// Errors: INVALID_HANDLE; INVALID_ARGUMENT for what can not be asked; NOT_FOUND for features that the model does not
/// have, and about "start" for a gap: events before it are not known here, so send the whole history. CAPACITY if too
/// many requests wait or the history is larger than the cache; CANCELLED if it was cancelled or its time is over;
/// RUNTIME if the model fails. Whatever fails, fails alone, and leaves nothing of itself behind; only what was
/// cancelled or out of time while it ran with others may be kept, and what fails about "score_count" because a swap
/// changed the tasks is.
///
/// # Safety
/// `request` is of the size that it says, and its lists as long as it says, with names that are C strings; `scores` has
/// room for `score_count` numbers; they, `response` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_rank(
    engine: *const pagoda_engine,
    request: *const pagoda_rank_request,
    scores: *mut f32,
    score_count: usize,
    response: *mut pagoda_rank_response,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_rank", error, || {
            let engine = Engine::get(engine, "engine")?;
            let request = read_request(request)?;
            let out = match response.is_null() {
                true => None,
                false => Some(args::out_struct(response, "response")?),
            };
            let room = args::out_list(scores, score_count, "scores")?
                .ok_or_else(|| Error::invalid("scores", "NULL, where the result is to be written"))?;
            let (candidates, tasks) = (request.candidates.rows(), engine.folder().tasks.len());
            if score_count != candidates * tasks {
                let message = format!("{score_count}, where {candidates} candidates have {tasks} scores each");
                return Err(Error::invalid("score_count", message));
            }
            let answer = engine.rank(&request).map_err(about_request)?;
            // A swap may have changed how many tasks there are.
            if answer.scores.len() != score_count {
                let message = format!("{score_count}, where the model now has {} scores for them", answer.scores.len());
                return Err(Error::invalid("score_count", message));
            }
            for (room, &score) in room.iter_mut().zip(&answer.scores) {
                room.write(score);
            }
            if let Some(out) = out {
                out.write(&how(&answer));
            }
            Ok(())
        })
    }
}

/// Has candidates scored on a thread of Pagoda's and returns at once. What is wrong with the request itself is said at
/// once, and then `callback` is not called. Everything that was passed may be freed as soon as this returns.
///
/// Ownership: takes nothing over. Threads: any. Errors: as pagoda_engine_rank; those that are found while it runs go to
/// the callback.
///
/// # Safety
/// As for `pagoda_engine_rank`; `callback` may be called with `user_data` from any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_rank_async(
    engine: *const pagoda_engine,
    request: *const pagoda_rank_request,
    callback: pagoda_rank_callback,
    user_data: *mut c_void,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_rank_async", error, || {
            let engine = Engine::get(engine, "engine")?;
            let request = read_request(request)?;
            let callback = callback.ok_or_else(|| Error::invalid("callback", "NULL, where a function is needed"))?;
            let done = Done { callback, user_data };
            engine.rank_async(&request, move |outcome| done.call(outcome)).map_err(about_request)
        })
    }
}

/// Serves another model folder from now on. It is opened and run once beside the old one; requests that came before end
/// on that, no request fails, and nothing that the old model computed is used for the new one. On an error all stays as
/// it was.
///
/// Ownership: takes nothing over. Threads: any. Errors: as pagoda_engine_open; BUSY also if the version was served a
/// moment ago and is still being closed.
///
/// # Safety
/// `folder` is a C string; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_swap(
    engine: *const pagoda_engine,
    folder: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_swap", error, || Engine::get(engine, "engine")?.swap(args::text(folder, "folder")?))
    }
}

/// Forgets users: their events, and their keys and values in the version that is served now, also those in the store.
/// What another version left in the store is found when that is served again: forget them there too. `forgotten` gets
/// how many were known.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, BUSY if a request of one of
/// them runs now or is just being put into a batch, IO. After an error some of it may be forgotten: repeat the call.
///
/// # Safety
/// `users` has `user_count` elements; `forgotten` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_forget(
    engine: *const pagoda_engine,
    users: *const u64,
    user_count: usize,
    forgotten: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_forget", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out(forgotten, "forgotten")?);
            out.write(engine.forget(args::users(users, user_count)?)?);
            Ok(())
        })
    }
}

/// How many tasks the model that is served now has: the scores of one candidate.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `tasks` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_tasks(
    engine: *const pagoda_engine,
    tasks: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_tasks", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out(tasks, "tasks")?);
            out.write(engine.folder().tasks.len());
            Ok(())
        })
    }
}

/// The pagoda.json of the model that is served now: its features, tasks, limits and version, as JSON. With `buffer`
/// NULL and `capacity` 0 only `length` is written: the bytes needed, with the NUL at the end.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL, CAPACITY if the
/// text does not fit; then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_info(
    engine: *const pagoda_engine,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_info", error, || {
            let engine = Engine::get(engine, "engine")?;
            args::write_text(buffer, capacity, length, || c_text(engine.folder().json()))
        })
    }
}

/// What an engine did since it was opened.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT.
///
/// # Safety
/// `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_stats(
    engine: *const pagoda_engine,
    stats: *mut pagoda_rank_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_stats", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out_struct(stats, "stats")?);
            let did = engine.stats();
            out.write(&pagoda_rank_stats {
                struct_size: size_of::<pagoda_rank_stats>() as u32,
                answered: did.answered,
                failed: did.failed,
                batches: did.batches,
                cached_rows: did.cached_rows,
                computed_rows: did.computed_rows,
                waiting: did.waiting,
                remembered_users: did.remembered_users,
                remembered_bytes: did.remembered_bytes,
            });
            Ok(())
        })
    }
}

/// Frees an engine. NULL is fine. Requests that wait are answered first, and what is cached is stored if there is a
/// store; this waits for both, unless another thread is in a call with the handle: then that one does. In a callback of
/// the engine, what that request uses is closed after the callback returns.
///
/// Ownership: takes it over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_engine_free(engine: *mut pagoda_engine) -> pagoda_status {
    freeing("pagoda_engine_free", || Engine::remove(engine, "engine"))
}

/// An error about a part of the request, said of that part.
fn about_request(error: Error) -> Error {
    let part = match error.argument() {
        Some("events") => "event_keys",
        Some("events.times") => "event_times",
        Some("candidates") => "candidate_keys",
        Some("timeout") => "timeout_us",
        Some(part @ ("start" | "user_keys")) => part,
        _ => return error,
    };
    let named = format!("request.{part}");
    error.about(named)
}

fn how(answer: &RankResponse) -> pagoda_rank_response {
    pagoda_rank_response {
        struct_size: size_of::<pagoda_rank_response>() as u32,
        batched_with: answer.batched_with as u32,
        cached_rows: answer.cached_rows,
        computed_rows: answer.computed_rows,
        queue_ns: answer.queue_time.as_nanos() as u64,
        run_ns: answer.run_time.as_nanos() as u64,
    }
}

/// Whom to tell that an asynchronous request has ended.
struct Done {
    callback: unsafe extern "C" fn(
        *mut c_void,
        pagoda_status,
        *const f32,
        usize,
        *const pagoda_rank_response,
        *const pagoda_error,
    ),
    user_data: *mut c_void,
}

// SAFETY: the header says that the callback is called on another thread.
unsafe impl Send for Done {}

impl Done {
    fn call(self, outcome: Result<RankResponse>) {
        match outcome {
            Ok(answer) => {
                let (scores, response) = (&answer.scores, how(&answer));
                let list = (scores.as_ptr(), scores.len());
                // SAFETY: the caller gave the two for this call, which happens once; what is passed lives during it.
                unsafe { (self.callback)(self.user_data, PAGODA_OK, list.0, list.1, &raw const response, null_mut()) };
            }
            Err(error) => {
                let error = about_request(error);
                let status = error.status() as pagoda_status;
                let handle = ErrorObject::into_handle(error);
                // SAFETY: as above.
                unsafe { (self.callback)(self.user_data, status, null(), 0, null(), handle) };
                if let Err(error) = ErrorObject::remove(handle, "error") {
                    log::error!("a pagoda_rank_callback freed its error, which it must not: {error}");
                }
            }
        }
    }
}
