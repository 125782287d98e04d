//! The table of all operators, and their registration with session options.

use std::ffi::CStr;

use ort_sys::{OrtApi, OrtCustomOp, OrtCustomOpDomain, OrtSessionOptions, OrtStatusPtr};
use parking_lot::Mutex;

#[cfg(feature = "llm")]
use crate::llm;
use crate::ort::{OperatorEntry, Provider, domain};
use crate::{embedding, hstu};

/// The operator domain of every family.
pub const DOMAIN: &CStr = c"ai.pagoda";

/// The operators by family. A family's list has one line an operator: name, element types, versions, providers.
const FAMILIES: &[&[OperatorEntry]] = &[
    hstu::OPERATORS,
    #[cfg(feature = "llm")]
    llm::OPERATORS,
    embedding::OPERATORS,
];

/// The execution providers of ONNX Runtime that operators are registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Providers {
    /// Every provider that this build has kernels for. In a session with the CUDA provider the nodes run on the GPU.
    All,
    /// The CPU provider alone, in every session.
    Cpu,
}

impl Providers {
    /// The providers, the CPU first: ONNX Runtime asks the operator that is registered first for shapes.
    fn list(self) -> &'static [Provider] {
        match self {
            Self::All if has_cuda() => &[Provider::Cpu, Provider::Cuda],
            // Without CUDA kernels the nodes stay on the CPU, and ONNX Runtime copies their tensors.
            Self::All | Self::Cpu => &[Provider::Cpu],
        }
    }
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
    match shared_domain(api, providers) {
        // SAFETY: `options` is live by contract; the domain lives as long as the process.
        Ok(domain) => unsafe { (api.AddCustomOpDomain)(options, domain) },
        Err(status) => status,
    }
}

/// The operator domain for one API table and choice of providers, created on first use. A process can hold several ONNX
/// Runtimes: Python's is linked into its module, and libonnxruntime.so can be loaded beside it. Sessions keep pointers into the
/// domain, so it lives as long as the process.
fn shared_domain(api: &'static OrtApi, providers: Providers) -> Result<*mut OrtCustomOpDomain, OrtStatusPtr> {
    static DOMAINS: Mutex<Vec<Domain>> = Mutex::new(Vec::new());
    let mut domains = DOMAINS.lock();
    let matches = |known: &&Domain| std::ptr::eq(known.api, api) && known.providers == providers;
    if let Some(known) = domains.iter().find(matches) {
        return Ok(known.raw);
    }
    let raw = domain::leak(api, DOMAIN, custom_ops(api, providers))?;
    domains.push(Domain { api, providers, raw });
    Ok(raw)
}

struct Domain {
    api: &'static OrtApi,
    providers: Providers,
    raw: *mut OrtCustomOpDomain,
}

// SAFETY: ONNX Runtime only reads a domain, from any thread that creates a session.
unsafe impl Send for Domain {}

/// Every operator, once for each provider and element type. ONNX Runtime uses those of the CUDA provider in sessions that have
/// it, and ignores them elsewhere.
fn custom_ops(api: &'static OrtApi, providers: Providers) -> impl Iterator<Item = *const OrtCustomOp> {
    let of_provider = move |provider| entries().flat_map(move |entry| entry.custom_ops(api, provider));
    providers.list().iter().copied().flat_map(of_provider)
}

fn entries() -> impl Iterator<Item = &'static OperatorEntry> {
    FAMILIES.iter().copied().flatten()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_operator_is_listed_once_with_kernels_and_versions() {
        let mut names = BTreeSet::new();
        for entry in entries() {
            let name = entry.name.to_str().unwrap();
            assert!(names.insert(name), "{name} is listed twice");
            assert!(!entry.kernels.is_empty() && entry.kernels.iter().all(|kernels| !kernels.is_empty()), "{name}");
            assert!(1 <= entry.versions.first && entry.versions.first <= entry.versions.last, "{name}");
        }
    }
}
