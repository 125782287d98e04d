//! The `ai.pagoda` operators for ONNX Runtime: they read shapes and attributes, check them, and call the kernels.
//!
//! Both libpagoda.so (for its own sessions) and libpagoda_ops.so (for anyone's) register the operators with
//! [`register`]. One file an operator; `op`, `context` and `shape` are the thin layer over ONNX Runtime's raw interface,
//! `cuda` is what operators need to be on its CUDA provider too. Where embedding tables come from is for the library to
//! say: [`tables`].

mod append;
mod context;
mod cuda;
mod element;
mod embedding_bag;
mod hstu_attention;
mod hstu_embed;
mod hstu_gate;
mod hstu_linear;
mod hstu_norm;
mod hstu_output;
mod hstu_project;
mod hstu_unit;
mod inputs;
mod op;
mod paged_kv_append;
mod scratch;
mod shape;
pub mod tables;

use std::ffi::CStr;
use std::sync::{Mutex, PoisonError};

use ort_sys::{OrtApi, OrtCustomOp, OrtCustomOpDomain, OrtSessionOptions, OrtStatusPtr};
use pagoda_kernels::{bf16, f16};

use cuda::OnCuda;
use embedding_bag::EmbeddingBag;
use hstu_attention::HstuAttention;
use hstu_embed::HstuEmbed;
use hstu_gate::HstuGate;
use hstu_linear::HstuLinear;
use hstu_norm::HstuNorm;
use hstu_output::HstuOutput;
use hstu_project::HstuProject;
use hstu_unit::HstuUnit;
use paged_kv_append::PagedKvAppend;

/// The domain of Pagoda's operators.
pub const DOMAIN: &CStr = c"ai.pagoda";

/// Which of ONNX Runtime's providers the operators are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Providers {
    /// All that there are kernels for: in a session with the CUDA provider nodes run on the GPU.
    All,
    /// The CPU alone, in every session.
    Cpu,
}

/// Whether this build has operators for ONNX Runtime's CUDA provider.
pub fn has_cuda() -> bool {
    pagoda_kernels::cuda::built()
}

/// Adds the ai.pagoda operators to session options of the ONNX Runtime behind `api`.
///
/// # Safety
/// `options` is a live session options object made by `api`.
pub unsafe fn register(api: &'static OrtApi, options: *mut OrtSessionOptions, providers: Providers) -> OrtStatusPtr {
    match domain(api, providers) {
        // SAFETY: `options` is live by contract; the domain lives as long as the process.
        Ok(domain) => unsafe { (api.AddCustomOpDomain)(options, domain) },
        Err(status) => status,
    }
}

/// The operator domain for one ONNX Runtime. A process may hold several (Python's is linked into its module, beside
/// it libonnxruntime.so), and sessions keep pointers into the domain, so there is one per API table and choice of
/// providers, made once and kept for the life of the process.
fn domain(api: &'static OrtApi, providers: Providers) -> Result<*mut OrtCustomOpDomain, OrtStatusPtr> {
    static DOMAINS: Mutex<Vec<Domain>> = Mutex::new(Vec::new());
    let mut domains = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |known: &&Domain| std::ptr::eq(known.api, api) && known.providers == providers;
    if let Some(known) = domains.iter().find(is_it) {
        return Ok(known.domain);
    }
    let mut domain = std::ptr::null_mut();
    // SAFETY: plain calls into the API with pointers that are valid for the call; the operators are leaked and so
    // outlive the domain.
    unsafe {
        check((api.CreateCustomOpDomain)(DOMAIN.as_ptr(), &mut domain))?;
        for op in operators(api, providers) {
            check((api.CustomOpDomain_Add)(domain, op))?;
        }
    }
    domains.push(Domain { api, providers, domain });
    Ok(domain)
}

struct Domain {
    api: &'static OrtApi,
    providers: Providers,
    domain: *mut OrtCustomOpDomain,
}

// SAFETY: ONNX Runtime only reads a domain, from whichever thread opens a session.
unsafe impl Send for Domain {}

/// Every operator, once for each element type and provider it is for. ONNX Runtime takes those of the CUDA provider where
/// a session has that provider; elsewhere they are never asked for anything.
fn operators(api: &'static OrtApi, providers: Providers) -> Vec<*const OrtCustomOp> {
    let mut operators = vec![
        op::leak::<HstuAttention<f32>>(api),
        op::leak::<HstuAttention<f16>>(api),
        op::leak::<HstuAttention<bf16>>(api),
        op::leak::<PagedKvAppend<f32>>(api),
        op::leak::<PagedKvAppend<f16>>(api),
        op::leak::<PagedKvAppend<bf16>>(api),
        op::leak::<HstuNorm<f32>>(api),
        op::leak::<HstuNorm<f16>>(api),
        op::leak::<HstuNorm<bf16>>(api),
        op::leak::<HstuProject<f32>>(api),
        op::leak::<HstuProject<f16>>(api),
        op::leak::<HstuProject<bf16>>(api),
        op::leak::<HstuGate<f32>>(api),
        op::leak::<HstuGate<f16>>(api),
        op::leak::<HstuGate<bf16>>(api),
        op::leak::<HstuOutput<f32>>(api),
        op::leak::<HstuOutput<f16>>(api),
        op::leak::<HstuOutput<bf16>>(api),
        op::leak::<HstuEmbed<f32>>(api),
        op::leak::<HstuEmbed<f16>>(api),
        op::leak::<HstuEmbed<bf16>>(api),
        op::leak::<HstuUnit<f32>>(api),
        op::leak::<HstuUnit<f16>>(api),
        op::leak::<HstuUnit<bf16>>(api),
        op::leak::<HstuLinear>(api),
        op::leak::<EmbeddingBag>(api),
    ];
    // Without kernels the nodes stay on the CPU, and ONNX Runtime copies what they need.
    if has_cuda() && providers == Providers::All {
        operators.extend([
            op::leak::<OnCuda<HstuAttention<f32>>>(api),
            op::leak::<OnCuda<HstuAttention<f16>>>(api),
            op::leak::<OnCuda<HstuAttention<bf16>>>(api),
            op::leak::<OnCuda<PagedKvAppend<f32>>>(api),
            op::leak::<OnCuda<PagedKvAppend<f16>>>(api),
            op::leak::<OnCuda<PagedKvAppend<bf16>>>(api),
            op::leak::<OnCuda<HstuNorm<f32>>>(api),
            op::leak::<OnCuda<HstuNorm<f16>>>(api),
            op::leak::<OnCuda<HstuNorm<bf16>>>(api),
            op::leak::<OnCuda<HstuProject<f32>>>(api),
            op::leak::<OnCuda<HstuProject<f16>>>(api),
            op::leak::<OnCuda<HstuProject<bf16>>>(api),
            op::leak::<OnCuda<HstuGate<f32>>>(api),
            op::leak::<OnCuda<HstuGate<f16>>>(api),
            op::leak::<OnCuda<HstuGate<bf16>>>(api),
            op::leak::<OnCuda<HstuOutput<f32>>>(api),
            op::leak::<OnCuda<HstuOutput<f16>>>(api),
            op::leak::<OnCuda<HstuOutput<bf16>>>(api),
            op::leak::<OnCuda<HstuEmbed<f32>>>(api),
            op::leak::<OnCuda<HstuEmbed<f16>>>(api),
            op::leak::<OnCuda<HstuEmbed<bf16>>>(api),
            op::leak::<OnCuda<HstuUnit<f32>>>(api),
            op::leak::<OnCuda<HstuUnit<f16>>>(api),
            op::leak::<OnCuda<HstuUnit<bf16>>>(api),
            op::leak::<OnCuda<HstuLinear>>(api),
            op::leak::<OnCuda<EmbeddingBag>>(api),
        ]);
    }
    operators
}

fn check(status: OrtStatusPtr) -> Result<(), OrtStatusPtr> {
    if status.0.is_null() { Ok(()) } else { Err(status) }
}
