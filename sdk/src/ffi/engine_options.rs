//! `pagoda_engine_options` and `pagoda_rank_request`, read.

use std::ffi::c_char;
use std::time::Duration;

use super::args::{self, Versioned};
use super::handle::Object;
use super::kv_options::{
    PAGODA_KV_FORMAT_DEFAULT, PAGODA_KV_SIZE_UNIT_DEFAULT, PAGODA_OFFLOAD_AT_COMMIT, PAGODA_OFFLOAD_BY_HAND,
    PAGODA_OFFLOAD_ON_EVICTION, pagoda_kv_format, pagoda_kv_size_unit, pagoda_offload, read_format, read_size,
};
use super::model::{self, pagoda_model_options};
use super::run::pagoda_cancel;
use super::store::{self, pagoda_store_options};
use crate::embedding::{CacheSize, PsJson};
use crate::engine::{Columns, EngineOptions, EngineStore, Events, GraphShape, RankRequest, TableOptions};
use crate::error::{Error, Result};
use crate::kv::Offload;
use crate::runtime::Cancel;

/// The most events or candidates of one request, and more than any model takes.
const MAX_ROWS: usize = 1 << 28;

/// The largest batch that a CUDA graph has room for. Start from PAGODA_GRAPH_SHAPE_INIT, which sets `struct_size`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_graph_shape {
    /// The size of this struct.
    pub struct_size: u32,
    /// The maximum number of users; 1 or more.
    pub users: i32,
    /// The maximum number of rows of all users together: new events and candidates; 1 or more.
    pub rows: i32,
    /// The maximum number of candidates of all users together; 0: as many as `rows`.
    pub candidates: i32,
    /// The maximum number of pages of all users together; 0: enough for the longest history of each user, but no more
    /// than the pool has.
    pub pages: i32,
}

/// How to open an engine. Start from PAGODA_ENGINE_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_engine_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// How many batches run at the same time; 1 to 256, default 1. They share the weights, the tables and the caches.
    pub instances: i32,
    /// The maximum number of requests in a batch; default 64.
    pub max_batch: i32,
    /// The maximum number of rows in a batch: new events and candidates; default 8192. A request with more rows runs
    /// alone.
    pub max_batch_rows: i32,
    /// The maximum number of queued requests; default 4096. A request beyond it is rejected with
    /// PAGODA_STATUS_CAPACITY.
    pub queue: i32,
    /// The unit of `kv_size`; default PAGODA_KV_SIZE_UNIT_DEFAULT: 1 GiB.
    pub kv_size_unit: pagoda_kv_size_unit,
    /// When keys and values are written to the store; default PAGODA_OFFLOAD_ON_EVICTION.
    pub offload: pagoda_offload,
    /// As in pagoda_kv_options; default 12.
    pub ahead_percent: i32,
    /// The size of the pool of keys and values, in `kv_size_unit`. With 0 pages or 0 bytes nothing is cached: every
    /// request computes its whole history.
    pub kv_size: u64,
    /// Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
    /// if the model can run on a GPU.
    pub host_bytes: u64,
    /// The coalescing window: how many microseconds a request waits for other requests, to run in one batch with them;
    /// default 0: it does not wait. A batch then has the requests that arrived while all instances were busy.
    pub max_delay_us: u64,
    /// Bytes for the event log: the events of users as they were sent; default 64 MiB, 0: none. With it, a request that
    /// sends only new events is served even if the keys and values of the earlier events were evicted.
    pub remember_bytes: u64,
    /// Bytes for the cache of each embedding table; default 0: a table of up to 256 MiB is cached as a whole, a larger
    /// one with 256 MiB.
    pub table_cache_bytes: u64,
    /// A configuration file (ps.json) that names the backing tiers of the embedding tables, UTF-8; NULL: host memory,
    /// with all rows. The models in the file are ignored. The tables are those of the model folder.
    pub table_tiers_path: *const c_char,
    /// Where the model runs, and on how many threads; NULL = the defaults. Its `tables` must be NULL.
    pub model: *const pagoda_model_options,
    /// The folder of a store for keys and values, UTF-8; NULL = none. One process at a time has it open.
    pub store_path: *const c_char,
    /// How the store is opened; NULL = the defaults.
    pub store_options: *const pagoda_store_options,
    /// On a GPU: batch shapes that are captured into CUDA graphs, `cuda_graph_count` of them; NULL = none. A graph is
    /// captured when its shape is first used, and replayed after that. A batch uses the shape with the fewest rows that
    /// it fits into; a batch that fits into none runs without a graph. Every node of the model must run on the GPU. On
    /// the CPU the shapes are checked and not used.
    pub cuda_graphs: *const pagoda_graph_shape,
    /// How many shapes `cuda_graphs` has; default 0.
    pub cuda_graph_count: usize,
    /// How pages hold keys and values, in memory and in the store; default PAGODA_KV_FORMAT_DEFAULT.
    pub kv_format: pagoda_kv_format,
}

// SAFETY: numbers in C's layout, the size first.
unsafe impl Versioned for pagoda_graph_shape {
    const FIRST_SIZE: usize = 20;
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_engine_options {
    const FIRST_SIZE: usize = 120;
}

/// A request: score candidates for a user. Start from PAGODA_RANK_REQUEST_INIT, which sets `struct_size` and the
/// defaults.
///
/// A feature is named as in pagoda.json. It has one key for every event, candidate or user; -1 stands for no key.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_rank_request {
    /// The size of this struct.
    pub struct_size: u32,
    /// 1: the time of the request is `time`; 0, the default: it is the current time.
    pub has_time: i32,
    /// The user.
    pub user: u64,
    /// The position of the first sent event in the history of the user. Default -1: the events are the whole history,
    /// and the engine finds out which of them are new.
    pub start: i64,
    /// How many events are sent; may be 0.
    pub event_count: usize,
    /// How many event features are sent: all features of the model, or 0 if `event_count` is 0.
    pub event_feature_count: usize,
    /// The names of the event features.
    pub event_features: *const *const c_char,
    /// For each event feature an array of `event_count` keys.
    pub event_keys: *const *const i64,
    /// The time of each event, in seconds; may be NULL if the model has no times.
    pub event_times: *const i64,
    /// How many user features are sent: all features of the model, or 0 if `start` is greater than 0; they are then
    /// those of earlier requests. If they are sent with such a `start`, the engine compares them with its event log;
    /// without an entry there, the request fails as a gap does.
    pub user_feature_count: usize,
    /// The names of the user features.
    pub user_features: *const *const c_char,
    /// The key of each user feature.
    pub user_keys: *const i64,
    /// How many candidates there are; 1 or more.
    pub candidate_count: usize,
    /// How many candidate features are sent: all item features of the model.
    pub candidate_feature_count: usize,
    /// The names of the candidate features.
    pub candidate_features: *const *const c_char,
    /// For each candidate feature an array of `candidate_count` keys.
    pub candidate_keys: *const *const i64,
    /// The time of the request, in seconds, if `has_time` is 1.
    pub time: i64,
    /// The time limit in microseconds; default 0: none. A request that exceeds it ends at once with
    /// PAGODA_STATUS_CANCELLED; the other requests of its batch are not affected.
    pub timeout_us: u64,
    /// Cancels the request when triggered; NULL = none.
    pub cancel: *const pagoda_cancel,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_rank_request {
    const FIRST_SIZE: usize = 144;
}

/// # Safety
/// As for `pagoda_engine_open`.
pub(super) unsafe fn read_options(options: *const pagoda_engine_options) -> Result<EngineOptions> {
    let EngineOptions { instances, max_batch, max_batch_rows, queue, ahead_percent, remember_bytes, kv_size, .. } =
        EngineOptions::default();
    let defaults = pagoda_engine_options {
        struct_size: size_of::<pagoda_engine_options>() as u32,
        instances: instances as i32,
        max_batch: max_batch as i32,
        max_batch_rows: max_batch_rows as i32,
        queue: queue as i32,
        kv_size_unit: PAGODA_KV_SIZE_UNIT_DEFAULT,
        offload: PAGODA_OFFLOAD_ON_EVICTION,
        ahead_percent: ahead_percent as i32,
        kv_size: 0,
        host_bytes: 0,
        max_delay_us: 0,
        remember_bytes,
        table_cache_bytes: 0,
        table_tiers_path: std::ptr::null(),
        model: std::ptr::null(),
        store_path: std::ptr::null(),
        store_options: std::ptr::null(),
        cuda_graphs: std::ptr::null(),
        cuda_graph_count: 0,
        kv_format: PAGODA_KV_FORMAT_DEFAULT,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    let size = read_size(options.kv_size_unit, options.kv_size, "options.kv_size")?;
    // SAFETY: by contract.
    let model = unsafe { model::read_options(options.model) };
    // SAFETY: by contract.
    let store_options = unsafe { store::read_options(options.store_options) };
    // SAFETY: by contract.
    let store_path = unsafe { args::optional_text(options.store_path, "options.store_path")? };
    let store_options = store_options.map_err(|error| deeper(error, "options.store_options"))?;
    // SAFETY: by contract.
    let tiers = unsafe { args::optional_text(options.table_tiers_path, "options.table_tiers_path")? };
    let tiers = tiers.map(PsJson::from_file).transpose();
    Ok(EngineOptions {
        model: model.map_err(|error| deeper(error, "options.model"))?,
        kv_size: size.or(kv_size),
        kv_format: read_format(options.kv_format, "options.kv_format")?,
        host_bytes: options.host_bytes,
        store: store_path.map(|path| EngineStore { path: path.into(), options: store_options }),
        offload: match options.offload {
            PAGODA_OFFLOAD_ON_EVICTION => Offload::OnEviction,
            PAGODA_OFFLOAD_AT_COMMIT => Offload::AtCommit,
            PAGODA_OFFLOAD_BY_HAND => Offload::ByHand,
            other => return Err(args::unknown("options.offload", other, "PAGODA_OFFLOAD_...")),
        },
        ahead_percent: args::count(options.ahead_percent, "options.ahead_percent")?,
        tables: TableOptions {
            cache: (options.table_cache_bytes > 0).then_some(CacheSize::Bytes(options.table_cache_bytes)),
            tiers: tiers
                .map_err(|error| args::all_about("options.table_tiers_path", &error))?
                .map(|config| config.options.tiers),
        },
        // SAFETY: by contract.
        cuda_graphs: unsafe { read_graphs(options.cuda_graphs, options.cuda_graph_count)? },
        instances: args::count(options.instances, "options.instances")?,
        max_batch: args::count(options.max_batch, "options.max_batch")?,
        max_batch_rows: args::count(options.max_batch_rows, "options.max_batch_rows")?,
        max_delay: Duration::from_micros(options.max_delay_us),
        queue: args::count(options.queue, "options.queue")?,
        remember_bytes: options.remember_bytes,
    })
}

/// # Safety
/// `shapes` is NULL or points to `count` structs of the size that they say.
unsafe fn read_graphs(shapes: *const pagoda_graph_shape, count: usize) -> Result<Vec<GraphShape>> {
    let defaults = pagoda_graph_shape {
        struct_size: size_of::<pagoda_graph_shape>() as u32,
        users: 0,
        rows: 0,
        candidates: 0,
        pages: 0,
    };
    // SAFETY: by contract.
    let shapes = unsafe { args::structs(shapes, count, defaults, "options.cuda_graphs", "options.cuda_graph_count")? };
    let read = |(index, shape): (usize, pagoda_graph_shape)| {
        let number = |value, field| args::count(value, &format!("options.cuda_graphs[{index}].{field}"));
        Ok(GraphShape {
            users: number(shape.users, "users")?,
            rows: number(shape.rows, "rows")?,
            candidates: number(shape.candidates, "candidates")?,
            pages: number(shape.pages, "pages")?,
        })
    };
    shapes.into_iter().enumerate().map(read).collect()
}

/// An error about options that are part of others, with the name that they have there.
pub(super) fn deeper(error: Error, argument: &str) -> Error {
    match error.argument().and_then(|part| part.strip_prefix("options")) {
        Some(part) => {
            let named = format!("{argument}{part}");
            error.about(named)
        }
        None => error,
    }
}

/// What an engine says of its options, in the names of the header; those of its tables' tiers are keys of a ps.json.
pub(super) fn about_options(error: Error) -> Error {
    let error = PsJson::name_keys(error);
    match error.argument() {
        Some("ahead_percent") => error.about("options.ahead_percent"),
        _ => about_model(error),
    }
}

/// An error about the options of a model, with the name that they have in those of an engine or a generator.
pub(super) fn about_model(error: Error) -> Error {
    match error.argument() {
        Some("options.intra_op_threads" | "options.onnxruntime_path" | "options.profile_path" | "options.provider") => {
            deeper(error, "options.model")
        }
        _ => error,
    }
}

/// # Safety
/// As for `pagoda_engine_rank`.
pub(super) unsafe fn read_request(request: *const pagoda_rank_request) -> Result<RankRequest> {
    if request.is_null() {
        return Err(Error::invalid("request", "NULL, where a request is needed"));
    }
    // SAFETY: by contract.
    let request = unsafe { args::options(request, NO_REQUEST, "request")? };
    let named = |error| args::within("request", error);
    let start = match request.start {
        -1 => None,
        start => Some(u64::try_from(start).map_err(|_| {
            Error::invalid("request.start", format!("{start} is neither the number of an event nor -1"))
        })?),
    };
    // SAFETY: by contract.
    let (keys, candidates, times, user_keys) = unsafe {
        let events = (request.event_features, request.event_keys, request.event_feature_count, request.event_count);
        let items = (
            request.candidate_features,
            request.candidate_keys,
            request.candidate_feature_count,
            request.candidate_count,
        );
        let times = match request.event_times.is_null() {
            true => &[],
            false => rows(request.event_times, request.event_count, "event_times", "event_count").map_err(named)?,
        };
        let (count, names) = (request.user_feature_count, request.user_features);
        let names = args::values(names, count, "user_features", "user_feature_count").map_err(named)?;
        let keys = args::values(request.user_keys, count, "user_keys", "user_feature_count").map_err(named)?;
        let pairs = names.iter().zip(keys).enumerate().map(|(index, (&name, &key))| {
            Ok((args::text(name, format!("request.user_features[{index}]"))?.to_owned(), key))
        });
        (
            columns("event", events).map_err(named)?,
            columns("candidate", items).map_err(named)?,
            times,
            pairs.collect::<Result<_>>()?,
        )
    };
    Ok(RankRequest {
        user: request.user,
        start,
        events: Events { keys, times: times.to_vec() },
        user_keys,
        candidates,
        time: args::flag(request.has_time, "request.has_time")?.then_some(request.time),
        timeout: (request.timeout_us > 0).then(|| Duration::from_micros(request.timeout_us)),
        cancel: match request.cancel.is_null() {
            true => None,
            false => Some(Cancel::get(request.cancel, "request.cancel")?),
        },
    })
}

const NO_REQUEST: pagoda_rank_request = pagoda_rank_request {
    struct_size: size_of::<pagoda_rank_request>() as u32,
    has_time: 0,
    user: 0,
    start: -1,
    event_count: 0,
    event_feature_count: 0,
    event_features: std::ptr::null(),
    event_keys: std::ptr::null(),
    event_times: std::ptr::null(),
    user_feature_count: 0,
    user_features: std::ptr::null(),
    user_keys: std::ptr::null(),
    candidate_count: 0,
    candidate_feature_count: 0,
    candidate_features: std::ptr::null(),
    candidate_keys: std::ptr::null(),
    time: 0,
    timeout_us: 0,
    cancel: std::ptr::null(),
};

/// Names, for each its keys, how many names there are, and how many keys of each.
type Lists = (*const *const c_char, *const *const i64, usize, usize);

/// # Safety
/// The lists are NULL or as long as they are said to be.
unsafe fn columns(what: &str, (names, keys, features, count): Lists) -> Result<Columns> {
    if features == 0 && count > 0 {
        let message = format!("0, where {count} are announced of each");
        return Err(Error::invalid(format!("{what}_feature_count"), message));
    }
    let (named, keyed) = (format!("{what}_features"), format!("{what}_keys"));
    let (counted, rows_counted) = (format!("{what}_feature_count"), format!("{what}_count"));
    // SAFETY: by contract.
    let (names, lists) =
        unsafe { (args::values(names, features, &named, &counted)?, args::values(keys, features, &keyed, &counted)?) };
    names.iter().zip(lists).enumerate().try_fold(Columns::new(), |columns, (index, (&name, &list))| {
        // SAFETY: by contract.
        unsafe {
            let name = args::text(name, format!("{named}[{index}]"))?;
            Ok(columns.with(name, rows(list, count, &format!("{keyed}[{index}]"), &rows_counted)?))
        }
    })
}

/// A number for each event or candidate.
///
/// # Safety
/// `numbers` is NULL or has `count` elements.
unsafe fn rows<'a>(numbers: *const i64, count: usize, argument: &str, counted: &str) -> Result<&'a [i64]> {
    if count > MAX_ROWS {
        return Err(Error::invalid(counted, format!("{count} are more than the {MAX_ROWS} there can be")));
    }
    // SAFETY: by contract.
    unsafe { args::slice(numbers, count, argument) }
}
