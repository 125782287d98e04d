//! libpagoda_ops.so: the ai.pagoda operators for any host of ONNX Runtime. The library exports `RegisterCustomOps` alone; in
//! Python, `SessionOptions.register_custom_ops_library` calls it. Embedding tables come from the libpagoda.so beside it.

mod libpagoda;
mod tables;

use std::ffi::{CStr, CString};

use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase, OrtErrorCode, OrtSessionOptions, OrtStatusPtr};
use pagoda_custom_ops::Providers;

/// Adds the ai.pagoda operators to `options`. ONNX Runtime calls this when a host registers the library.
///
/// # Safety
/// `options` is a live session options object and `base` is the host's API base, as ONNX Runtime passes them.
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub unsafe extern "C" fn RegisterCustomOps(options: *mut OrtSessionOptions, base: *const OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the host passes its API base; the API table lives as long as the host library.
    let (base, api): (&OrtApiBase, Option<&'static OrtApi>) =
        unsafe { (&*base, (((*base).GetApi)(ORT_API_VERSION)).as_ref()) };
    match api {
        Some(api) => {
            pagoda_custom_ops::side_channel::tables::set_opener(tables::open);
            // SAFETY: `options` is live by this function's contract.
            unsafe { pagoda_custom_ops::register(api, options, Providers::All) }
        }
        None => too_old(base),
    }
}

/// The status for a host whose ONNX Runtime does not have the required API version.
fn too_old(base: &OrtApiBase) -> OrtStatusPtr {
    // SAFETY: the version string is static in the host. Version 1 of the API table is a prefix of every later version, so
    // only its first fields are read, and no reference to the whole table is made.
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
