//! ONNX Runtime: finding the library, sessions, values, runs.

mod api;
mod cancel;
mod executor;
mod graph;
mod library;
mod model;
mod options;
mod request;
mod run_options;
mod session;
mod value;

pub(crate) use api::api;
pub use api::onnxruntime_path;
pub use cancel::Cancel;
pub(crate) use cancel::{Watcher, cancelled};
pub(crate) use graph::Graph;
pub use model::Model;
pub use options::{GraphTables, ModelOptions, Optimization, Provider};
pub use request::Request;
pub(crate) use session::has_cuda;
pub use value::ValueInfo;
