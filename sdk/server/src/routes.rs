//! Which path is answered by what.

use std::sync::Arc;

use axum::Router;
use axum::http::{StatusCode, Uri};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use crate::failure::Failure;
use crate::state::State;
use crate::{gate, health, kserve, native, openai, page};

/// All paths.
pub fn router(state: Arc<State>) -> Router {
    // What computes has one of the slots of the server; what tells about it is answered in any case.
    let computing = Router::new()
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat_completions))
        .route("/v1/rank", post(native::rank))
        .route("/completion", post(native::completion))
        .route("/chat", post(native::chat))
        .route("/v2/models/{name}/infer", post(kserve::infer_latest))
        .route("/v2/models/{name}/versions/{version}/infer", post(kserve::infer_version))
        .route(kserve::grpc::INFER, post(kserve::grpc::infer))
        .route_layer(from_fn_with_state(Arc::clone(&state), gate::take_slot));
    let telling = Router::new()
        .route("/", get(page::index))
        .route("/page/style.css", get(page::style))
        .route("/page/page.js", get(page::script))
        .route("/page/api", get(page::api))
        .route("/page/api.js", get(page::api_script))
        .route("/v1/openapi.json", get(page::openapi))
        .route("/v1/status", get(page::status))
        .route("/health", get(health::health))
        .route("/ping", get(native::ping))
        .route("/engine_check", get(native::engine_check))
        .route("/metrics", get(health::metrics))
        .route("/v2", get(kserve::server_metadata))
        .route("/v2/health/live", get(kserve::live))
        .route("/v2/health/ready", get(kserve::ready))
        .route("/v2/repository/index", post(kserve::index))
        .route("/v2/repository/models/{name}/load", post(kserve::load))
        .route("/v2/repository/models/{name}/unload", post(kserve::unload))
        .route("/v2/models/{name}", get(kserve::model_metadata))
        .route("/v2/models/stats", get(kserve::all_statistics))
        .route("/v2/models/{name}/stats", get(kserve::model_statistics))
        .route("/v2/models/{name}/versions/{version}/stats", get(kserve::model_version_statistics))
        .route("/v2/models/{name}/config", get(kserve::model_config))
        .route("/v2/models/{name}/versions/{version}/config", get(kserve::model_version_config))
        .route("/v2/models/{name}/ready", get(kserve::model_ready))
        .route("/v2/models/{name}/versions/{version}", get(kserve::model_version_metadata))
        .route("/v2/models/{name}/versions/{version}/ready", get(kserve::model_version_ready))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{name}", get(openai::model));
    computing
        .merge(telling)
        .merge(kserve::grpc::router())
        .fallback(no_such_path)
        .layer(map_response(explain_method))
        .layer(from_fn_with_state(Arc::clone(&state), gate::pass))
        .with_state(state)
}

async fn no_such_path(uri: Uri) -> Failure {
    Failure::new(StatusCode::NOT_FOUND, "unknown_path", format!("there is nothing at {}", uri.path()))
}

/// The router's own answer to a wrong method has no body.
async fn explain_method(response: Response) -> Response {
    if response.status() != StatusCode::METHOD_NOT_ALLOWED {
        return response;
    }
    let allow = response.headers().get("allow").cloned();
    let allowed = allow.as_ref().and_then(|allow| allow.to_str().ok()).unwrap_or("another one").to_owned();
    let message = format!("this path does not take this method: use {allowed}");
    let mut explained = Failure::new(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message).into_response();
    if let Some(allow) = allow {
        explained.headers_mut().insert("allow", allow);
    }
    explained
}
