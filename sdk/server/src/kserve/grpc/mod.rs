//! KServe's protocol over gRPC: proto/kserve.proto.
//!
//! `convert` is between messages and tensors, `calls` answers one message with one, `stream` any number with any number.

mod calls;
mod convert;
mod messages;
mod stream;

use std::sync::Arc;

use axum::Router;
use axum::routing::post;

pub use calls::infer;

use crate::state::State;

/// The path of the call that computes.
pub const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";

/// The other calls. A stream has a slot for each of its messages.
pub fn router() -> Router<Arc<State>> {
    let path = |method: &str| format!("/inference.GRPCInferenceService/{method}");
    Router::new()
        .route(&path("ServerLive"), post(calls::server_live))
        .route(&path("ServerReady"), post(calls::server_ready))
        .route(&path("ModelReady"), post(calls::model_ready))
        .route(&path("ServerMetadata"), post(calls::server_metadata))
        .route(&path("ModelMetadata"), post(calls::model_metadata))
        .route(&path("ModelConfig"), post(calls::model_config))
        .route(&path("ModelStreamInfer"), post(stream::stream_infer))
        .route(&path("ModelStatistics"), post(calls::model_statistics))
        .route(&path("RepositoryIndex"), post(calls::repository_index))
        .route(&path("RepositoryModelLoad"), post(calls::load))
        .route(&path("RepositoryModelUnload"), post(calls::unload))
}
