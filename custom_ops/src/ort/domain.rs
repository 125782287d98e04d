//! `OrtCustomOpDomain`: a set of custom operators that sessions register together.

use std::ffi::CStr;
use std::ptr::null_mut;

use ort_sys::{OrtApi, OrtCustomOp, OrtCustomOpDomain, OrtStatusPtr};

/// Creates a domain that lives as long as the process: sessions keep pointers into it.
pub fn leak(
    api: &'static OrtApi,
    name: &CStr,
    custom_ops: impl IntoIterator<Item = *const OrtCustomOp>,
) -> Result<*mut OrtCustomOpDomain, OrtStatusPtr> {
    let mut domain = null_mut();
    // SAFETY: every pointer is valid for the call. The operators are leaked, so they outlive the domain.
    unsafe {
        check((api.CreateCustomOpDomain)(name.as_ptr(), &mut domain))?;
        for op in custom_ops {
            check((api.CustomOpDomain_Add)(domain, op))?;
        }
    }
    Ok(domain)
}

/// The status itself is the error: the caller returns it to the host.
fn check(status: OrtStatusPtr) -> Result<(), OrtStatusPtr> {
    if status.0.is_null() { Ok(()) } else { Err(status) }
}
