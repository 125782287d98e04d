//! What every request passes: it gets an id, and a line in the log when its response has ended.

mod id;
mod slots;
mod tracked;

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

pub use slots::take_slot;

use crate::state::State;
use id::RequestId;
use tracked::Tracked;

/// The header that has the id, in requests and in responses.
const ID: HeaderName = HeaderName::from_static("x-request-id");

/// Passes a request on.
pub async fn pass(Shared(_): Shared<Arc<State>>, mut request: Request, next: Next) -> Response {
    let since = Instant::now();
    let id = RequestId::of(request.headers());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(ID, id.header());
    let status = response.status();
    let done = move |ended: bool| {
        let took = since.elapsed();
        let end = if ended { "" } else { ", the client went away" };
        log::info!("{} {method} {path}: {} in {took:.1?}{end}", id.as_str(), status.as_u16());
    };
    response.map(|body| Body::new(Tracked::new(body, done)))
}
