//! `pagoda_status` and `pagoda_error`.

use std::ffi::{CStr, CString, c_char};
use std::sync::Arc;

use super::handle::{Kind, Object, Table};
use super::{c_text, freeing, reading};
use crate::error::{Error, Status};

/// How a call ended. 0 is success. A number is never reused for another meaning. Later versions may add numbers.
pub type pagoda_status = i32;

/// Success.
pub const PAGODA_STATUS_OK: pagoda_status = 0;
/// An argument has an invalid value; pagoda_error_argument names it. If an operator of the model found it during a run,
/// the message names the tensor instead.
pub const PAGODA_STATUS_INVALID_ARGUMENT: pagoda_status = 1;
/// A handle is NULL, freed, of another type, or not a handle at all.
pub const PAGODA_STATUS_INVALID_HANDLE: pagoda_status = 2;
/// A file, a library or a name does not exist.
pub const PAGODA_STATUS_NOT_FOUND: pagoda_status = 3;
/// The build, the model or the machine does not support this.
pub const PAGODA_STATUS_UNSUPPORTED: pagoda_status = 4;
/// A limit is reached: a queue is full, a buffer is too small, or memory is exhausted.
pub const PAGODA_STATUS_CAPACITY: pagoda_status = 5;
/// The call was cancelled, or its time limit was exceeded.
pub const PAGODA_STATUS_CANCELLED: pagoda_status = 6;
/// The model can not be loaded.
pub const PAGODA_STATUS_MODEL: pagoda_status = 7;
/// ONNX Runtime failed while it ran the model.
pub const PAGODA_STATUS_RUNTIME: pagoda_status = 8;
/// A file could not be read or written.
pub const PAGODA_STATUS_IO: pagoda_status = 9;
/// A bug in Pagoda: a panic was caught. Please report it.
pub const PAGODA_STATUS_INTERNAL: pagoda_status = 10;
/// The object is in use; try again later.
pub const PAGODA_STATUS_BUSY: pagoda_status = 11;

/// The description of a failure: a status, a message, and the argument at fault. A function that fails stores one
/// through its last argument, unless that is NULL. The caller frees it with pagoda_error_free.
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

/// Returns the name of a status without its prefix, e.g. "INVALID_ARGUMENT"; "UNKNOWN" for an unknown number.
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

/// Returns the status of an error; PAGODA_STATUS_INVALID_HANDLE if the handle is invalid.
///
/// Ownership: the caller keeps the error. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_status(error: *const pagoda_error) -> pagoda_status {
    reading("pagoda_error_status", PAGODA_STATUS_INVALID_HANDLE, || {
        Ok(ErrorObject::get(error, "error")?.status as pagoda_status)
    })
}

/// Returns the message of an error: which value was wrong, and what to do about it. Returns "" if the handle is
/// invalid.
///
/// Ownership: the text belongs to the error and is valid until the error is freed. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_message(error: *const pagoda_error) -> *const c_char {
    reading("pagoda_error_message", c"".as_ptr(), || Ok(text_of(&ErrorObject::get(error, "error")?.message)))
}

/// Returns the argument at fault, e.g. "inputs[1]" or "options.provider"; "" if there is none or the handle is invalid.
///
/// Ownership: the text belongs to the error and is valid until the error is freed. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_error_argument(error: *const pagoda_error) -> *const c_char {
    reading("pagoda_error_argument", c"".as_ptr(), || Ok(text_of(&ErrorObject::get(error, "error")?.argument)))
}

/// Frees an error. NULL is allowed.
///
/// Ownership: takes the error. Threads: any. Errors: INVALID_HANDLE, which is also logged.
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
            PAGODA_STATUS_OK,
            PAGODA_STATUS_INVALID_ARGUMENT,
            PAGODA_STATUS_INVALID_HANDLE,
            PAGODA_STATUS_NOT_FOUND,
            PAGODA_STATUS_UNSUPPORTED,
            PAGODA_STATUS_CAPACITY,
            PAGODA_STATUS_CANCELLED,
            PAGODA_STATUS_MODEL,
            PAGODA_STATUS_RUNTIME,
            PAGODA_STATUS_IO,
            PAGODA_STATUS_INTERNAL,
            PAGODA_STATUS_BUSY,
        ];
        assert_eq!(constants.map(i64::from), Status::ALL.map(|status| status as i64));
    }
}
