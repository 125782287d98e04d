//! Pagoda: inference for models that remember.
//!
//! An application opens an ONNX [`Model`], hands it [`Tensor`]s and gets tensors back; the library keeps what the
//! model would otherwise compute or fetch again. Programs in other languages reach the same things through
//! `include/pagoda.h`.
//!
//! ```no_run
//! use pagoda::{Model, ModelOptions, Tensor};
//!
//! let model = Model::open("model.onnx", &ModelOptions::default())?;
//! let x = Tensor::from_slice(&[1, 3], &[1.0_f32, 2.0, 3.0])?;
//! let y = model.run(&[("x", &x)], &["y"])?;
//! println!("{:?}", y[0].as_slice::<f32>()?);
//! # Ok::<(), pagoda::Error>(())
//! ```

// What engines share has parts that only the generator uses.
#![cfg_attr(not(feature = "llm"), allow(dead_code, unused_imports))]

mod checksum;
#[doc(hidden)]
pub mod device;
pub mod embedding;
pub mod engine;
pub mod error;
mod files;
pub mod folder;
#[doc(hidden)]
pub mod json;
pub mod kv;
pub mod metrics;
pub mod runtime;
pub mod store;
mod sync;
pub mod tensor;
#[cfg(feature = "llm")]
pub mod text;

pub mod ffi;

pub use engine::{Engine, EngineOptions, ModelFolder, RankRequest, RankResponse};
#[cfg(feature = "llm")]
pub use engine::{GenerateRequest, GenerateResponse, Generator, GeneratorOptions};
pub use error::{Error, Result, Status};
pub use kv::{Edited, KvCache, KvFormat, KvLease, KvOptions, KvSize, Offload, Overlap};
pub use runtime::{Cancel, Model, ModelOptions, Optimization, Provider, ValueInfo};
pub use store::{DiskStore, Durability, Owner, StoreOptions};
pub use tensor::{ElementType, Tensor};
