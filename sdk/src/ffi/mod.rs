//! The C interface, `include/pagoda.h`: null and handle checks, the panic boundary, one call each; no logic.
//!
//! The header is generated from these files (`make header`); their comments are its documentation.
#![allow(non_camel_case_types)]
// The comments are those of a C header: "inputs[1]" is an element, not a link.
#![allow(rustdoc::broken_intra_doc_links)]

mod args;
mod embedding;
mod engine;
mod engine_options;
mod error;
mod fault;
#[cfg(feature = "llm")]
mod generator;
#[cfg(feature = "llm")]
mod generator_options;
#[cfg(feature = "llm")]
mod generator_request;
#[cfg(feature = "llm")]
mod generator_response;
mod handle;
mod kv;
mod kv_lease;
mod kv_options;
mod model;
mod process;
mod run;
mod store;
mod tensor;

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use engine::*;
pub use engine_options::*;
pub use error::*;
#[cfg(feature = "llm")]
pub use generator::*;
#[cfg(feature = "llm")]
pub use generator_options::*;
#[cfg(feature = "llm")]
pub use generator_request::*;
#[cfg(feature = "llm")]
pub use generator_response::*;
pub use kv::*;
pub use kv_lease::*;
pub use kv_options::*;
pub use model::*;
pub use process::*;
pub use run::*;
pub use store::*;
pub use tensor::*;

use crate::error::{Error, Result};

/// The boundary of every function that returns a status: runs `body`, turns a panic into an error, and hands the error
/// to the caller.
///
/// # Safety
/// `error` is NULL or points to where a `pagoda_error *` may be written.
unsafe fn boundary(
    function: &'static str,
    error: *mut *mut pagoda_error,
    body: impl FnOnce() -> Result<()>,
) -> pagoda_status {
    let Err(failure) = caught(function, body) else { return PAGODA_STATUS_OK };
    log::debug!("{function}: {failure}");
    let status = failure.status() as pagoda_status;
    if !error.is_null() {
        // SAFETY: by contract.
        unsafe { *error = ErrorObject::into_handle(failure) };
    }
    status
}

/// The boundary of every function that only reads something small: a panic, or anything wrong, gives `otherwise`.
fn reading<T>(function: &'static str, otherwise: T, body: impl FnOnce() -> Result<T>) -> T {
    caught(function, body).unwrap_or_else(|failure| {
        log::error!("{function}: {failure}");
        otherwise
    })
}

/// The boundary of every `_free`: there is no error object to hand out, so what was wrong goes to the log.
fn freeing(function: &'static str, body: impl FnOnce() -> Result<()>) -> pagoda_status {
    match caught(function, body) {
        Ok(()) => PAGODA_STATUS_OK,
        Err(failure) => {
            log::error!("{function}: {failure}");
            failure.status() as pagoda_status
        }
    }
}

fn caught<T>(function: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let body = || {
        fault::trip(function);
        body()
    };
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(Error::from_panic(payload.as_ref())))
}

/// A text as C takes it. A NUL inside, which C could not tell from the end, is spelt out.
fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\\0")).unwrap_or_default()
}
