//! The `ai.pagoda` operators for ONNX Runtime: they read shapes and attributes, check them, and call the kernels.
//!
//! Both libpagoda.so (for its own sessions) and libpagoda_ops.so (for anyone's) register the operators with
//! [`register`]. One file an operator; `op`, `context` and `shape` are the thin layer over ONNX Runtime's raw interface.
//! Where embedding tables come from is for the library to say: [`tables`].

mod context;
mod element;
mod embedding_bag;
mod hstu_attention;
mod op;
mod paged_kv_append;
mod shape;
pub mod tables;

use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use ort_sys::{OrtApi, OrtCustomOp, OrtCustomOpDomain, OrtSessionOptions, OrtStatusPtr};
use pagoda_kernels::{bf16, f16};

use embedding_bag::EmbeddingBag;
use hstu_attention::HstuAttention;
use paged_kv_append::PagedKvAppend;

/// The domain of Pagoda's operators.
pub const DOMAIN: &CStr = c"ai.pagoda";

/// Adds the ai.pagoda operators to session options of the ONNX Runtime behind `api`.
///
/// # Safety
/// `options` is a live session options object made by `api`.
pub unsafe fn register(api: &'static OrtApi, options: *mut OrtSessionOptions) -> OrtStatusPtr {
    match domain(api) {
        // SAFETY: `options` is live by contract; the domain lives as long as the process.
        Ok(domain) => unsafe { (api.AddCustomOpDomain)(options, domain) },
        Err(status) => status,
    }
}

/// The operator domain for one ONNX Runtime. A process may hold several (Python's is linked into its module, beside
/// it libonnxruntime.so), and sessions keep pointers into the domain, so there is one per API table, made once and
/// kept for the life of the process.
fn domain(api: &'static OrtApi) -> Result<*mut OrtCustomOpDomain, OrtStatusPtr> {
    static DOMAINS: Mutex<Vec<Domain>> = Mutex::new(Vec::new());
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = domains.iter().find(|known| std::ptr::eq(known.api, api)) {
        return Ok(known.domain);
    }
    let mut domain = std::ptr::null_mut();
    // SAFETY: plain calls into the API with pointers that are valid for the call; the operators are leaked and so
    // outlive the domain.
    unsafe {
        check((api.CreateCustomOpDomain)(DOMAIN.as_ptr(), &mut domain))?;
        for op in operators(api) {
            check((api.CustomOpDomain_Add)(domain, op))?;
        }
    }
    domains.push(Domain { api, domain });
    Ok(domain)
}

struct Domain {
    api: &'static OrtApi,
    domain: *mut OrtCustomOpDomain,
}

// SAFETY: ONNX Runtime only reads a domain, from whichever thread opens a session.
unsafe impl Send for Domain {}

/// Every operator, once for each element type it is for.
fn operators(api: &'static OrtApi) -> [*const OrtCustomOp; 7] {
    [
        op::leak::<HstuAttention<f32>>(api),
        op::leak::<HstuAttention<f16>>(api),
        op::leak::<HstuAttention<bf16>>(api),
        op::leak::<PagedKvAppend<f32>>(api),
        op::leak::<PagedKvAppend<f16>>(api),
        op::leak::<PagedKvAppend<bf16>>(api),
        op::leak::<EmbeddingBag>(api),
    ]
}

fn check(status: OrtStatusPtr) -> Result<(), OrtStatusPtr> {
    if status.0.is_null() { Ok(()) } else { Err(status) }
}
