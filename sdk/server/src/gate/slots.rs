//! The requests that are answered at the same time: one beyond the limit is rejected, as is every one while the server ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Request, State as Shared};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::sync::OwnedSemaphorePermit;

use crate::access::Caller;
use crate::failure::Failure;
use crate::state::State;
use crate::tracked::Tracked;

/// A request that is answered. Dropping it says that it has ended.
pub struct Slot {
    state: Arc<State>,
    since: Instant,
    status: StatusCode,
    _permit: OwnedSemaphorePermit,
}

impl Slot {
    /// A slot, if there is one.
    pub fn take(state: &Arc<State>, caller: Caller) -> Result<Self, Failure> {
        // First, so that the end of the server waits for every request that it did not refuse.
        let permit = Arc::clone(&state.slots).try_acquire_owned();
        if state.is_ending() {
            let message = "the server is shutting down: ask another one";
            let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message);
            return Err(Failure { retry_after: Some(1), ..failure });
        }
        if let Err(failure) = state.rates.request(caller) {
            state.history.ended(failure.status.as_u16(), Duration::ZERO);
            return Err(failure);
        }
        let Ok(permit) = permit else {
            let most = state.limits.requests;
            state.history.ended(StatusCode::TOO_MANY_REQUESTS.as_u16(), Duration::ZERO);
            return Err(Failure::busy(format!("{most} requests are being answered, the most that this server takes")));
        };
        Ok(Self { state: Arc::clone(state), since: Instant::now(), status: StatusCode::OK, _permit: permit })
    }

    /// How it is answered.
    pub fn responded(&mut self, status: StatusCode) {
        self.status = status;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.state.history.ended(self.status.as_u16(), self.since.elapsed());
    }
}

/// Passes a request on if there is a slot, which it has until its response has ended.
pub async fn take_slot(Shared(state): Shared<Arc<State>>, request: Request, next: Next) -> Response {
    let mut slot = match Slot::take(&state, caller_of(&request)) {
        Ok(slot) => slot,
        Err(failure) => return failure.into_response(),
    };
    let response = next.run(request).await;
    slot.responded(response.status());
    response.map(|body| Body::new(Tracked::new(body, move |_| drop(slot))))
}

/// Whose request it is.
pub fn caller_of(request: &Request) -> Caller {
    request.extensions().get().copied().unwrap_or_default()
}
