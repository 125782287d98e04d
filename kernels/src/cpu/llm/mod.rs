//! The operators of language models on the CPU.

mod attention;
mod block_linear;
mod glu;
pub mod reference;

pub use attention::PagedAttentionElement;
pub use glu::GluElement;

/// An element type that the operators of language models are compiled for.
pub trait LlmElement: GluElement + PagedAttentionElement {}

impl<T: GluElement + PagedAttentionElement> LlmElement for T {}
