//! The declarative table of operators: one line of a family's list is one [`OperatorEntry`].

use std::ffi::CStr;

use ort_sys::{OrtApi, OrtCustomOp};

use super::custom_op::{self, Versions};
use super::operator::{Operator, Provider};

/// One operator of a family, with every kernel that is registered for it.
pub struct OperatorEntry {
    /// The name in the graph.
    pub name: &'static CStr,
    /// The opset versions that contain the operator.
    pub versions: Versions,
    /// The kernels: one list a provider, one kernel an element type.
    pub kernels: &'static [&'static [KernelEntry]],
}

/// One kernel of an operator: ONNX Runtime registers each combination of element types and provider on its own.
pub struct KernelEntry {
    provider: Provider,
    leak: fn(&'static OrtApi, &'static CStr, Versions) -> *const OrtCustomOp,
}

impl KernelEntry {
    /// The entry of the kernel `O`.
    pub const fn of<O: Operator>() -> Self {
        Self { provider: O::PROVIDER, leak: custom_op::leak::<O> }
    }
}

impl OperatorEntry {
    /// Creates the custom operators for one provider and one ONNX Runtime. They live as long as the process.
    pub fn custom_ops(&self, api: &'static OrtApi, provider: Provider) -> impl Iterator<Item = *const OrtCustomOp> {
        let kernels = self.kernels.iter().copied().flatten().filter(move |kernel| kernel.provider == provider);
        kernels.map(move |kernel| (kernel.leak)(api, self.name, self.versions))
    }
}

/// An [`OperatorEntry`]: the name in the graph, the type that implements [`Operator`] with its element types, the versions, and
/// the providers. `Cuda` needs the type to implement [`Launch`](super::cuda::Launch) too.
///
/// ```text
/// operator!(c"Scale", Scale<f32, f16, bf16>, Versions::since(1), [Cpu, Cuda])
/// ```
macro_rules! operator {
    ($name:literal, $operator:ident < $($element:ty),+ >, $versions:expr, $providers:tt) => {
        $crate::ort::operator!(@entry $name, $versions, $providers, [$($operator<$element>),+])
    };
    ($name:literal, $operator:ident, $versions:expr, $providers:tt) => {
        $crate::ort::operator!(@entry $name, $versions, $providers, [$operator])
    };
    (@entry $name:literal, $versions:expr, [$($provider:ident),+], $operators:tt) => {
        $crate::ort::OperatorEntry {
            name: $name,
            versions: $versions,
            kernels: &[$($crate::ort::operator!(@kernels $provider, $operators)),+],
        }
    };
    (@kernels Cpu, [$($operator:ty),+]) => {
        &[$($crate::ort::KernelEntry::of::<$operator>()),+]
    };
    (@kernels Cuda, [$($operator:ty),+]) => {
        &[$($crate::ort::KernelEntry::of::<$crate::ort::OnCuda<$operator>>()),+]
    };
}
pub(crate) use operator;
