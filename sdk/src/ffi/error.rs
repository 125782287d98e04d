//! `pagoda_status` and `pagoda_error`.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use super::handle::{Kind, Object, Table};
use super::{c_text, freeing, reading};
use crate::error::{Error, Status};

/// How a call ended. 0 is success; numbers are never reused. A caller must expect numbers that it does not know.
pub type pagoda_status = i32;

/// Success.
pub const PAGODA_OK: pagoda_status = 0;
/// An argument has a value that can not be used; pagoda_error_argument names it. Where the model's operators found it
/// during a run, the message names the tensor instead.
pub const PAGODA_INVALID_ARGUMENT: pagoda_status = 1;
/// A handle is NULL, was freed, is of another type, or never was one.
pub const PAGODA_INVALID_HANDLE: pagoda_status = 2;
/// A file, a library or a name does not exist.
pub const PAGODA_NOT_FOUND: pagoda_status = 3;
/// What was asked for is not possible with this build, this model or this machine.
pub const PAGODA_UNSUPPORTED: pagoda_status = 4;
/// A limit is reached: a queue is full, a buffer too small, memory exhausted.
pub const PAGODA_CAPACITY: pagoda_status = 5;
/// The caller cancelled the run.
pub const PAGODA_CANCELLED: pagoda_status = 6;
/// The model can not be loaded.
pub const PAGODA_MODEL: pagoda_status = 7;
/// ONNX Runtime failed while running the model.
pub const PAGODA_RUNTIME: pagoda_status = 8;
/// Reading or writing a file failed.
pub const PAGODA_IO: pagoda_status = 9;
/// A bug in Pagoda: something panicked. Please report it.
pub const PAGODA_INTERNAL: pagoda_status = 10;
/// Someone else uses it now; try again when they are done.
pub const PAGODA_BUSY: pagoda_status = 11;

/// What went wrong, in words. Functions that fail hand one out through their last argument, unless that is NULL; it
/// belongs to the caller, who frees it with pagoda_error_free.
pub struct pagoda_error {
    _private: [u8; 0],
}

pub(super) struct ErrorObject {
    status: Status,
    message: CString,
    argument: CString,
}

impl Object for ErrorObject {
    type C = pagoda_error;
    const KIND: Kind = Kind::Error;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<ErrorObject> = Table::new();
        &TABLE
    }
}

impl ErrorObject {
    /// A handle of the error; NULL if there are too many, for the status alone must then do.
    pub(super) fn into_handle(error: Error) -> *mut pagoda_error {
        let object = Self {
            status: error.status(),
            message: c_text(&error.to_string()),
            argument: c_text(error.argument().unwrap_or_default()),
        };
        Arc::new(object).insert().unwrap_or(std::ptr::null_mut())
    }
}

/// The name of a status without its prefix, e.g. "INVALID_ARGUMENT"; "UNKNOWN" for a number that has none.
///
/// Ownership: the text is static. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_status_name(status: pagoda_status) -> *const c_char {
    reading("pagoda_status_name", c"UNKNOWN", || {
        let known = usize::try_from(status).ok().and_then(|number| Status::ALL.get(number));
        Ok(known.map_or(c"UNKNOWN", |status| status.c_name()))
    })
    .as_ptr()
}

/// The status of an error. A handle that is not one gives PAGODA_INVALID_HANDLE.
///
/// Ownership: takes nothing over. Threads: any. Errors: none but that.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_code(error: *const pagoda_error) -> pagoda_status {
    reading(
        "pagoda_error_code",
        PAGODA_INVALID_HANDLE,
        || Ok(ErrorObject::get(error, "error")?.status as pagoda_status),
    )
}

/// What was wrong with which value and what to do about it. A handle that is not one gives "".
///
/// Ownership: the text belongs to the error and lives until it is freed. Threads: any. Errors: none but that.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_message(error: *const pagoda_error) -> *const c_char {
    reading("pagoda_error_message", c"".as_ptr(), || Ok(text_of(&ErrorObject::get(error, "error")?.message)))
}

/// Which argument was at fault, e.g. "inputs[1]" or "options.provider"; "" if none was. A handle that is not one gives
/// "".
///
/// Ownership: the text belongs to the error and lives until it is freed. Threads: any. Errors: none but that.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_argument(error: *const pagoda_error) -> *const c_char {
    reading("pagoda_error_argument", c"".as_ptr(), || Ok(text_of(&ErrorObject::get(error, "error")?.argument)))
}

/// Frees an error. NULL is fine.
///
/// Ownership: takes the error over. Threads: any. Errors: PAGODA_INVALID_HANDLE, and a line in the log.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_free(error: *mut pagoda_error) -> pagoda_status {
    freeing("pagoda_error_free", || ErrorObject::remove(error, "error"))
}

/// The table keeps the object, and so the text, until the handle is freed.
fn text_of(text: &CStr) -> *const c_char {
    text.as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_the_statuses() {
        let constants = [
            PAGODA_OK,
            PAGODA_INVALID_ARGUMENT,
            PAGODA_INVALID_HANDLE,
            PAGODA_NOT_FOUND,
            PAGODA_UNSUPPORTED,
            PAGODA_CAPACITY,
            PAGODA_CANCELLED,
            PAGODA_MODEL,
            PAGODA_RUNTIME,
            PAGODA_IO,
            PAGODA_INTERNAL,
            PAGODA_BUSY,
        ];
        assert_eq!(constants.map(i64::from), Status::ALL.map(|status| status as i64));
    }
}
