//! What every request passes: it gets an id, it needs a key, and it has a line in the log when its response has ended.

mod entry;
mod id;
mod rest;
mod slots;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

pub use slots::{Slot, caller_of, take_slot};

use crate::access::{Caller, cors, keys};
use crate::failure::in_kserves_shape;
use crate::grpc::{in_grpcs_shape, is_grpc};
use crate::page;
use crate::state::State;
use crate::traces::{Context, Started};
use crate::tracked::Tracked;
use entry::Entry;
use id::RequestId;
use rest::Rest;

/// The header that has the id, in requests and in responses.
const ID: HeaderName = HeaderName::from_static("x-request-id");
/// What load balancers ask, which have no key. It tells nothing but whether the server is ready.
const OPEN: [&str; 6] = [
    "/health",
    "/ping",
    "/v2/health/live",
    "/v2/health/ready",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
];

fn is_open(path: &str) -> bool {
    OPEN.contains(&path) || page::PATHS.contains(&path)
}

/// Passes a request on.
pub async fn pass(Shared(state): Shared<Arc<State>>, mut request: Request, next: Next) -> Response {
    let id = RequestId::of(request.headers());
    let header = id.header();
    let span = state.traces.as_ref().and_then(|traces| traces.begin(request.headers()));
    let context = span.as_ref().map(Started::context);
    let mut entry = Entry::new(&state, id, &request, span);
    let (is_kserve, is_grpc) = (request.uri().path().starts_with("/v2"), is_grpc(request.headers()));
    let rest = Rest::of(&mut request);
    let mut response = answer(&state, request, context, next).await;
    if let Some(rest) = rest {
        rest.forget(response.status(), state.limits.body).await;
    }
    // Before a call's own shape, in which all have the status 200.
    entry.responded(response.status());
    if is_grpc {
        response = in_grpcs_shape(response);
    } else if is_kserve {
        response = in_kserves_shape(response);
    }
    response.headers_mut().insert(ID, header);
    response.map(|body| Body::new(Tracked::new(body, move |complete| entry.ended(complete))))
}

async fn answer(state: &State, mut request: Request, span: Option<Context>, next: Next) -> Response {
    let origin = state.origins.allowed(request.headers());
    if let Some(origin) = origin.as_ref().filter(|_| cors::is_preflight(request.method(), request.headers())) {
        // Browsers send it without a key.
        return cors::preflight(origin);
    }
    if origin.is_none() && cors::is_foreign(request.method(), request.uri(), request.headers()) {
        return cors::refused();
    }
    let caller = match &state.keys {
        Some(keys) if is_open(request.uri().path()) => keys.admit(request.headers()).or(Some(Caller::default())),
        Some(keys) => keys.admit(request.headers()),
        None => Some(Caller::default()),
    };
    let mut response = match caller {
        Some(caller) => {
            request.extensions_mut().insert(Caller { span, ..caller });
            next.run(request).await
        }
        None => keys::unauthorized(),
    };
    if let Some(origin) = &origin {
        cors::allow(response.headers_mut(), origin);
    }
    response
}
