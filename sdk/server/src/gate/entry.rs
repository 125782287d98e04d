//! The line of a request in the log, and its place in the metrics: both when it has ended, however it does.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};

use super::id::RequestId;
use crate::logging::{self, Access};
use crate::state::State;

/// The status of a request whose client went away before its response, as proxies write it.
const WENT_AWAY: u16 = 499;

/// A request that has not ended. Dropping it ends it.
pub struct Entry {
    state: Arc<State>,
    id: RequestId,
    method: Method,
    path: String,
    /// The pattern of its path: there are few of them.
    route: Option<String>,
    since: Instant,
    status: u16,
    complete: bool,
}

impl Entry {
    /// A request has come.
    pub fn new(state: &Arc<State>, id: RequestId, request: &Request) -> Self {
        state.metrics.begin();
        Self {
            state: Arc::clone(state),
            id,
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            route: request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned()),
            since: Instant::now(),
            status: WENT_AWAY,
            complete: false,
        }
    }

    /// Its response begins.
    pub fn responded(&mut self, status: StatusCode) {
        self.status = status.as_u16();
    }

    /// Its response has ended, or the client went away.
    pub fn ended(mut self, complete: bool) {
        self.complete = complete;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let took = self.since.elapsed();
        self.state.metrics.end(self.route.as_deref().unwrap_or("other"), self.status, took);
        let access = Access {
            request_id: self.id.as_str(),
            method: self.method.as_str(),
            path: &self.path,
            status: self.status,
            ms: (took.as_secs_f64() * 1e6).round() / 1e3,
            complete: self.complete,
        };
        logging::access(self.state.log, &access);
    }
}
