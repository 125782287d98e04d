//! The operators of language models on the CPU.

mod attention;
pub mod reference;
