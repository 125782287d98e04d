//! The operators on the CPU, by family.

pub(crate) mod common;
mod embedding;
mod hstu;
mod llm;

pub use common::copy::copy;
pub use common::isa::Isa;

/// The operators in their plainest form: scalar, pair by pair, float64. Every other backend is tested against this.
pub mod reference {
    pub use super::embedding::reference::*;
    pub use super::hstu::reference::*;
    pub use super::llm::reference::*;
}
