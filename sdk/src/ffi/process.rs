//! What belongs to the whole process: versions, the log, metrics, live objects.

use std::cell::Cell;
use std::ffi::{c_char, c_void};

use super::error::{pagoda_error, pagoda_status};
use super::{args, boundary, c_text, handle, reading};
use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::RwLock;

/// The version of the binary interface. It changes only if a program that was built with the header of another version
/// would not work.
pub const PAGODA_ABI_VERSION: u32 = 1;

/// How much is logged. A level includes the levels before it.
pub type pagoda_log_level = i32;

/// Nothing.
pub const PAGODA_LOG_LEVEL_OFF: pagoda_log_level = 0;
/// Failures, above all those that no call returns.
pub const PAGODA_LOG_LEVEL_ERROR: pagoda_log_level = 1;
/// What is probably not intended, such as a model that runs on the CPU because there is no GPU.
pub const PAGODA_LOG_LEVEL_WARN: pagoda_log_level = 2;
/// Rare events, such as a model swap.
pub const PAGODA_LOG_LEVEL_INFO: pagoda_log_level = 3;
/// Details for debugging, such as every error that a call returns.
pub const PAGODA_LOG_LEVEL_DEBUG: pagoda_log_level = 4;
/// Everything.
pub const PAGODA_LOG_LEVEL_TRACE: pagoda_log_level = 5;

/// Receives the lines of the log, on any thread. `source` is the component that logs, e.g. "onnxruntime". The texts are
/// valid during the call only. The callback must not call pagoda_log_set and must not open models. Lines that are
/// logged on the same thread while the callback runs are dropped.
pub type pagoda_log_callback = Option<
    unsafe extern "C" fn(
        user_data: *mut c_void,
        level: pagoda_log_level,
        source: *const c_char,
        message: *const c_char,
    ),
>;

/// Returns the ABI version of the library: the PAGODA_ABI_VERSION that it was built with.
///
/// Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_abi_version() -> u32 {
    reading("pagoda_abi_version", 0, || Ok(PAGODA_ABI_VERSION))
}

/// Checks that the library works with a program that was built with the header of ABI version `header_version`. Call it
/// first, with PAGODA_ABI_VERSION.
///
/// Threads: any. Errors: UNSUPPORTED; the message has both versions.
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

/// Returns the version of the library as text, e.g. "0.1.0". PAGODA_VERSION is that of the header.
///
/// Ownership: the text is static. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    reading("pagoda_version", c"".as_ptr(), || Ok(VERSION.as_ptr().cast()))
}

/// Returns the version of the library as a number: major * 1,000,000 + minor * 1,000 + patch. PAGODA_VERSION_NUMBER is
/// that of the header.
///
/// Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_version_number() -> u32 {
    const PARTS: [&str; 3] =
        [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
    reading("pagoda_version_number", 0, || {
        // Cargo has checked that they are numbers.
        Ok(PARTS.iter().fold(0, |number, part| 1000 * number + part.parse::<u32>().unwrap_or(0)))
    })
}

/// Returns the number of handles of all types that were not freed. 0 means that nothing leaks.
///
/// Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_live_objects() -> usize {
    reading("pagoda_live_objects", 0, || Ok(handle::live()))
}

/// Writes the metrics of the process to `buffer` as Prometheus text, for the content type
/// "application/openmetrics-text; version=1.0.0". `length` receives the number of bytes with the NUL. With `buffer`
/// NULL and `capacity` 0 only `length` is written. The text can be longer in the next call: allocate some more.
///
/// Ownership: the caller keeps the buffer. Threads: any. Errors: INVALID_ARGUMENT for a NULL; CAPACITY if the text does
/// not fit, and then nothing is written.
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

/// Sends the log of Pagoda and of ONNX Runtime to `callback`, up to `level`. NULL stops the log. Without a callback
/// nothing is logged. When this returns, the previous callback is not running and will not be called again.
///
/// Ownership: `user_data` must be valid until another callback is set. Threads: any, but not from the callback. Errors:
/// INVALID_ARGUMENT for an unknown level; UNSUPPORTED from the callback, and in a Rust program that has its own logger.
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
        PAGODA_LOG_LEVEL_OFF => log::LevelFilter::Off,
        PAGODA_LOG_LEVEL_ERROR => log::LevelFilter::Error,
        PAGODA_LOG_LEVEL_WARN => log::LevelFilter::Warn,
        PAGODA_LOG_LEVEL_INFO => log::LevelFilter::Info,
        PAGODA_LOG_LEVEL_DEBUG => log::LevelFilter::Debug,
        PAGODA_LOG_LEVEL_TRACE => log::LevelFilter::Trace,
        other => return Err(Error::invalid("level", format!("{other} is none of the PAGODA_LOG_LEVEL_... numbers"))),
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
