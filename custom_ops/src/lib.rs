//! The `ai.pagoda` operators for ONNX Runtime: they read shapes and attributes, check them, and call the kernels.
//!
//! libpagoda.so calls [`register`] for its own sessions, and libpagoda_ops.so for those of any host. The modules depend on each
//! other in one direction: `registry` holds the table of operators, the families `hstu`, `llm` and `embedding` hold the operators (one
//! file an operator, one line in the family's list), and `ort` is the layer over ONNX Runtime's raw interface. What an
//! operator can not know from its node, such as where embedding tables come from, it gets through [`side_channel`].

// What operators share has parts that only those of language models use.
#![cfg_attr(not(feature = "llm"), allow(dead_code, unused_imports))]

mod embedding;
mod hstu;
#[cfg(feature = "llm")]
mod llm;
mod ort;
mod registry;
pub mod side_channel;

pub use registry::{DOMAIN, Providers, has_cuda, register};
