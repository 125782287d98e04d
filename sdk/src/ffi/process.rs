//! What belongs to the whole process: versions, the log, metrics, live objects.

use std::cell::Cell;
use std::ffi::{c_char, c_void};

use super::error::{pagoda_error, pagoda_status};
use super::{args, boundary, c_text, handle, reading};
use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::RwLock;

/// The version of the binary interface. It changes only if a program built against another one would break.
pub const PAGODA_ABI_VERSION: u32 = 1;

/// How much is logged.
pub type pagoda_log_level = i32;

/// Nothing.
pub const PAGODA_LOG_OFF: pagoda_log_level = 0;
/// What failed, above all where there is no caller to tell.
pub const PAGODA_LOG_ERROR: pagoda_log_level = 1;
/// What is likely not as the caller wants it, such as a model on the CPU where a GPU was hoped for.
pub const PAGODA_LOG_WARN: pagoda_log_level = 2;
/// What happens rarely and is good to know.
pub const PAGODA_LOG_INFO: pagoda_log_level = 3;
/// What helps to find a mistake, such as every error that a call returned.
pub const PAGODA_LOG_DEBUG: pagoda_log_level = 4;
/// Everything.
pub const PAGODA_LOG_TRACE: pagoda_log_level = 5;

/// Called with each line of the log, from any thread. `source` says who speaks, e.g. "onnxruntime". The texts are valid
/// during the call only. It must not call pagoda_log_set or open models; lines that arise while it runs are dropped.
pub type pagoda_log_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        level: pagoda_log_level,
        source: *const c_char,
        message: *const c_char,
    ),
>;

/// The version of the binary interface of this library: PAGODA_ABI_VERSION of the header it was built with.
///
/// Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_abi_version() -> u32 {
    reading("pagoda_abi_version", 0, || Ok(PAGODA_ABI_VERSION))
}

/// Whether a program built with a header of version `header_version` works with this library. Call it first, with
/// PAGODA_ABI_VERSION.
///
/// Threads: any. Errors: UNSUPPORTED, naming both versions.
///
/// # Safety
/// `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_abi_check(header_version: u32, error: *mut *mut pagoda_error) -> pagoda_status {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        boundary("pagoda_abi_check", error, || {
            if header_version == PAGODA_ABI_VERSION {
                return Ok(());
            }
            let message = format!(
                "the program was built for version {header_version} of Pagoda's binary interface, this library has \
                 version {PAGODA_ABI_VERSION}: rebuild the program with the library's own pagoda.h"
            );
            Err(Error::new(Status::Unsupported, message).about("header_version"))
        })
    }
}

/// The version of this library, e.g. "0.1.0".
///
/// Ownership: the text is static. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    reading("pagoda_version", c"".as_ptr(), || Ok(VERSION.as_ptr().cast()))
}

/// How many objects (errors, models, tensors, caches and so on) the caller holds handles of: 0 if everything was freed.
///
/// Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_live_objects() -> usize {
    reading("pagoda_live_objects", 0, || Ok(handle::live()))
}

/// The metrics of the process as Prometheus text (to be served as "application/openmetrics-text; version=1.0.0"). With
/// `buffer` NULL and `capacity` 0 only `length` is written: the bytes needed, with the NUL at the end. The text may have
/// grown by the next call: leave some room.
///
/// Ownership: takes nothing over. Threads: any. Errors: INVALID_ARGUMENT for a NULL, CAPACITY if the text does not fit;
/// then nothing is written.
///
/// # Safety
/// `buffer` has room for `capacity` bytes; `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_metrics_text(
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_metrics_text", error, || {
            args::write_text(buffer, capacity, length, || {
                handle::report_live();
                c_text(&metrics::text())
            })
        })
    }
}

/// Has the log of Pagoda and of ONNX Runtime sent to `callback`, up to `level`; NULL stops it. Without a callback nothing
/// is logged. When this returns, the callback of before is not running and will not be called again.
///
/// Ownership: `user_data` must live until another callback is set. Threads: any, but not from within the callback.
/// Errors: INVALID_ARGUMENT for a level that there is not, UNSUPPORTED in a Rust program with a logger of its own.
///
/// # Safety
/// `callback` may be called with `user_data` from any thread; `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_log_set(
    level: pagoda_log_level,
    callback: pagoda_log_callback,
    user_data: *mut c_void,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe { boundary("pagoda_log_set", error, || set_log(level, callback, user_data)) }
}

fn set_log(level: pagoda_log_level, callback: pagoda_log_callback, user_data: *mut c_void) -> Result<()> {
    let filter = match level {
        PAGODA_LOG_OFF => log::LevelFilter::Off,
        PAGODA_LOG_ERROR => log::LevelFilter::Error,
        PAGODA_LOG_WARN => log::LevelFilter::Warn,
        PAGODA_LOG_INFO => log::LevelFilter::Info,
        PAGODA_LOG_DEBUG => log::LevelFilter::Debug,
        PAGODA_LOG_TRACE => log::LevelFilter::Trace,
        other => return Err(Error::invalid("level", format!("{other} is none of the PAGODA_LOG_... numbers"))),
    };
    if IN_CALLBACK.get() {
        return Err(Error::new(Status::Unsupported, "pagoda_log_set was called from within a log callback"));
    }
    let mut current = LOGGER.0.write();
    if current.is_none() && log::set_logger(&LOGGER).is_err() {
        return Err(Error::new(
            Status::Unsupported,
            "this program has a logger of Rust's `log` crate already: use that",
        ));
    }
    let sink = callback.map(|callback| Sink { callback, user_data });
    log::set_max_level(if sink.is_some() { filter } else { log::LevelFilter::Off });
    *current = Some(sink);
    Ok(())
}

static LOGGER: Logger = Logger(RwLock::new(None));

/// Where the log goes: `None` until it was installed, `Some(None)` when it is switched off.
struct Logger(RwLock<Option<Option<Sink>>>);

struct Sink {
    callback: unsafe extern "C" fn(*mut c_void, pagoda_log_level, *const c_char, *const c_char),
    user_data: *mut c_void,
}

// SAFETY: the header says that the callback is called from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

thread_local! {
    /// Whether this thread is inside the callback: what it logs there would come back to it without end.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record) {
        if !self.enabled(record.metadata()) || IN_CALLBACK.get() {
            return;
        }
        // Held during the callback, so that `pagoda_log_set` returns only when it is over.
        let current = self.0.read();
        if let Some(Some(sink)) = &*current {
            let (source, message) = (c_text(record.target()), c_text(&record.args().to_string()));
            IN_CALLBACK.set(true);
            // SAFETY: the caller gave the two for such calls; the texts live during it.
            unsafe {
                (sink.callback)(sink.user_data, record.level() as pagoda_log_level, source.as_ptr(), message.as_ptr());
            }
            IN_CALLBACK.set(false);
        }
    }

    fn flush(&self) {}
}
