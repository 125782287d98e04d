//! The operators on the CPU, by family.

#[macro_use]
pub(crate) mod common;
mod embedding;
mod hstu;
#[cfg(feature = "llm")]
mod llm;

#[cfg(not(feature = "llm"))]
use crate::Element as LlmElement;
pub use common::copy::copy;
pub use common::finite::{leading_finite_bf16, leading_finite_f16, leading_finite_f32};
pub use common::isa::Isa;
pub use hstu::{HstuAppendElement, HstuAttentionElement, HstuDenseElement};
#[cfg(feature = "llm")]
pub use llm::{GluElement, LinearElement, LlmElement, PagedAttentionElement};

/// An element type that every operator is compiled for: `f32`, `f16` and `bf16`.
pub trait OperatorElement: HstuAttentionElement + HstuAppendElement + HstuDenseElement + LlmElement {}

impl<T: HstuAttentionElement + HstuAppendElement + HstuDenseElement + LlmElement> OperatorElement for T {}

/// The operators in their plainest form: scalar, pair by pair, float64. Every other backend is tested against this.
pub mod reference {
    pub use super::embedding::reference::*;
    pub use super::hstu::reference::*;
    #[cfg(feature = "llm")]
    pub use super::llm::reference::*;
}
