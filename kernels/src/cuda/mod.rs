//! Launches of the operators on NVIDIA's GPUs.
//!
//! A [`Gpu`] is a device with the kernels loaded onto it. [`Gpu::attention`], [`Gpu::append`] and the methods of the
//! other operators enqueue one call of an operator on a stream. Calls are described by device addresses, because index
//! tensors are on the device too. A launch does not wait for the GPU. It allocates nothing but counters, in the first
//! call of a stream. So a launch can be captured into a CUDA graph and replayed.
//!
//! A caller that has the index tensors in host memory checks them first ([`crate::HstuAttention::check`]). The kernels
//! do not trust them: no value in them makes a kernel read or write outside its tensors.
//!
//! Memory, streams and events are the caller's (`sdk::device`). The device code is in `kernels/cuda`, in the same
//! families.

mod common;
mod embedding;
mod hstu;
#[cfg(feature = "llm")]
mod llm;

pub use cudarc::driver::sys::{CUdeviceptr, CUstream};

pub use common::capture::{capture, may_wait, no_capture};
pub use common::counters::{KeptCounters, keep_counters};
pub use common::element_type::Type;
pub use common::error::{CudaError, asked};
pub use common::gpu::Gpu;
pub use common::kv_pack::Tokens;
pub use common::module::built;
pub use embedding::bag::{GivenRows, Slots, TableBag};
pub use embedding::table::{DeviceTable, TableLookup, TablePut};
pub use hstu::attention::Path;
pub use hstu::call::{Append, Attention, Cache, Rows, Scratch};
pub use hstu::dense_call::{DensePath, Gate, Norm, Output, Project, Taken};
pub use hstu::embed::{Embed, Lookup};
pub use hstu::linear::Linear;
pub use hstu::quantised_pool::QuantisedPages;
pub use hstu::unit::Unit;
#[cfg(feature = "llm")]
#[cfg(feature = "llm")]
pub use llm::cache_policy::{PolicyLayer, PolicyStep, SlotPolicies};
#[cfg(feature = "llm")]
pub use llm::glu::Glu;
#[cfg(feature = "llm")]
pub use llm::paged_attention::{HeadSlots, KeyWeights, PagedAttention, PagedPath, Rotation};
#[cfg(feature = "llm")]
pub use llm::projection::{Projection, Weight};
#[cfg(feature = "llm")]
pub use llm::sampling::{Sampling, SamplingPath, SamplingResult, SamplingRow, TokenEdit};
