//! libpagoda_ops.so: `RegisterCustomOps` and nothing else, so that Python's or anyone's ONNX Runtime can load the
//! ai.pagoda operators (`SessionOptions.register_custom_ops_library` in Python). Embedding tables are those of the
//! libpagoda.so beside it.

mod tables;

use std::ffi::{CStr, CString};

use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase, OrtErrorCode, OrtSessionOptions, OrtStatusPtr};
use pagoda_custom_ops::Providers;

/// Adds the ai.pagoda operators to `options`. ONNX Runtime calls this when the library is registered.
///
/// # Safety
/// Called by ONNX Runtime: `options` is a live session options object and `base` the host's API base.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn RegisterCustomOps(options: *mut OrtSessionOptions, base: *const OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the host passes its API base; the table it gives lives as long as the host library.
    let (base, api): (&OrtApiBase, Option<&'static OrtApi>) =
        unsafe { (&*base, (((*base).GetApi)(ORT_API_VERSION)).as_ref()) };
    match api {
        Some(api) => {
            pagoda_custom_ops::tables::set_opener(tables::open);
            // SAFETY: `options` is live by this function's contract.
            unsafe { pagoda_custom_ops::register(api, options, Providers::All) }
        }
        None => too_old(base),
    }
}

/// A status for a host whose ONNX Runtime does not know our API version.
fn too_old(base: &OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the version string is static in the host. Version 1 of the table is the prefix of every later one, so
    // only its first fields may be read, which is why no reference to the whole table is made.
    unsafe {
        let version = CStr::from_ptr((base.GetVersionString)()).to_string_lossy();
        let message = format!(
            "the ai.pagoda operators need ONNX Runtime 1.{ORT_API_VERSION} or later, this is {version}: upgrade it"
        );
        let message = CString::new(message).unwrap_or_default();
        let oldest: *const OrtApi = (base.GetApi)(1);
        ((*oldest).CreateStatus)(OrtErrorCode::ORT_FAIL, message.as_ptr())
    }
}
