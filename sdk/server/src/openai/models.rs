//! `/v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use crate::failure::Failure;
use crate::models::{Kind, Served};
use crate::reply;
use crate::state::State;

#[derive(Serialize)]
struct List {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Serialize)]
struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// `generate`, `rank` or `plain`.
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_context: Option<u32>,
}

impl Model {
    fn new(served: &Served) -> Self {
        let max_context = match &served.kind {
            Kind::Generate(generator) => Some(generator.folder().limits.max_context),
            _ => None,
        };
        Self {
            id: served.name.clone(),
            object: "model",
            created: served.since,
            owned_by: "pagoda",
            kind: served.kind.name(),
            max_context,
        }
    }
}

/// All models.
pub async fn models(Shared(state): Shared<Arc<State>>) -> Response {
    let data = state.models.all().iter().map(|served| Model::new(served)).collect();
    reply::json(StatusCode::OK, &List { object: "list", data })
}

/// One model.
pub async fn model(Shared(state): Shared<Arc<State>>, Path(name): Path<String>) -> Result<Response, Failure> {
    Ok(reply::json(StatusCode::OK, &Model::new(&*state.models.get(&name)?)))
}
