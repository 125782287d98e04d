//! `/health` and `/metrics`: whether the server takes requests, and what it counted.

use std::sync::Arc;

use axum::extract::State as Shared;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::json;

use crate::state::State;
use crate::{metrics, reply};

/// 200 if it does, 503 while it ends.
pub async fn health(Shared(state): Shared<Arc<State>>) -> Response {
    match state.is_ending() {
        false => reply::json(StatusCode::OK, &json!({"status": "ready"})),
        true => reply::json(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "ending"})),
    }
}

/// All counters of the process.
pub async fn metrics(Shared(state): Shared<Arc<State>>) -> Response {
    reply::of(StatusCode::OK, metrics::CONTENT_TYPE, state.metrics.text(&state.models))
}
