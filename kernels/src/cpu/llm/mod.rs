//! The operators of language models on the CPU.

pub mod reference;
