//! The operators of language models on the CPU.

mod attention;
mod glu;
pub mod reference;

pub use attention::PagedAttentionElement;
pub use glu::GluElement;
