//! `pagoda_embedding`: tables of embedding rows.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing};
use crate::embedding::{Combiner, EmbeddingTable, Embeddings, Miss, PsJson, Reach};
use crate::error::{Error, Result};

/// What a lookup does about keys that the cache does not have.
pub type pagoda_miss = i32;

/// What the table's hit_rate_threshold says: below it as PAGODA_MISS_WAIT, otherwise as PAGODA_MISS_DEFAULT.
pub const PAGODA_MISS_BY_HIT_RATE: pagoda_miss = 0;
/// They are fetched from the floors below, and their rows returned.
pub const PAGODA_MISS_WAIT: pagoda_miss = 1;
/// They get the table's default vector, and are inserted in the background.
pub const PAGODA_MISS_DEFAULT: pagoda_miss = 2;
/// They are fetched; those that have not arrived after `limit_us` get the default vector, and are inserted when they
/// arrive.
pub const PAGODA_MISS_WITHIN: pagoda_miss = 3;

/// How the rows of a slot's keys become one vector.
pub type pagoda_combiner = i32;

/// Their sum.
pub const PAGODA_COMBINER_SUM: pagoda_combiner = 0;
/// Their mean.
pub const PAGODA_COMBINER_MEAN: pagoda_combiner = 1;
/// Their sum, divided by the square root of how many there are.
pub const PAGODA_COMBINER_SQRTN: pagoda_combiner = 2;

/// When lookups see a change.
pub type pagoda_reach = i32;

/// When the call returns.
pub const PAGODA_REACH_AT_ONCE: pagoda_reach = 0;
/// When the cache is refreshed next; the floors below have it when the call returns.
pub const PAGODA_REACH_BY_REFRESH: pagoda_reach = 1;

/// The most keys of one call.
const MAX_KEYS: usize = 1 << 28;

/// Tables of embedding rows, of any number of models: a cache over host memory, a Redis Cluster, and disk, as a
/// configuration says. Any number of threads may use one handle at the same time.
pub struct pagoda_embedding {
    _private: [u8; 0],
}

/// How to look up. Start from PAGODA_LOOKUP_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_lookup_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// What is done about keys that the cache does not have; default PAGODA_MISS_BY_HIT_RATE.
    pub miss: pagoda_miss,
    /// With PAGODA_MISS_WITHIN: how many microseconds are waited; default 0.
    pub limit_us: u64,
}

/// What a table did since it was opened. Start from PAGODA_TABLE_STATS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_table_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Lookups.
    pub lookups: u64,
    /// Keys, the different ones of each lookup; where the cache had all of them, every key as it was given.
    pub keys: u64,
    /// Those that the cache had.
    pub hits: u64,
    /// Those that got the default vector.
    pub defaults: u64,
    /// Keys that were to be inserted in the background and found no room in the queue.
    pub dropped: u64,
    /// Rows that are in the cache.
    pub cached_rows: u64,
    /// Rows that it has room for.
    pub cache_rows: u64,
    /// Bytes of memory that the cache and the floors take, about.
    pub memory: u64,
    /// For how many seconds at most a change that did not go through this process may not have been seen; negative if it
    /// may not be seen at all, because nothing refreshes the cache.
    pub stale_seconds: i64,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_lookup_options {
    const FIRST_SIZE: usize = 16;
}

// SAFETY: as above.
unsafe impl Versioned for pagoda_table_stats {
    const FIRST_SIZE: usize = 80;
}

impl Object for Embeddings {
    type C = pagoda_embedding;
    const KIND: Kind = Kind::Embedding;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Embeddings> = Table::new();
        &TABLE
    }
}

/// Opens the tables of a configuration file, HugeCTR's ps.json or one with Pagoda's own words. Relative paths in it are
/// relative to its folder.
///
/// Ownership: the caller frees the tables. Threads: any. Errors: NOT_FOUND for a file that is not there; INVALID_ARGUMENT
/// for a key or value that is not understood, which the message names; UNSUPPORTED for what there is none of; BUSY if
/// another process has a table open, or the source of one was changed while its table file was built; CAPACITY if there
/// is no memory; IO.
///
/// # Safety
/// `path` is a C string; `embedding` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_open(
    path: *const c_char,
    embedding: *mut *mut pagoda_embedding,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_open", error, || {
            let out = args::out(embedding, "embedding")?;
            let path = args::text(path, "path")?;
            let opened = Embeddings::open_file(path).map_err(about_path)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// How much memory the tables of a configuration file will take in this process, and how much disk their files, about;
/// nothing is opened but the headers of the tables. `memory` and `disk` are NULL or get a number of bytes.
///
/// Ownership: takes nothing over. Threads: any. Errors: as pagoda_embedding_open.
///
/// # Safety
/// `path` is a C string; `memory`, `disk` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_estimate(
    path: *const c_char,
    memory: *mut u64,
    disk: *mut u64,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_estimate", error, || {
            let (memory, disk) = (args::out_list(memory, 1, "memory")?, args::out_list(disk, 1, "disk")?);
            let config = PsJson::from_file(args::text(path, "path")?).map_err(about_path)?;
            let estimate = Embeddings::estimate(&config.options).map_err(about_path)?;
            memory.map(|memory| {
                memory[0].write(estimate.iter().fold(0, |sum: u64, table| sum.saturating_add(table.memory)))
            });
            disk.map(|disk| disk[0].write(estimate.iter().fold(0, |sum: u64, table| sum.saturating_add(table.disk))));
            Ok(())
        })
    }
}

/// Adds a model while others serve. `model` is JSON, an element of the configuration's `models`; relative paths in it are
/// relative to `folder`, or to the working directory if that is NULL. Tables that another model has already are shared.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE; else as pagoda_embedding_open.
///
/// # Safety
/// `model` is a C string, `folder` NULL or one; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_add(
    embedding: *const pagoda_embedding,
    model: *const c_char,
    folder: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_add", error, || {
            let embedding = Embeddings::get(embedding, "embedding")?;
            let (model, folder) = (args::text(model, "model")?, args::optional_text(folder, "folder")?);
            let model = PsJson::model_from_json(model, folder.map(std::path::Path::new))?;
            embedding.add(&model).map_err(|error| told_of(error, "model"))
        })
    }
}

/// Takes a model out of service. Its tables go when no other model has them; lookups that are under way end well.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a model that there
/// is not.
///
/// # Safety
/// `model` is a C string; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_retire(
    embedding: *const pagoda_embedding,
    model: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_retire", error, || {
            Embeddings::get(embedding, "embedding")?.retire(args::text(model, "model")?)
        })
    }
}

/// How many numbers a row of a table has. A table is named `model/table`, or `table` alone if that is no other's name.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not.
///
/// # Safety
/// `table` is a C string; `dim` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_dim(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    dim: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_dim", error, || {
            let out = args::out(dim, "dim")?;
            out.write(named(embedding, table)?.dim());
            Ok(())
        })
    }
}

/// Looks keys up, any number of times each. `numbers` gets the row of each key, or the table's default vector, one after
/// the other; `number_count` says for how many numbers there is room, key_count times what pagoda_embedding_dim says.
/// `found` is NULL or gets a 1 for each key whose row it is and a 0 for each that got the default. `options` may be NULL.
/// A floor that does not answer is no error: its keys get the default vector, which is counted and logged.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements, `options` is NULL or of the size that it says; `numbers` has room
/// for `number_count` numbers and `found`, unless it is NULL, for `key_count` bytes; they and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_lookup(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    keys: *const i64,
    key_count: usize,
    options: *const pagoda_lookup_options,
    numbers: *mut f32,
    number_count: usize,
    found: *mut u8,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_lookup", error, || {
            let (table, keys) = (named(embedding, table)?, read_keys(keys, key_count)?);
            let miss = read_options(options)?;
            let found = args::out_list(found, key_count, "found")?;
            let numbers = room(numbers, number_count, key_count, table.dim(), "numbers")?;
            let mut marks = vec![false; key_count];
            table.lookup(keys, numbers, &mut marks, miss)?;
            write_marks(found, &marks);
            Ok(())
        })
    }
}

/// Looks keys up and combines them: slot i gets one vector of the keys from `offsets[i]` on to before `offsets[i + 1]`, or
/// zeros if there are none. `offsets` begin with 0, do not go down, and end with `key_count`; there is one more of them than
/// slots. Everything else is as in pagoda_embedding_lookup, with a vector for each slot.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not.
///
/// # Safety
/// As for pagoda_embedding_lookup; `offsets` has `offset_count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_pool(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    keys: *const i64,
    key_count: usize,
    offsets: *const i64,
    offset_count: usize,
    combiner: pagoda_combiner,
    options: *const pagoda_lookup_options,
    vectors: *mut f32,
    number_count: usize,
    found: *mut u8,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_pool", error, || {
            let (table, keys) = (named(embedding, table)?, read_keys(keys, key_count)?);
            let offsets = args::slice(offsets, offset_count, "offsets")?;
            let (combiner, miss) = (read_combiner(combiner)?, read_options(options)?);
            let found = args::out_list(found, key_count, "found")?;
            let slots = offset_count.saturating_sub(1);
            let vectors = room(vectors, number_count, slots, table.dim(), "vectors")?;
            let mut marks = vec![false; key_count];
            table.pool(keys, offsets, combiner, vectors, &mut marks, miss)?;
            write_marks(found, &marks);
            Ok(())
        })
    }
}

/// Replaces rows or adds them, on every floor and in the cache. `numbers` has a row for each key; of a key that comes twice
/// the last one counts. A row that has a higher version already stays; rows that the table was loaded with have version 0.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not, UNSUPPORTED if every floor is read-only, IO if a floor could not take it: floors below that one have the change,
/// and those above do not; call again.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements and `numbers` `number_count`; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_upsert(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    version: u64,
    keys: *const i64,
    key_count: usize,
    numbers: *const f32,
    number_count: usize,
    reach: pagoda_reach,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_upsert", error, || {
            let (table, keys) = (named(embedding, table)?, read_keys(keys, key_count)?);
            check_room(number_count, key_count, table.dim())?;
            let numbers = args::slice(numbers, number_count, "numbers")?;
            table.upsert(version, keys, numbers, read_reach(reach)?)
        })
    }
}

/// Deletes rows, on every floor and from the cache: from now on their keys get the default vector. A row that has a higher
/// version stays.
///
/// Ownership: takes nothing over. Threads: any. Errors: as pagoda_embedding_upsert.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_delete(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    version: u64,
    keys: *const i64,
    key_count: usize,
    reach: pagoda_reach,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_delete", error, || {
            let (table, keys) = (named(embedding, table)?, read_keys(keys, key_count)?);
            table.delete(version, keys, read_reach(reach)?)
        })
    }
}

/// Begins to bring keys that are expected soon into the cache and returns at once. `queued` gets how many were not there
/// and found room in the queue.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements; `queued` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_prefetch(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    keys: *const i64,
    key_count: usize,
    queued: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_prefetch", error, || {
            let out = args::out(queued, "queued")?;
            let (table, keys) = (named(embedding, table)?, read_keys(keys, key_count)?);
            out.write(table.prefetch(keys));
            Ok(())
        })
    }
}

/// Reads what is in a table's cache again from the floors below, all of it, now. A configuration can have that done every
/// so often (`refresh_interval`).
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT, NOT_FOUND for a table that there
/// is not.
///
/// # Safety
/// `table` is a C string; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_refresh(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_refresh", error, || {
            named(embedding, table)?.refresh();
            Ok(())
        })
    }
}

/// Waits until everything that was to be fetched or loaded in the background is.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_wait(
    embedding: *const pagoda_embedding,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_wait", error, || {
            Embeddings::get(embedding, "embedding")?.wait();
            Ok(())
        })
    }
}

/// What a table did since it was opened.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_HANDLE, INVALID_ARGUMENT for a NULL or a small struct_size,
/// NOT_FOUND for a table that there is not.
///
/// # Safety
/// `table` is a C string; `stats` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embedding_stats(
    embedding: *const pagoda_embedding,
    table: *const c_char,
    stats: *mut pagoda_table_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embedding_stats", error, || {
            let (stats, out) = (named(embedding, table)?.stats(), args::out_struct(stats, "stats")?);
            out.write(&pagoda_table_stats {
                struct_size: size_of::<pagoda_table_stats>() as u32,
                lookups: stats.lookups,
                keys: stats.keys,
                hits: stats.hits,
                defaults: stats.defaults,
                dropped: stats.dropped,
                cached_rows: stats.cached_rows,
                cache_rows: stats.cache_rows,
                memory: stats.memory,
                stale_seconds: stats.stale_seconds,
            });
            Ok(())
        })
    }
}

/// Frees tables. NULL is fine. A model that is open and names some of them keeps them.
///
/// Ownership: takes the tables over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_embedding_free(embedding: *mut pagoda_embedding) -> pagoda_status {
    freeing("pagoda_embedding_free", || Embeddings::remove(embedding, "embedding"))
}

/// # Safety
/// `table` is NULL or a C string.
unsafe fn named(embedding: *const pagoda_embedding, table: *const c_char) -> Result<EmbeddingTable> {
    let embedding = Embeddings::get(embedding, "embedding")?;
    // SAFETY: by contract.
    embedding.table(unsafe { args::text(table, "table")? })
}

/// # Safety
/// `keys` is NULL or has `count` elements.
unsafe fn read_keys<'a>(keys: *const i64, count: usize) -> Result<&'a [i64]> {
    if count > MAX_KEYS {
        return Err(Error::invalid("key_count", format!("{count} are more than the {MAX_KEYS} there can be")));
    }
    // SAFETY: by contract.
    unsafe { args::slice(keys, count, "keys") }
}

/// Room for `rows` rows of `dim` numbers.
///
/// # Safety
/// `numbers` is NULL or has room for `count` of them.
unsafe fn room<'a>(numbers: *mut f32, count: usize, rows: usize, dim: usize, argument: &str) -> Result<&'a mut [f32]> {
    check_room(count, rows, dim)?;
    // SAFETY: by contract; whatever the caller's memory holds are numbers.
    let checked = unsafe { args::slice(numbers.cast_const(), count, argument)? };
    if checked.is_empty() {
        return Ok(&mut []);
    }
    // SAFETY: by contract they may be written to, and nothing else refers to them during the call.
    Ok(unsafe { std::slice::from_raw_parts_mut(numbers, count) })
}

fn check_room(count: usize, rows: usize, dim: usize) -> Result<()> {
    if rows.checked_mul(dim) != Some(count) {
        let message = format!("{count} numbers are not {rows} rows of {dim}, which the table's have");
        return Err(Error::invalid("number_count", message));
    }
    Ok(())
}

/// What is wrong in a configuration is wrong with its file.
fn about_path(error: Error) -> Error {
    Error::new(error.status(), error.to_string()).about("path")
}

/// An error about `argument`, unless it is about a part of it.
fn told_of(error: Error, argument: &str) -> Error {
    match error.argument() {
        Some(part) if part.starts_with(argument) => error,
        _ => Error::new(error.status(), error.to_string()).about(argument),
    }
}

fn write_marks(found: Option<&mut [MaybeUninit<u8>]>, marks: &[bool]) {
    for (to, &mark) in found.into_iter().flatten().zip(marks) {
        to.write(mark.into());
    }
}

/// # Safety
/// `options` is NULL or of the size that it says.
unsafe fn read_options(options: *const pagoda_lookup_options) -> Result<Miss> {
    let defaults = pagoda_lookup_options {
        struct_size: size_of::<pagoda_lookup_options>() as u32,
        miss: PAGODA_MISS_BY_HIT_RATE,
        limit_us: 0,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    match options.miss {
        PAGODA_MISS_BY_HIT_RATE => Ok(Miss::ByHitRate),
        PAGODA_MISS_WAIT => Ok(Miss::Wait),
        PAGODA_MISS_DEFAULT => Ok(Miss::Default),
        PAGODA_MISS_WITHIN => Ok(Miss::Within(Duration::from_micros(options.limit_us))),
        other => Err(args::unknown("options.miss", other, "PAGODA_MISS_...")),
    }
}

fn read_combiner(combiner: pagoda_combiner) -> Result<Combiner> {
    match combiner {
        PAGODA_COMBINER_SUM => Ok(Combiner::Sum),
        PAGODA_COMBINER_MEAN => Ok(Combiner::Mean),
        PAGODA_COMBINER_SQRTN => Ok(Combiner::SqrtN),
        other => Err(args::unknown("combiner", other, "PAGODA_COMBINER_...")),
    }
}

fn read_reach(reach: pagoda_reach) -> Result<Reach> {
    match reach {
        PAGODA_REACH_AT_ONCE => Ok(Reach::AtOnce),
        PAGODA_REACH_BY_REFRESH => Ok(Reach::ByRefresh),
        other => Err(args::unknown("reach", other, "PAGODA_REACH_...")),
    }
}
