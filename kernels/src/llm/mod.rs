//! The operators of language models: what one call carries, and every check of it.

pub mod block_linear;
pub mod glu;
pub mod kv_format;
pub mod paged_attention;
