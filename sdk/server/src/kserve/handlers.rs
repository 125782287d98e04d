//! What is at `/v2`.

use std::sync::Arc;

use axum::extract::{Path, Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;

use super::http::{Body, response};
use super::infer::{find, infer};
use super::{metadata, statistics};
use crate::failure::Failure;
use crate::gate::caller_of;
use crate::models::Served;
use crate::state::State;
use crate::{body, heavy, reply};

/// That the server answers.
pub async fn live() -> StatusCode {
    StatusCode::OK
}

/// Whether it takes requests.
pub async fn ready(Shared(state): Shared<Arc<State>>) -> StatusCode {
    if state.is_ending() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

/// What it is.
pub async fn server_metadata() -> Response {
    reply::json(StatusCode::OK, &metadata::SERVER)
}

/// Whether a model takes requests: those that are served do.
pub async fn model_ready(Shared(state): Shared<Arc<State>>, Path(name): Path<String>) -> Result<StatusCode, Failure> {
    find(&state, &name, None)?;
    Ok(ready(Shared(state)).await)
}

/// Whether a version of a model takes requests.
pub async fn model_version_ready(
    Shared(state): Shared<Arc<State>>,
    Path((name, version)): Path<(String, String)>,
) -> Result<StatusCode, Failure> {
    find(&state, &name, Some(&version))?;
    Ok(ready(Shared(state)).await)
}

/// What a model is.
pub async fn model_metadata(Shared(state): Shared<Arc<State>>, Path(name): Path<String>) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &metadata::model(&*find(&state, &name, None)?)))
}

/// What a version of a model is.
pub async fn model_version_metadata(
    Shared(state): Shared<Arc<State>>,
    Path((name, version)): Path<(String, String)>,
) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &metadata::model(&*find(&state, &name, Some(&version))?)))
}

/// What a model is, in the words of Triton's configurations.
pub async fn model_config(Shared(state): Shared<Arc<State>>, Path(name): Path<String>) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &metadata::config(&*find(&state, &name, None)?)))
}

/// What a version of a model is, in the words of Triton's configurations.
pub async fn model_version_config(
    Shared(state): Shared<Arc<State>>,
    Path((name, version)): Path<(String, String)>,
) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &metadata::config(&*find(&state, &name, Some(&version))?)))
}

/// The statistics of all models.
pub async fn all_statistics(Shared(state): Shared<Arc<State>>) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &statistics::of(&state, None, None)?))
}

/// The statistics of a model.
pub async fn model_statistics(
    Shared(state): Shared<Arc<State>>,
    Path(name): Path<String>,
) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &statistics::of(&state, Some(&name), None)?))
}

/// The statistics of a version of a model.
pub async fn model_version_statistics(
    Shared(state): Shared<Arc<State>>,
    Path((name, version)): Path<(String, String)>,
) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &statistics::of(&state, Some(&name), Some(&version))?))
}

/// Runs a model.
pub async fn infer_latest(
    Shared(state): Shared<Arc<State>>,
    Path(name): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    state.models.wait(&name).await;
    let served = find(&state, &name, None)?;
    run(&state, &served, request).await
}

/// Runs a version of a model.
pub async fn infer_version(
    Shared(state): Shared<Arc<State>>,
    Path((name, version)): Path<(String, String)>,
    request: Request,
) -> Result<Response, Failure> {
    state.models.wait(&name).await;
    let served = find(&state, &name, Some(&version))?;
    run(&state, &served, request).await
}

async fn run(state: &State, served: &Served, request: Request) -> Result<Response, Failure> {
    let (headers, caller) = (request.headers().clone(), caller_of(&request));
    let bytes = body::read(request, &state.limits).await?;
    let asked = heavy::work(bytes.len(), || Body::read(&headers, &bytes))?;
    let (binary, id) = (asked.binary(), asked.request.id.clone());
    let outputs = infer(state, served, asked.request, caller).await?;
    Ok(response(&served.name, &metadata::version(served), &id, outputs, &binary)?)
}
