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
use tokio::sync::watch;
use tokio::task::JoinError;

use super::metadata;
use crate::config::ModelConfig;
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

/// See [`load`]. It ends even if the client goes away meanwhile.
pub async fn load_model(state: &Arc<State>, name: &str) -> Result<(), Failure> {
    let config = state.models.config(name)?;
    let state = Arc::clone(state);
    tokio::spawn(async move { load_as(&state, config).await }).await.unwrap_or_else(|error| Err(bug(&error).into()))
}

async fn load_as(state: &State, config: ModelConfig) -> Result<(), Failure> {
    let name = config.name.clone();
    // One after the other: two copies of a model in memory are enough.
    let _one = state.loading.lock().await;
    let before = state.models.get(&name).ok();
    if let Some(Kind::Rank(engine)) = before.as_ref().map(|served| &served.kind) {
        // The engine does it itself, with its store and its caches.
        let engine = Arc::clone(engine);
        blocking(move || engine.swap(&config.path)).await?;
        return Ok(());
    }
    if config.store.is_some() && before.is_some() {
        drop(before);
        return take_over(state, config).await;
    }
    // Its store, if it has one.
    state.models.wait_for_close(&name).await;
    let served = blocking(move || Served::open(&config)).await?;
    retire(state, &name, state.models.replace(&name, Some(Arc::new(served))));
    Ok(())
}

/// Opens a model whose store the one before has, which one at a time can have: new requests wait until those that run have ended, the
/// one before is closed, and the new one is open. Without a new one that can be opened, the one before comes back.
async fn take_over(state: &State, config: ModelConfig) -> Result<(), Failure> {
    let name = config.name.clone();
    let asked = config.clone();
    blocking(move || Served::check(&asked)).await?;
    let _held = state.models.hold(&name);
    let Some(before) = state.models.replace(&name, None) else { return Ok(()) };
    let patience = state.limits.drain_timeout;
    if tokio::time::timeout(patience, unused(&before)).await.is_err() {
        state.models.replace(&name, Some(before));
        let message = format!(
            "requests to {name} have run for {} s since it was to be loaded, and its store is theirs: try again later",
            patience.as_secs_f64()
        );
        return Err(Error::new(Status::Busy, message).into());
    }
    let opened = before.opened.clone();
    let (served, failure) = blocking(move || {
        drop(before);
        match Served::open(&config) {
            Ok(served) => Ok((served, None)),
            Err(error) => Served::open(&ModelConfig { path: opened, ..config }).map(|before| (before, Some(error))),
        }
    })
    .await?;
    state.models.replace(&name, Some(Arc::new(served)));
    failure.map_or(Ok(()), |error| Err(error.into()))
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
    retire(state, name, state.models.replace(name, None));
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
fn retire(state: &State, name: &str, served: Option<Arc<Served>>) {
    let Some(served) = served else { return };
    let (closed, closing) = watch::channel(());
    state.models.set_closing(name, closing);
    tokio::spawn(async move {
        unused(&served).await;
        tokio::task::spawn_blocking(move || {
            drop(served);
            drop(closed);
        });
    });
}

/// Waits until no request has a model that takes no new ones.
async fn unused(served: &Arc<Served>) {
    while served.is_in_use() {
        tokio::time::sleep(LOOK).await;
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(bug(&error)))
}

fn bug(error: &JoinError) -> Error {
    Error::new(Status::Internal, format!("a bug in Pagoda, please report it: {error}"))
}
