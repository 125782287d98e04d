//! `pagoda_engine`: a model folder, served.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, LazyLock};

use super::args::{self, Versioned};
use super::embedding::{self, pagoda_table_stats};
use super::engine_options::{about_options, pagoda_engine_options, pagoda_rank_request, read_options, read_request};
use super::error::{ErrorObject, PAGODA_STATUS_OK, pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::kv::{self, pagoda_kv_stats};
use super::model::{pagoda_provider, provider_number};
use super::{boundary, c_text, freeing};
use crate::engine::{Engine, EngineProvider, EngineStats, RankResponse};
use crate::error::{Error, Result};
use crate::sync::RwLock;

/// A ranking engine: an open model folder with its embedding tables and the keys and values of its users. Requests of
/// concurrent callers run in batches. Any number of threads may use a handle at the same time.
pub struct pagoda_engine {
    _private: [u8; 0],
}

/// How a request was answered. Start from PAGODA_RANK_RESPONSE_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_rank_response {
    /// The size of this struct.
    pub struct_size: u32,
    /// The number of other requests in the same batch.
    pub batched_with: u32,
    /// Rows of the history that were cached.
    pub cached_rows: u64,
    /// Rows of the history that were computed.
    pub computed_rows: u64,
    /// Nanoseconds in the queue, until the batch was formed.
    pub queue_ns: u64,
    /// Nanoseconds that ONNX Runtime ran.
    pub run_ns: u64,
    /// The number of tasks of the model that answered: the scores of one candidate.
    pub tasks: usize,
    /// The version of the model that answered, as in its pagoda.json. The text is static: it is never freed.
    pub version: *const c_char,
}

/// The state of an engine, and counters since it was opened. Start from PAGODA_ENGINE_STATS_INIT, which sets
/// `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_engine_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests that failed, for any reason.
    pub failed: u64,
    /// Batches.
    pub batches: u64,
    /// Rows of histories that were cached.
    pub cached_rows: u64,
    /// Rows of histories that were computed.
    pub computed_rows: u64,
    /// Requests in the queue.
    pub waiting: u64,
    /// Users in the event log.
    pub remembered_users: u64,
    /// Bytes of the event log.
    pub remembered_bytes: u64,
}

// SAFETY: numbers and a pointer in C's layout, the size first.
unsafe impl Versioned for pagoda_rank_response {
    const FIRST_SIZE: usize = 56;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_engine_stats {
    const FIRST_SIZE: usize = 72;
}

/// Called once when an asynchronous request has ended, on a thread of Pagoda or on the thread that cancels the request.
/// It must not wait for other requests of the engine, which may be answered on the same thread. It may free the engine.
///
/// `status` is PAGODA_STATUS_OK, or says why there are no scores; `error` then has the message, and is freed after the
/// callback returns. `scores` has a score for each candidate and task: those of the first candidate, then those of the
/// next. `scores` and `response` are valid during the callback only.
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
/// Ownership: the caller frees the engine. Threads: any. Errors: NOT_FOUND for a missing file; UNSUPPORTED for a folder
/// of another format; MODEL for a file that was changed or truncated, and for weights that are not finite;
/// INVALID_ARGUMENT; INVALID_HANDLE; CAPACITY; BUSY if another process has the store open; IO.
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
            let opened = Engine::open(folder, options).map_err(about_options)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Scores candidates, and waits for the result. `scores` receives a score for each candidate and task: those of the
/// first candidate in the order of the tasks, then those of the next. `score_count` is the capacity of `scores`; it
/// must be candidates times tasks (pagoda_engine_tasks). `response` may be NULL.
///
/// If a swap changes the number of tasks before or during this call, it fails with INVALID_ARGUMENT about
/// "score_count". Get the number of tasks again, and repeat the call.
///
/// Ownership: the caller keeps the arguments. Threads: any number at once; concurrent requests may run in one batch.
/// Errors: INVALID_HANDLE; INVALID_ARGUMENT for an invalid request; NOT_FOUND for a feature that the model does not
/// have, and about "request.start" for a gap: events before `start` are missing here, so send the whole history;
/// CAPACITY if the queue is full, or the history is larger than the pool; CANCELLED if the request was cancelled or
/// exceeded its time limit; RUNTIME if the model fails. A failed request does not affect other requests. Its events are
/// not kept, with two exceptions: they may be kept if the request was cancelled while its batch ran, and after the
/// "score_count" error above.
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

/// Starts to score candidates on a thread of Pagoda, and returns at once. An error in the request itself is returned at
/// once, and `callback` is not called. When this returns, all arguments may be freed.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_engine_rank; those that occur later
/// go to the callback.
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

/// Replaces the model folder that is served. The new one is opened and run once while the old one still serves.
/// Requests that arrived before the swap are answered by the old model; no request fails. Keys and values of the old
/// model are not used for the new one. On an error the old folder stays in service.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_engine_open; BUSY also if this
/// version was swapped out a moment ago and is still being closed.
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
        boundary("pagoda_engine_swap", error, || {
            Engine::get(engine, "engine")?.swap(args::text(folder, "folder")?).map_err(about_options)
        })
    }
}

/// Removes all data of users: their events, and their keys and values in the version that is served, also in the store.
/// What another version left in the store is not removed: swap to that version, and call this again. `forgotten`
/// receives the number of users that were known.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
/// of one of the users runs or is being put into a batch; IO. After an error some users may be removed: repeat the
/// call.
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

/// Starts to load the keys and values of users from host memory and the store into the pool, and returns at once, so
/// that the next request of these users need not wait. Stops when the pool is full. `started` receives the number of
/// histories that are being loaded.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; IO.
///
/// # Safety
/// `users` has `user_count` elements; `started` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_prefetch(
    engine: *const pagoda_engine,
    users: *const u64,
    user_count: usize,
    started: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_prefetch", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out(started, "started")?);
            out.write(engine.prefetch(args::users(users, user_count)?)?);
            Ok(())
        })
    }
}

/// Evicts the keys and values of users from the pool to host memory and the store. Without either they are lost, and
/// must be computed again. `unloaded` receives the number of users that had any in the pool.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; BUSY if a request
/// of one of the users runs or is being put into a batch; IO.
///
/// # Safety
/// `users` has `user_count` elements; `unloaded` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_unload(
    engine: *const pagoda_engine,
    users: *const u64,
    user_count: usize,
    unloaded: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_unload", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out(unloaded, "unloaded")?);
            out.write(engine.unload(args::users(users, user_count)?)?);
            Ok(())
        })
    }
}

/// Gets where the model that is served runs: PAGODA_PROVIDER_CPU with `device_id` -1, or PAGODA_PROVIDER_CUDA with the
/// number of the GPU. Also writes to `buffer` why PAGODA_PROVIDER_AUTO chose the CPU; "" in all other cases. `length`
/// receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 the text is not written.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL;
/// CAPACITY if the text does not fit, and then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `provider`, `device_id`, `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_provider(
    engine: *const pagoda_engine,
    provider: *mut pagoda_provider,
    device_id: *mut i32,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_provider", error, || {
            let engine = Engine::get(engine, "engine")?;
            let (out_provider, out_device) = (args::out(provider, "provider")?, args::out(device_id, "device_id")?);
            let EngineProvider { provider, device_id, reason } = engine.provider();
            args::write_text(buffer, capacity, length, || c_text(&reason))?;
            out_provider.write(provider_number(provider));
            out_device.write(device_id.map_or(-1, u32::cast_signed));
            Ok(())
        })
    }
}

/// Gets the number of tasks of the model that is served: the scores of one candidate.
///
/// Ownership: the caller keeps the engine. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
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

/// Writes the pagoda.json of the model that is served to `buffer`: its features, tasks, limits and version, as JSON.
/// `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only `length` is written.
///
/// Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
/// if the text does not fit, and then nothing is written.
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

/// Writes the names of the embedding tables that have statistics to `buffer`, one a line; "" if the model has its
/// tables in the graph. `length` receives the number of bytes with the NUL. With `buffer` NULL and `capacity` 0 only
/// `length` is written.
///
/// Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; CAPACITY
/// if the text does not fit, and then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_tables(
    engine: *const pagoda_engine,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_tables", error, || {
            let engine = Engine::get(engine, "engine")?;
            args::write_text(buffer, capacity, length, || c_text(&engine.tables().join("\n")))
        })
    }
}

/// Gets the state and the counters of an engine.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_get_stats(
    engine: *const pagoda_engine,
    stats: *mut pagoda_engine_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_get_stats", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out_struct(stats, "stats")?);
            out.write(&stats_of(&engine.stats()));
            Ok(())
        })
    }
}

/// Gets the statistics of the cache of keys and values. All are 0 if nothing is cached; `pages` is 0 only then. A swap
/// starts a new cache, and with it new counters.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`.
///
/// # Safety
/// `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_get_kv_stats(
    engine: *const pagoda_engine,
    stats: *mut pagoda_kv_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_get_kv_stats", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out_struct(stats, "stats")?);
            out.write(&kv::stats_of(&engine.kv_stats().unwrap_or_default()));
            Ok(())
        })
    }
}

/// Gets the statistics of an embedding table, by its name in pagoda.json. A swap opens new tables, and with them new
/// counters.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`; NOT_FOUND for an unknown table, and for one that is part of the graph.
///
/// # Safety
/// `table` is a C string; `stats` is of the size that it says; it and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_engine_get_table_stats(
    engine: *const pagoda_engine,
    table: *const c_char,
    stats: *mut pagoda_table_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_engine_get_table_stats", error, || {
            let (engine, out) = (Engine::get(engine, "engine")?, args::out_struct(stats, "stats")?);
            out.write(&embedding::stats_of(&engine.table_stats(args::text(table, "table")?)?));
            Ok(())
        })
    }
}

/// Frees an engine. NULL is allowed. Queued requests are answered first, and the pool is written to the store if there
/// is one; this waits for both. If another thread is in a call with the handle, that call does the waiting instead. In
/// a callback of the engine, what the request uses is closed after the callback returns.
///
/// Ownership: takes the engine. Threads: any. Errors: INVALID_HANDLE, which is also logged.
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

fn stats_of(stats: &EngineStats) -> pagoda_engine_stats {
    pagoda_engine_stats {
        struct_size: size_of::<pagoda_engine_stats>() as u32,
        answered: stats.answered,
        failed: stats.failed,
        batches: stats.batches,
        cached_rows: stats.cached_rows,
        computed_rows: stats.computed_rows,
        waiting: stats.waiting,
        remembered_users: stats.remembered_users,
        remembered_bytes: stats.remembered_bytes,
    }
}

fn how(answer: &RankResponse) -> pagoda_rank_response {
    pagoda_rank_response {
        struct_size: size_of::<pagoda_rank_response>() as u32,
        batched_with: answer.batched_with as u32,
        cached_rows: answer.cached_rows,
        computed_rows: answer.computed_rows,
        queue_ns: answer.queue_time.as_nanos() as u64,
        run_ns: answer.run_time.as_nanos() as u64,
        tasks: answer.tasks,
        version: static_version(&answer.version).as_ptr(),
    }
}

/// The version of a model as a text that callers may keep. The texts of all versions that answered in this process
/// stay: 65 bytes each.
pub(super) fn static_version(version: &Arc<str>) -> &'static CStr {
    static VERSIONS: LazyLock<RwLock<HashMap<Arc<str>, &'static CStr>>> = LazyLock::new(RwLock::default);
    if let Some(known) = VERSIONS.read().get(version) {
        return known;
    }
    VERSIONS.write().entry(Arc::clone(version)).or_insert_with(|| Box::leak(c_text(version).into_boxed_c_str()))
}

/// The callback of an asynchronous request.
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
                unsafe {
                    (self.callback)(self.user_data, PAGODA_STATUS_OK, list.0, list.1, &raw const response, null_mut())
                };
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
