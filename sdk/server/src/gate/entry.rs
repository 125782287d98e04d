//! The line of a request in the log, and its place in the metrics: both when it has ended, however it does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request};
use axum::http::{Method, StatusCode};

use super::id::RequestId;
use crate::logging::{self, Access, LogFormat};
use crate::state::State;
use crate::traces::{Ended, Started};

/// The status of a request whose client went away before its response, as proxies write it.
const WENT_AWAY: u16 = 499;

/// The characters of a path that a line has.
const LONGEST_PATH: usize = 512;

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
    /// If it is traced.
    span: Option<Started>,
}

impl Entry {
    /// A request has come.
    pub fn new(state: &Arc<State>, id: RequestId, request: &Request, span: Option<Started>) -> Self {
        state.metrics.begin();
        Self {
            state: Arc::clone(state),
            id,
            method: request.method().clone(),
            path: shown(request.uri().path()),
            route: request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned()),
            since: Instant::now(),
            status: WENT_AWAY,
            complete: false,
            span,
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

/// A path as a log can have it: a client may write anything, and a terminal obeys some of that.
fn shown(path: &str) -> String {
    let plain = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    let mut characters = path.chars();
    let mut shown: String = characters.by_ref().take(LONGEST_PATH).map(plain).collect();
    if characters.next().is_some() {
        shown.push('…');
    }
    shown
}

impl Drop for Entry {
    fn drop(&mut self) {
        let took = self.since.elapsed();
        self.state.metrics.end(self.route.as_deref().unwrap_or("other"), self.status, took);
        let (method, status) = (self.method.clone(), self.status);
        let trace_id = self.span.as_ref().map(|span| format!("{:032x}", span.context().trace));
        if let (Some(span), Some(traces)) = (self.span.take(), &self.state.traces) {
            let (path, route) = (&self.path, self.route.as_deref());
            span.end(traces, &Ended { method: method.as_str(), path, route, status, id: self.id.as_str() });
        }
        let (format, id, path) = (self.state.log, self.id.clone(), std::mem::take(&mut self.path));
        let line = Line { format, id, method, path, status, took, complete: self.complete, trace_id };
        // The response has yet to be sent.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { drop(line) });
        }
    }
}

/// A line of the log, which is written when it is dropped: also by a runtime that ends.
struct Line {
    format: LogFormat,
    id: RequestId,
    method: Method,
    path: String,
    status: u16,
    took: Duration,
    complete: bool,
    trace_id: Option<String>,
}

impl Drop for Line {
    fn drop(&mut self) {
        let access = Access {
            request_id: self.id.as_str(),
            method: self.method.as_str(),
            path: &self.path,
            status: self.status,
            ms: (self.took.as_secs_f64() * 1e6).round() / 1e3,
            complete: self.complete,
            trace_id: self.trace_id.take(),
        };
        logging::access(self.format, &access);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_the_log_is_short_and_harmless() {
        assert_eq!(shown("/v1/models/é"), "/v1/models/é");
        assert_eq!(shown("/a\u{9b}31m\u{7f}"), "/a\u{fffd}31m\u{fffd}");
        assert_eq!(shown(&"/".repeat(60_000)).chars().count(), LONGEST_PATH + 1);
    }
}
