//! KServe's protocol, version 2, over HTTP with the extension for binary tensors, and over gRPC.
//!
//! `tensors` is what a request asks, `infer` how each kind of model answers it, whatever brought it; `http` and `grpc` read and
//! write bodies.

mod datatype;
mod generate;
pub mod grpc;
mod handlers;
mod http;
mod infer;
mod json_data;
mod metadata;
mod plain;
mod rank;
mod repository;
mod statistics;
mod tensors;
mod values;

pub use repository::{index, load, unload};

pub use handlers::{
    all_statistics, infer_latest, infer_version, live, model_config, model_metadata, model_ready, model_statistics,
    model_version_config, model_version_metadata, model_version_ready, model_version_statistics, ready,
    server_metadata,
};
