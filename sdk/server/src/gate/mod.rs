//! What every request passes: it gets an id, it needs a key, and it has a line in the log when its response has ended.

mod entry;
mod id;
mod slots;
mod tracked;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

pub use slots::take_slot;

use crate::access::{cors, keys};
use crate::failure::in_kserves_shape;
use crate::page;
use crate::state::State;
use entry::Entry;
use id::RequestId;
use tracked::Tracked;

/// The header that has the id, in requests and in responses.
const ID: HeaderName = HeaderName::from_static("x-request-id");
/// What load balancers ask, which have no key. It tells nothing but whether the server is ready.
const OPEN: [&str; 4] = ["/health", "/ping", "/v2/health/live", "/v2/health/ready"];

fn is_open(path: &str) -> bool {
    OPEN.contains(&path) || page::PATHS.contains(&path)
}

/// Passes a request on.
pub async fn pass(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let id = RequestId::of(request.headers());
    let header = id.header();
    let mut entry = Entry::new(&state, id, &request);
    let is_kserve = request.uri().path().starts_with("/v2");
    let mut response = answer(&state, request, next).await;
    if is_kserve {
        response = in_kserves_shape(response);
    }
    response.headers_mut().insert(ID, header);
    entry.responded(response.status());
    response.map(|body| Body::new(Tracked::new(body, move |complete| entry.ended(complete))))
}

async fn answer(state: &State, request: Request, next: Next) -> Response {
    let origin = state.origins.allowed(request.headers());
    if let Some(origin) = origin.as_ref().filter(|_| cors::is_preflight(request.method(), request.headers())) {
        // Browsers send it without a key.
        return cors::preflight(origin);
    }
    let admitted = match &state.keys {
        Some(keys) => is_open(request.uri().path()) || keys.admit(request.headers()),
        None => true,
    };
    let mut response = if admitted { next.run(request).await } else { keys::unauthorized() };
    if let Some(origin) = &origin {
        cors::allow(response.headers_mut(), origin);
    }
    response
}
