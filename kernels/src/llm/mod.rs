//! The operators of language models: what one call carries, and every check of it.

#[cfg(feature = "llm")]
pub mod block_linear;
#[cfg(feature = "llm")]
pub mod glu;
#[cfg(feature = "llm")]
pub mod linear;
#[cfg(feature = "llm")]
pub mod paged_attention;
