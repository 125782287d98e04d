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
//!
//! An [`Engine`] ranks, and a [`Generator`] generates text: each serves a model folder, and has an example.
//! [`KvCache`], [`DiskStore`] and [`embedding`] are what they stand on.
//!
//! # Features
//!
//! `llm`, the generator, and `redis`, a tier of embedding tables, are on by default. These are not:
//!
//! - `futures`: [`TokenStream::into_async`](engine::TokenStream::into_async), the tokens of a request as a `Stream`.
//! - `ndarray`: [`Tensor::view`], [`Tensor::view_mut`] and [`Tensor::from_array`], without copies.
//! - `serde`: `Serialize` and `Deserialize` for requests, responses and statistics, and for the options of models, engines,
//!   generators, stores and embedding tables. What is left out has its default; a field that there is not is an error, but for
//!   responses and statistics.
//!
//! ```
//! # #[cfg(feature = "serde")]
//! # fn main() -> Result<(), serde_json::Error> {
//! let request: pagoda::RankRequest = serde_json::from_str(r#"{"user": 7, "candidates": {"movie": [8, 15, 16]}}"#)?;
//! assert_eq!(request.candidates.get("movie"), Some(&[8, 15, 16][..]));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "serde"))]
//! # fn main() {}
//! ```

// docs.rs says what needs a feature.
#![cfg_attr(docsrs, feature(doc_cfg))]
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
