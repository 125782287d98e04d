//! The operators on the CPU, by family.

#[macro_use]
pub(crate) mod common;
mod embedding;
mod hstu;
mod llm;

pub use common::copy::copy;
pub use common::isa::Isa;
pub use hstu::{HstuAttentionElement, HstuDenseElement};
pub use llm::{GluElement, PagedAttentionElement};

/// An element type that every operator is compiled for: `f32`, `f16` and `bf16`.
pub trait OperatorElement: HstuAttentionElement + HstuDenseElement + GluElement + PagedAttentionElement {}

impl<T: HstuAttentionElement + HstuDenseElement + GluElement + PagedAttentionElement> OperatorElement for T {}

/// The operators in their plainest form: scalar, pair by pair, float64. Every other backend is tested against this.
pub mod reference {
    pub use super::embedding::reference::*;
    pub use super::hstu::reference::*;
    pub use super::llm::reference::*;
}
