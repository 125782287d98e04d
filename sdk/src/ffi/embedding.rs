//! `pagoda_embeddings`: tables of embedding rows.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use super::args::{self, Versioned};
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing};
use crate::embedding::{Combiner, EmbeddingTable, Embeddings, Miss, PsJson, Reach, TableStats};
use crate::error::{Error, Result};

/// What a lookup does with keys that are not in the cache.
pub type pagoda_miss = i32;

/// PAGODA_MISS_WAIT if the hit rate of the lookup is below the hit_rate_threshold of the table, else
/// PAGODA_MISS_DEFAULT.
pub const PAGODA_MISS_BY_HIT_RATE: pagoda_miss = 0;
/// The lookup waits for their rows from the backing tiers.
pub const PAGODA_MISS_WAIT: pagoda_miss = 1;
/// They get the default vector of the table, and are inserted into the cache in the background.
pub const PAGODA_MISS_DEFAULT: pagoda_miss = 2;
/// The lookup waits up to `limit_us`. Keys whose rows have not arrived by then get the default vector, and are inserted
/// when the rows arrive.
pub const PAGODA_MISS_WITHIN: pagoda_miss = 3;

/// How a pooled lookup combines the rows of a slot into one vector.
pub type pagoda_combiner = i32;

/// The sum.
pub const PAGODA_COMBINER_SUM: pagoda_combiner = 0;
/// The mean.
pub const PAGODA_COMBINER_MEAN: pagoda_combiner = 1;
/// The sum, divided by the square root of the number of rows.
pub const PAGODA_COMBINER_SQRTN: pagoda_combiner = 2;

/// When lookups see an update.
pub type pagoda_reach = i32;

/// When the call returns.
pub const PAGODA_REACH_AT_ONCE: pagoda_reach = 0;
/// At the next refresh of the cache. The backing tiers have the update when the call returns.
pub const PAGODA_REACH_BY_REFRESH: pagoda_reach = 1;

/// The most keys of one call.
const MAX_KEYS: usize = 1 << 28;

/// Embedding tables of any number of models. Each table has a cache over backing tiers: host memory, a Redis Cluster,
/// disk. A configuration file says which. Any number of threads may use a handle at the same time.
pub struct pagoda_embeddings {
    _private: [u8; 0],
}

/// The options of a lookup. Start from PAGODA_LOOKUP_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_lookup_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// What happens to keys that are not in the cache; default PAGODA_MISS_BY_HIT_RATE.
    pub miss: pagoda_miss,
    /// With PAGODA_MISS_WITHIN: the time limit in microseconds; default 0.
    pub limit_us: u64,
}

/// Statistics of a table since it was opened. Start from PAGODA_TABLE_STATS_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_table_stats {
    /// The size of this struct.
    pub struct_size: u32,
    /// Lookups.
    pub lookups: u64,
    /// Keys that were looked up, without the duplicates within a lookup. A lookup that finds all its keys in the cache
    /// counts every key.
    pub keys: u64,
    /// Keys that were in the cache.
    pub hits: u64,
    /// Keys that got the default vector.
    pub defaults: u64,
    /// Keys that were not inserted in the background because the queue was full.
    pub dropped: u64,
    /// Rows in the cache.
    pub cached_rows: u64,
    /// The capacity of the cache in rows.
    pub cache_rows: u64,
    /// Bytes of memory of the cache and the tiers, approximately.
    pub memory: u64,
    /// An update by another process is visible after at most this many seconds; negative if it may never be visible,
    /// because the cache is not refreshed.
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
    type C = pagoda_embeddings;
    const KIND: Kind = Kind::Embedding;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Embeddings> = Table::new();
        &TABLE
    }
}

/// Opens the tables of a configuration file: HugeCTR's ps.json, or one with Pagoda's own keys. Relative paths in the
/// file are relative to its folder.
///
/// Ownership: the caller frees the tables. Threads: any. Errors: NOT_FOUND for a missing file; INVALID_ARGUMENT for a
/// key or value that is not understood, which the message names; UNSUPPORTED for a feature that Pagoda does not have;
/// BUSY if another process has a table open, or if the source of a table was changed while its table file was built;
/// CAPACITY if there is not enough memory; IO.
///
/// # Safety
/// `path` is a C string; `embeddings` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_open(
    path: *const c_char,
    embeddings: *mut *mut pagoda_embeddings,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_open", error, || {
            let out = args::out(embeddings, "embeddings")?;
            let path = args::text(path, "path")?;
            let opened = Embeddings::open_file(path).map_err(about_path)?;
            out.write(Arc::new(opened).insert()?);
            Ok(())
        })
    }
}

/// Estimates the memory and the disk space of the tables of a configuration file. Only the headers of the tables are
/// read. `memory` and `disk` receive a number of bytes; each may be NULL.
///
/// Ownership: nothing is opened. Threads: any. Errors: those of pagoda_embeddings_open.
///
/// # Safety
/// `path` is a C string; `memory`, `disk` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_estimate(
    path: *const c_char,
    memory: *mut u64,
    disk: *mut u64,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_estimate", error, || {
            let (memory, disk) = (args::out_list(memory, 1, "memory")?, args::out_list(disk, 1, "disk")?);
            let config = PsJson::from_file(args::text(path, "path")?).map_err(about_path)?;
            let estimate = Embeddings::estimate(&config.options).map_err(PsJson::name_keys).map_err(about_path)?;
            memory.map(|memory| {
                memory[0].write(estimate.iter().fold(0, |sum: u64, table| sum.saturating_add(table.memory)))
            });
            disk.map(|disk| disk[0].write(estimate.iter().fold(0, |sum: u64, table| sum.saturating_add(table.disk))));
            Ok(())
        })
    }
}

/// Adds a model while other models are in use. `model` is JSON: an element of `models` in the configuration. Relative
/// paths in it are relative to `folder`, or to the working directory if `folder` is NULL. A table that another model
/// has open already is shared.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE, and those of
/// pagoda_embeddings_open.
///
/// # Safety
/// `model` is a C string, `folder` NULL or one; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_add(
    embeddings: *const pagoda_embeddings,
    model: *const c_char,
    folder: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_add", error, || {
            let embeddings = Embeddings::get(embeddings, "embeddings")?;
            let (model, folder) = (args::text(model, "model")?, args::optional_text(folder, "folder")?);
            let model = PsJson::model_from_json(model, folder.map(std::path::Path::new))?;
            embeddings.add(&model).map_err(|error| told_of(error, "model"))
        })
    }
}

/// Removes a model. A table is closed when no model uses it. Lookups that are running end normally.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown model.
///
/// # Safety
/// `model` is a C string; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_retire(
    embeddings: *const pagoda_embeddings,
    model: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_retire", error, || {
            Embeddings::get(embeddings, "embeddings")?.retire(args::text(model, "model")?)
        })
    }
}

/// Gets the number of elements in a row of a table. A table is named "model/table", or "table" if that is unique.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table.
///
/// # Safety
/// `table` is a C string; `dim` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_dim(
    embeddings: *const pagoda_embeddings,
    table: *const c_char,
    dim: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_dim", error, || {
            let out = args::out(dim, "dim")?;
            out.write(named(embeddings, table)?.dim());
            Ok(())
        })
    }
}

/// Looks up keys. A key may occur more than once. `numbers` receives one row for each key, in the order of the keys:
/// the row of the key, or the default vector of the table. `number_count` is the capacity of `numbers`; it must be
/// `key_count` times pagoda_embeddings_dim. `found` receives 1 for each key that has a row and 0 for each that got the
/// default vector; it may be NULL. `options` may be NULL.
///
/// A tier that does not answer is not an error: its keys get the default vector, which is counted and logged.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements, `options` is NULL or of the size that it says; `numbers` has
/// room for `number_count` numbers and `found`, unless it is NULL, for `key_count` bytes; they and `error` may be
/// written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_lookup(
    embeddings: *const pagoda_embeddings,
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
        boundary("pagoda_embeddings_lookup", error, || {
            let (table, keys) = (named(embeddings, table)?, read_keys(keys, key_count)?);
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

/// Looks up keys and combines the rows of each slot into one vector. Slot i has the keys from `offsets[i]` up to, but
/// not including, `offsets[i + 1]`; a slot without keys gets zeros. `offsets` has one element more than there are
/// slots, begins with 0, never decreases, and ends with `key_count`. `vectors` receives one vector for each slot. The
/// rest is as for pagoda_embeddings_lookup.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table.
///
/// # Safety
/// As for pagoda_embeddings_lookup; `offsets` has `offset_count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_pool(
    embeddings: *const pagoda_embeddings,
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
        boundary("pagoda_embeddings_pool", error, || {
            let (table, keys) = (named(embeddings, table)?, read_keys(keys, key_count)?);
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

/// Replaces or inserts rows, in all tiers and in the cache. `numbers` has one row for each key; if a key occurs twice,
/// the last row counts. A row that has a higher version already is not changed. Rows from the file of the table have
/// version 0.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table; UNSUPPORTED if every tier is read-only; IO if a tier failed. After IO the tiers below that one have
/// the update, and those above do not: repeat the call.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements and `numbers` `number_count`; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_upsert(
    embeddings: *const pagoda_embeddings,
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
        boundary("pagoda_embeddings_upsert", error, || {
            let (table, keys) = (named(embeddings, table)?, read_keys(keys, key_count)?);
            check_room(number_count, key_count, table.dim())?;
            let numbers = args::slice(numbers, number_count, "numbers")?;
            table.upsert(version, keys, numbers, read_reach(reach)?)
        })
    }
}

/// Deletes rows, in all tiers and from the cache. Their keys then get the default vector. A row that has a higher
/// version is not deleted.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: those of pagoda_embeddings_upsert.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_delete(
    embeddings: *const pagoda_embeddings,
    table: *const c_char,
    version: u64,
    keys: *const i64,
    key_count: usize,
    reach: pagoda_reach,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_delete", error, || {
            let (table, keys) = (named(embeddings, table)?, read_keys(keys, key_count)?);
            table.delete(version, keys, read_reach(reach)?)
        })
    }
}

/// Starts to load keys into the cache, and returns at once. `queued` receives the number of keys that were not in the
/// cache and were queued.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table.
///
/// # Safety
/// `table` is a C string, `keys` has `key_count` elements; `queued` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_prefetch(
    embeddings: *const pagoda_embeddings,
    table: *const c_char,
    keys: *const i64,
    key_count: usize,
    queued: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_prefetch", error, || {
            let out = args::out(queued, "queued")?;
            let (table, keys) = (named(embeddings, table)?, read_keys(keys, key_count)?);
            out.write(table.prefetch(keys));
            Ok(())
        })
    }
}

/// Reloads all rows in the cache of a table from the backing tiers, and waits for that. A configuration can have this
/// done at intervals (`refresh_interval`).
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT; NOT_FOUND for an
/// unknown table.
///
/// # Safety
/// `table` is a C string; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_refresh(
    embeddings: *const pagoda_embeddings,
    table: *const c_char,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_refresh", error, || {
            named(embeddings, table)?.refresh();
            Ok(())
        })
    }
}

/// Waits until all background fetches and loads are done.
///
/// Ownership: the caller keeps the tables. Threads: any. Errors: INVALID_HANDLE.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_wait(
    embeddings: *const pagoda_embeddings,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_wait", error, || {
            Embeddings::get(embeddings, "embeddings")?.wait();
            Ok(())
        })
    }
}

/// Gets the statistics of a table.
///
/// Ownership: the caller keeps the arguments. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL or an
/// invalid `struct_size`; NOT_FOUND for an unknown table.
///
/// # Safety
/// `table` is a C string; `stats` may be written to as far as its struct_size says, and `error`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_embeddings_get_stats(
    embeddings: *const pagoda_embeddings,
    table: *const c_char,
    stats: *mut pagoda_table_stats,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_embeddings_get_stats", error, || {
            let (table, out) = (named(embeddings, table)?, args::out_struct(stats, "stats")?);
            out.write(&stats_of(&table.stats()));
            Ok(())
        })
    }
}

/// Frees tables. NULL is allowed. A model that uses some of them keeps those open.
///
/// Ownership: takes the tables. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_embeddings_free(embeddings: *mut pagoda_embeddings) -> pagoda_status {
    freeing("pagoda_embeddings_free", || Embeddings::remove(embeddings, "embeddings"))
}

pub(super) fn stats_of(stats: &TableStats) -> pagoda_table_stats {
    pagoda_table_stats {
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
    }
}

/// # Safety
/// `table` is NULL or a C string.
unsafe fn named(embeddings: *const pagoda_embeddings, table: *const c_char) -> Result<EmbeddingTable> {
    let embeddings = Embeddings::get(embeddings, "embeddings")?;
    // SAFETY: by contract.
    embeddings.table(unsafe { args::text(table, "table")? })
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
    args::all_about("path", &error)
}

/// An error about `argument`, unless it is about a part of it.
fn told_of(error: Error, argument: &str) -> Error {
    match error.argument() {
        Some(part) if part.starts_with(argument) => error,
        _ => args::all_about(argument, &error),
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
