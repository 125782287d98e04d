//! Launches of the operators of language models.

pub mod cache_policy;
mod gated_gemm;
pub mod glu;
pub mod paged_attention;
mod paged_attention_simt;
mod paged_attention_sm80;
mod paged_attention_sm90;
mod paged_call;
pub mod projection;
mod raw;
pub mod sampling;

/// The layouts that CUDA was compiled against are those that Rust has here.
mod layouts {
    use super::raw::*;

    include!(concat!(env!("OUT_DIR"), "/layouts_llm.rs"));
}
