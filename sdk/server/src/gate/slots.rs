//! The requests that are answered at the same time: one beyond the limit is rejected, as is every one while the server ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::tracked::Tracked;
use crate::failure::Failure;
use crate::state::State;

/// Passes a request on if there is a slot, which it has until its response has ended.
pub async fn take_slot(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    if state.is_ending() {
        let message = "the server is shutting down: ask another one";
        let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message);
        return Failure { retry_after: Some(1), ..failure }.into_response();
    }
    let Ok(slot) = Arc::clone(&state.slots).try_acquire_owned() else {
        let most = state.limits.requests;
        state.history.ended(StatusCode::TOO_MANY_REQUESTS.as_u16(), Duration::ZERO);
        return Failure::busy(format!("{most} requests are being answered, the most that this server takes"))
            .into_response();
    };
    let since = Instant::now();
    let response = next.run(request).await;
    let status = response.status().as_u16();
    let done = move |_| {
        drop(slot);
        state.history.ended(status, since.elapsed());
    };
    response.map(|body| Body::new(Tracked::new(body, done)))
}
