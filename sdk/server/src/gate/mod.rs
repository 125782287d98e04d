//! What every request passes: it gets an id, it needs a key, and it has a line in the log when its response has ended.

mod cors;
mod id;
mod keys;
mod slots;
mod tracked;

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

pub use cors::Origins;
pub use keys::Keys;
pub use slots::take_slot;

use crate::logging::{self, Access};
use crate::state::State;
use id::RequestId;
use tracked::Tracked;

/// The header that has the id, in requests and in responses.
const ID: HeaderName = HeaderName::from_static("x-request-id");
/// What load balancers ask, which have no key. It tells nothing but whether the server is ready.
const OPEN: [&str; 1] = ["/health"];

/// Passes a request on.
pub async fn pass(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let since = Instant::now();
    let id = RequestId::of(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = answer(&state, request, next).await;
    response.headers_mut().insert(ID, id.header());
    let (format, status) = (state.log, response.status().as_u16());
    let done = move |complete: bool| {
        let ms = (since.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let (request_id, method, path) = (id.as_str(), method.as_str(), path.as_str());
        logging::access(format, &Access { request_id, method, path, status, ms, complete });
    };
    response.map(|body| Body::new(Tracked::new(body, done)))
}

async fn answer(state: &State, request: Request, next: Next) -> Response {
    let origin = state.origins.allowed(request.headers());
    if let Some(origin) = origin.as_ref().filter(|_| cors::is_preflight(request.method(), request.headers())) {
        // Browsers send it without a key.
        return cors::preflight(origin);
    }
    let admitted = match &state.keys {
        Some(keys) => OPEN.contains(&request.uri().path()) || keys.admit(request.headers()),
        None => true,
    };
    let mut response = if admitted { next.run(request).await } else { keys::unauthorized() };
    if let Some(origin) = &origin {
        cors::allow(response.headers_mut(), origin);
    }
    response
}
