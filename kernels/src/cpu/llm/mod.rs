//! The operators of language models on the CPU.

mod attention;
mod block_linear;
mod glu;
mod linear;
pub mod reference;

pub use attention::PagedAttentionElement;
pub use glu::GluElement;
pub use linear::LinearElement;

/// An element type that the operators of language models are compiled for.
pub trait LlmElement: GluElement + LinearElement + PagedAttentionElement {}

impl<T: GluElement + LinearElement + PagedAttentionElement> LlmElement for T {}
