//! The repository of KServe: which models there are, and loading and unloading them. Models are those of the configuration:
//! no request names a path.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State as Shared};
use axum::http::StatusCode;
use axum::response::Response;
use pagoda::json::Json;
use pagoda::{Error, Result, Status};
use serde_json::{Value, json};

use super::metadata;
use crate::failure::Failure;
use crate::models::{Kind, Listed, Served};
use crate::state::State;
use crate::{body, reply};

/// How often to look whether the last request of an unloaded model has ended.
const LOOK: Duration = Duration::from_millis(50);

/// All models of the configuration.
pub async fn index(Shared(state): Shared<Arc<State>>) -> Response {
    let about = |listed: Listed| match listed.served {
        Some(served) => json!({"name": listed.name, "version": metadata::version(&served), "state": "READY"}),
        None => json!({"name": listed.name, "state": "UNAVAILABLE", "reason": "unloaded"}),
    };
    let models: Vec<Value> = state.models.list().into_iter().map(about).collect();
    reply::json(StatusCode::OK, &models)
}

/// Opens a model again, from the path of the configuration. Until the new one is open the old one answers, and requests that
/// run end on the old one: none fails.
pub async fn load(
    Shared(state): Shared<Arc<State>>,
    Path(name): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    admit(&state, request).await?;
    load_model(&state, &name).await?;
    Ok(reply::json(StatusCode::OK, &json!({})))
}

/// See [`load`].
pub async fn load_model(state: &State, name: &str) -> Result<(), Failure> {
    let config = state.models.config(name)?;
    // One after the other: two copies of a model in memory are enough.
    let _one = state.loading.lock().await;
    let before = state.models.get(name).ok();
    if let Some(Kind::Rank(engine)) = before.as_ref().map(|served| &served.kind) {
        // The engine does it itself, with its store and its caches.
        let engine = Arc::clone(engine);
        blocking(move || engine.swap(&config.path)).await?;
        return Ok(());
    }
    if before.is_some() && config.store.is_some() {
        let message = format!("{name} has its store open, which one model at a time can have: unload it first");
        return Err(Error::new(Status::Unsupported, message).about("store").into());
    }
    let served = blocking(move || Served::open(&config)).await?;
    retire(state.models.replace(name, Some(Arc::new(served))));
    Ok(())
}

/// Takes no new requests for a model. It is closed after those that run.
pub async fn unload(
    Shared(state): Shared<Arc<State>>,
    Path(name): Path<String>,
    request: Request,
) -> Result<Response, Failure> {
    admit(&state, request).await?;
    unload_model(&state, &name).await?;
    Ok(reply::json(StatusCode::OK, &json!({})))
}

/// See [`unload`].
pub async fn unload_model(state: &State, name: &str) -> Result<(), Failure> {
    state.models.config(name)?;
    let _one = state.loading.lock().await;
    retire(state.models.replace(name, None));
    Ok(())
}

/// Refuses what the configuration does not allow.
async fn admit(state: &State, request: Request) -> Result<(), Failure> {
    allowed(state)?;
    Ok(check(&body::read_text(request, &state.limits).await?)?)
}

/// Whether requests may load and unload models.
pub fn allowed(state: &State) -> Result<(), Failure> {
    if state.repository_control {
        return Ok(());
    }
    let message = "this server neither loads nor unloads models: its configuration has no repository_control = true";
    Err(Failure::new(StatusCode::FORBIDDEN, "forbidden", message))
}

/// A body may have parameters, but none that brings another model.
fn check(body: &str) -> Result<()> {
    if body.trim().is_empty() {
        return Ok(());
    }
    for (name, value) in pagoda_requests::fields::object(body, "{}")? {
        let Json::Object(parameters) = &value else {
            return Err(Error::invalid(name, format!("{value} is not an object")));
        };
        if name != "parameters" {
            return Err(Error::invalid(name, "no such field; there is `parameters`"));
        }
        check_parameters(parameters.iter().map(|(name, _)| name.as_str()))?;
    }
    Ok(())
}

/// Refuses parameters that would change how a model is opened.
pub fn check_parameters<'a>(mut names: impl Iterator<Item = &'a str>) -> Result<()> {
    match names.find(|name| *name != "unload_dependents") {
        None => Ok(()),
        Some(name) => {
            let message = "a model is opened as the configuration says: leave it out";
            Err(Error::new(Status::Unsupported, message).about(format!("parameters.{name}")))
        }
    }
}

/// Closes a model after its last request. It writes what it keeps, and waits for its threads, so not on a thread of connections.
fn retire(served: Option<Arc<Served>>) {
    let Some(served) = served else { return };
    tokio::spawn(async move {
        while served.is_in_use() {
            tokio::time::sleep(LOOK).await;
        }
        tokio::task::spawn_blocking(move || drop(served));
    });
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::new(Status::Internal, format!("a bug in Pagoda, please report it: {error}")))
    })
}
