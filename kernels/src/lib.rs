//! The compute kernels behind Pagoda's ONNX operators.
//!
//! Kernels take slices and know no framework type. Each operator is a struct that describes one call: its `check` refuses bad
//! input before anything is written, and its `run` computes on the CPU with the best instruction set there is.
//!
//! Operators come in families: [`hstu`], [`llm`] and [`embedding`]; [`common`] is what they share. The same folders are in [`cpu`] (the
//! vectorised kernels, spread over threads by [`parallel`]), in [`cuda`] (the launches of those for NVIDIA's GPUs) and in
//! `kernels/cuda` (the device code). [`cpu::reference`] is the arithmetic in its plainest form.

#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]
// What families share has parts that only language models use.
#![cfg_attr(not(feature = "llm"), allow(dead_code, unused_imports))]

pub mod common;
pub mod cpu;
pub mod cuda;
pub mod embedding;
pub mod hstu;
pub mod llm;

pub use common::element::Element;
pub use common::input_error::InputError;
pub use common::kv_format::KvFormat;
pub use common::kv_view::{KvView, QuantisedPool};
pub use common::pages::Pages;
pub use common::parallel;
pub use embedding::pool::{Combiner, Pool, check_offsets};
pub use half::{bf16, f16};
pub use hstu::batch::{CheckedAppend, CheckedAttention, HstuAttention, PagedKvAppend, Rows};
pub use hstu::dense::{GateNorm, HstuGate, HstuNorm, HstuOutput, HstuProject, Silu, Taken};
pub use hstu::embed::{HstuEmbed, Lookup};
pub use hstu::linear::{Activation, HstuLinear};
pub use hstu::unit::HstuUnit;
#[cfg(feature = "llm")]
pub use llm::block_linear::{BLOCK, BlockLinear, CodeBits, OUTPUT_BLOCK};
#[cfg(feature = "llm")]
pub use llm::glu::{Glu, GluActivation};
#[cfg(feature = "llm")]
pub use llm::linear::{Linear, RmsNorm};
#[cfg(feature = "llm")]
pub use llm::paged_attention::{HeadSlots, KV_NORMS, KvPool, PagedAttention, Pairs, Rotation};
