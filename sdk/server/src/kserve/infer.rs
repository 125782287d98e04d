//! The model that answers a request.

use std::sync::Arc;

use axum::http::StatusCode;
use pagoda::Result;

use super::tensors::{InferRequest, Outputs};
use super::{generate, metadata, plain, rank};
use crate::access::Caller;
use crate::failure::Failure;
use crate::models::{Kind, Served};
use crate::state::State;

/// The model of a name, if it has this version.
pub fn find(state: &State, name: &str, version: Option<&str>) -> Result<Arc<Served>, Failure> {
    let served = state.models.get(name)?;
    match version {
        Some(asked) if asked != metadata::version(&served) => {
            let message = format!("{name} has the version {} and no {asked:?}", metadata::version(&served));
            Err(Failure::new(StatusCode::NOT_FOUND, "version_not_found", message))
        }
        _ => Ok(served),
    }
}

/// Answers a request.
pub async fn infer(state: &State, served: &Served, request: InferRequest, caller: Caller) -> Result<Outputs, Failure> {
    request.check()?;
    match &served.kind {
        Kind::Plain(model) => {
            let timing = served.statistics.begin();
            let outputs = plain::infer(model, request).await?;
            timing.succeeded(None);
            Ok(outputs)
        }
        Kind::Rank(engine) => Ok(rank::infer(engine, request, &served.statistics).await?),
        Kind::Generate(generator) => {
            let tally = state.tally(served, caller);
            Ok(generate::infer(generator, request, &state.running, tally).await?)
        }
    }
}
