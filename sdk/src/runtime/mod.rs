//! ONNX Runtime: finding the library, sessions, values, runs.

mod api;
mod cancel;
mod executor;
mod library;
mod model;
mod request;
mod session;
mod value;

pub use api::onnxruntime_path;
pub use cancel::Cancel;
pub(crate) use cancel::{Watcher, cancelled};
pub use model::Model;
pub use request::Request;
pub use value::ValueInfo;
