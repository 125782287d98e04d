//! The operators of language models on the CPU.

mod attention;
mod block_linear;
mod glu;
pub mod reference;

pub use attention::PagedAttentionElement;
pub use glu::GluElement;
