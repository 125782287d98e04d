//! `pagoda_engine_options` and `pagoda_rank_request`, read.

use std::ffi::c_char;
use std::time::Duration;

use super::args::{self, Versioned};
use super::handle::Object;
use super::kv_options::{PAGODA_OFFLOAD_AT_COMMIT, PAGODA_OFFLOAD_BY_HAND, PAGODA_OFFLOAD_ON_EVICTION, pagoda_offload};
use super::model::{self, pagoda_model_options};
use super::run::pagoda_cancel;
use super::store::{self, pagoda_store_options};
use crate::embedding::CacheSize;
use crate::engine::{Columns, EngineOptions, EngineStore, Events, GraphShape, RankRequest, TableOptions};
use crate::error::{Error, Result};
use crate::kv::{Offload, Pages};
use crate::runtime::Cancel;

/// The most events or candidates of one request, and more than any model takes.
const MAX_ROWS: usize = 1 << 28;

/// How to open an engine. Start from PAGODA_ENGINE_OPTIONS_INIT, which sets `struct_size` and the defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_engine_options {
    /// The size of this struct.
    pub struct_size: u32,
    /// How many batches run at the same time, on one set of weights, tables and caches; 1 to 256, default 1.
    pub instances: i32,
    /// The most requests of one batch; default 64.
    pub max_batch: i32,
    /// The most rows of one batch: new events, and candidates; default 8192. A request that alone has more runs alone.
    pub max_batch_rows: i32,
    /// The most requests that wait; more are refused with PAGODA_CAPACITY. Default 4096.
    pub queue: i32,
    /// How many pages of keys and values are kept in memory; default 0: `kv_bytes` says it. Where this says it, set
    /// `kv_bytes` to 0, which it is not by itself.
    pub kv_pages: i32,
    /// When keys and values go to the store; default PAGODA_OFFLOAD_ON_EVICTION.
    pub offload: pagoda_offload,
    /// As in pagoda_kv_options; default 12.
    pub ahead_percent: i32,
    /// How many bytes of keys and values are kept in memory; default 1 GiB. With 0, and 0 pages, every request computes
    /// its whole history.
    pub kv_bytes: u64,
    /// How many microseconds a request waits for others to run with; default 0: not at all. Then requests run together
    /// that came while all instances were busy.
    pub max_delay_us: u64,
    /// Bytes for the events of users as they were sent, so that requests with only new events are served also when the
    /// keys and values of the earlier ones are gone; default 64 MiB. 0: none are remembered.
    pub remember_bytes: u64,
    /// Bytes for the cache of each embedding table; default 0: all of a table of up to 256 MiB, and that much of a
    /// larger one.
    pub table_cache_bytes: u64,
    /// Where the model runs, and on how many threads; NULL = the defaults. Its `embedding` must be NULL.
    pub model: *const pagoda_model_options,
    /// The folder of a store for keys and values, UTF-8; NULL = none. One process has it open at a time.
    pub store_path: *const c_char,
    /// How the store behaves; NULL = the defaults.
    pub store_options: *const pagoda_store_options,
    /// On a GPU: shapes of batches that are captured into CUDA graphs when first used and replayed from then on; NULL =
    /// none. UTF-8, separated by commas, each the most users, the most rows, and, if they are fewer, the most
    /// candidates: "1x384, 8x3072x2048". A batch takes the first that it fits into, in the order of their rows; one that
    /// fits into none runs without. Every node of the model has to be on the GPU. Elsewhere they are read, and not used.
    pub cuda_graphs: *const c_char,
    /// Bytes of host memory for keys and values that have left the pool, pinned where the model can be on a GPU; default
    /// 0: none.
    pub host_bytes: u64,
    /// With a model on a GPU: how many percent of the memory that is free there are for keys and values; default 0:
    /// `kv_pages` or `kv_bytes` says it. Where this says it, set `kv_bytes` to 0, which it is not by itself. Refused with
    /// INVALID_ARGUMENT where the model runs on the CPU, also if it was PAGODA_PROVIDER_AUTO that became the CPU.
    pub kv_percent: i32,
    /// 0.
    pub reserved: i32,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_engine_options {
    const FIRST_SIZE: usize = 88;
}

/// A request: score candidates for a user. Start from PAGODA_RANK_REQUEST_INIT, which sets `struct_size` and the
/// defaults. Features go by their names in pagoda.json; each has one key for every event, candidate or user, -1 for
/// none.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pagoda_rank_request {
    /// The size of this struct.
    pub struct_size: u32,
    /// 1: the time of the request is `time`; 0, the default: it is now.
    pub has_time: i32,
    /// The user.
    pub user: u64,
    /// Which event of the user's history is the first of those that are sent; default -1: they are the whole history,
    /// and the engine works out what of it is new.
    pub start: i64,
    /// How many events are sent; there may be none.
    pub event_count: usize,
    /// How many features of events are sent: all that there are, or 0 if there are no events.
    pub event_feature_count: usize,
    /// Their names.
    pub event_features: *const *const c_char,
    /// For each of them its keys, `event_count` of them.
    pub event_keys: *const *const i64,
    /// When each event was, in seconds; may be NULL if the model has no times.
    pub event_times: *const i64,
    /// How many features of the user are sent: all that there are, or 0 where `start` is beyond 0: then they are what
    /// they were. Sent with `start`, they are compared with those remembered; where none are, it is a gap.
    pub user_feature_count: usize,
    /// Their names.
    pub user_features: *const *const c_char,
    /// For each of them its key.
    pub user_keys: *const i64,
    /// How many candidates there are, 1 or more.
    pub candidate_count: usize,
    /// How many features of candidates are sent: all that items have.
    pub candidate_feature_count: usize,
    /// Their names.
    pub candidate_features: *const *const c_char,
    /// For each of them its keys, `candidate_count` of them.
    pub candidate_keys: *const *const i64,
    /// The time of the request, in seconds, if `has_time` is 1.
    pub time: i64,
    /// How many microseconds it may take; default 0: as long as it does. After that it ends with PAGODA_CANCELLED at
    /// once; requests that ran with it go on.
    pub timeout_us: u64,
    /// Ends it before that; NULL = nothing does.
    pub cancel: *const pagoda_cancel,
}

// SAFETY: numbers and pointers in C's layout, the size first.
unsafe impl Versioned for pagoda_rank_request {
    const FIRST_SIZE: usize = 144;
}

/// # Safety
/// As for `pagoda_engine_open`.
pub(super) unsafe fn read_options(options: *const pagoda_engine_options) -> Result<EngineOptions> {
    let EngineOptions { instances, max_batch, max_batch_rows, queue, ahead_percent, remember_events, .. } =
        EngineOptions::default();
    let defaults = pagoda_engine_options {
        struct_size: size_of::<pagoda_engine_options>() as u32,
        instances: instances as i32,
        max_batch: max_batch as i32,
        max_batch_rows: max_batch_rows as i32,
        queue: queue as i32,
        kv_pages: 0,
        offload: PAGODA_OFFLOAD_ON_EVICTION,
        ahead_percent: ahead_percent as i32,
        kv_bytes: 1 << 30,
        max_delay_us: 0,
        remember_bytes: remember_events,
        table_cache_bytes: 0,
        model: std::ptr::null(),
        store_path: std::ptr::null(),
        store_options: std::ptr::null(),
        cuda_graphs: std::ptr::null(),
        host_bytes: 0,
        kv_percent: 0,
        reserved: 0,
    };
    // SAFETY: by contract.
    let options = unsafe { args::options(options, defaults, "options")? };
    if options.reserved != 0 {
        return Err(Error::invalid("options.reserved", format!("{}, where it is 0 so far", options.reserved)));
    }
    let percent = args::count(options.kv_percent, "options.kv_percent")?;
    let kv = match (args::count(options.kv_pages, "options.kv_pages")?, options.kv_bytes) {
        (0, 0) if percent > 0 => Some(Pages::Percent(percent)),
        (0, 0) => None,
        (pages, bytes) if percent > 0 => {
            let message =
                format!("{percent}, where kv_pages is {pages} and kv_bytes {bytes}: set one, and the others to 0");
            return Err(Error::invalid("options.kv_percent", message));
        }
        (0, bytes) => Some(Pages::Bytes(bytes)),
        (pages, 0) => Some(Pages::Count(pages)),
        (pages, bytes) => {
            let message = format!("{bytes}, where kv_pages already says {pages}: set one of them, and the other to 0");
            return Err(Error::invalid("options.kv_bytes", message));
        }
    };
    // SAFETY: by contract.
    let model = unsafe { model::read_options(options.model) };
    // SAFETY: by contract.
    let store_options = unsafe { store::read_options(options.store_options) };
    // SAFETY: by contract.
    let store_path = unsafe { args::optional_text(options.store_path, "options.store_path")? };
    let store_options = store_options.map_err(|error| deeper(error, "options.store_options"))?;
    // SAFETY: by contract.
    let graphs = unsafe { args::optional_text(options.cuda_graphs, "options.cuda_graphs")? };
    let graphs = graphs.map(GraphShape::parse).transpose().map_err(|error| error.about("options.cuda_graphs"))?;
    Ok(EngineOptions {
        model: model.map_err(|error| deeper(error, "options.model"))?,
        kv,
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
            tiers: None,
        },
        graphs: graphs.unwrap_or_default(),
        instances: args::count(options.instances, "options.instances")?,
        max_batch: args::count(options.max_batch, "options.max_batch")?,
        max_batch_rows: args::count(options.max_batch_rows, "options.max_batch_rows")?,
        max_delay: Duration::from_micros(options.max_delay_us),
        queue: args::count(options.queue, "options.queue")?,
        remember_events: options.remember_bytes,
    })
}

/// An error about options that are part of others, with the name that they have there.
fn deeper(error: Error, argument: &str) -> Error {
    match error.argument().and_then(|part| part.strip_prefix("options")) {
        Some(part) => {
            let named = format!("{argument}{part}");
            error.about(named)
        }
        None => error,
    }
}

/// What an engine says of its options, in the names of the header.
pub(super) fn about_options(options: &EngineOptions, error: Error) -> Error {
    match (error.argument(), options.kv) {
        (Some("options.kv"), Some(Pages::Bytes(_))) => error.about("options.kv_bytes"),
        (Some("options.kv"), Some(Pages::Percent(_))) => error.about("options.kv_percent"),
        (Some("options.kv"), _) => error.about("options.kv_pages"),
        (Some("options.model.tables"), _) => error.about("options.model.embedding"),
        (Some(shape), _) if shape.starts_with("options.graphs[") => error.about("options.cuda_graphs"),
        (Some("ahead_percent"), _) => error.about("options.ahead_percent"),
        (Some("options.intra_op_threads" | "options.profile_path" | "options.provider"), _) => {
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
