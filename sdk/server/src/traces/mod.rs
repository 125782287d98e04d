//! Traces of requests, sent to a collector of OpenTelemetry by OTLP: a span for each request, and one inside of it for what a language
//! model did. Without `[traces]` in the configuration there are none.
//!
//! A request's trace is that of its caller, by the header `traceparent`, or a new one. `export` sends spans in the background; one
//! that finds its queue full is dropped, so that a collector that is slow costs no request anything.

mod context;
mod export;
mod messages;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::http::HeaderMap;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

pub use context::Context;
pub use export::Endpoint;

use crate::unique::random;
use export::Item;
use messages::{Event, KeyValue, Span, Status, text, whole};

/// The spans that wait to be sent.
const WAITING: usize = 8192;
/// How long the end of the server waits for the last spans.
const LAST: Duration = Duration::from_secs(2);
/// Kinds of spans, and the status of one that failed, by their numbers.
const INTERNAL: i32 = 1;
const SERVER: i32 = 2;
const ERROR: i32 = 2;

/// Where traces of requests are sent, by OTLP over HTTP.
#[derive(Clone, Debug, PartialEq)]
pub struct TracesConfig {
    /// The collector.
    pub(crate) endpoint: Endpoint,
    /// What the server is called in them.
    pub service: String,
    /// The part of requests that is traced where the caller does not say.
    pub ratio: f64,
}

/// Takes spans.
pub struct Traces {
    sender: mpsc::Sender<Item>,
    /// The part of new traces that is recorded.
    ratio: f64,
}

/// A span that has begun.
pub struct Started {
    context: Context,
    parent: Option<u64>,
    since: SystemTime,
}

impl Traces {
    /// Sends spans from now on, by a task of this runtime.
    pub fn start(config: &TracesConfig, runtime: &Handle) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING);
        runtime.spawn(export::run(config.endpoint.clone(), config.service.clone(), receiver));
        Self { sender, ratio: config.ratio }
    }

    /// The span of a request, if it is recorded: as its caller says, or a part of those whose caller says nothing.
    pub fn begin(&self, headers: &HeaderMap) -> Option<Started> {
        let (context, parent) = match Context::of_caller(headers) {
            Some((caller, is_recorded)) => (caller.child(), is_recorded.then_some(Some(caller.span))?),
            None => (Context::new(), (random() as f64 / u64::MAX as f64 <= self.ratio).then_some(None)?),
        };
        Some(Started { context, parent, since: SystemTime::now() })
    }

    /// Sends what is waiting, and waits for it, but not for long.
    pub async fn flush(&self) {
        let (sent, is_sent) = oneshot::channel();
        if self.sender.send(Item::Flush(sent)).await.is_ok() {
            let _ = tokio::time::timeout(LAST, is_sent).await;
        }
    }

    fn take(&self, span: Span) {
        // A full queue: it is dropped, and the next that is sent says so.
        if self.sender.try_send(Item::Span(Box::new(span))).is_err() {
            export::dropped();
        }
    }
}

/// A request that has ended.
pub struct Ended<'a> {
    /// The method.
    pub method: &'a str,
    /// The path.
    pub path: &'a str,
    /// The pattern of the path.
    pub route: Option<&'a str>,
    /// The status of the response.
    pub status: u16,
    /// The id of the request.
    pub id: &'a str,
}

impl Started {
    /// What names it.
    pub fn context(&self) -> Context {
        self.context
    }

    /// The request has ended.
    pub fn end(self, traces: &Traces, request: &Ended) {
        let Ended { method, path, route, status, id } = *request;
        let mut attributes = vec![
            text("http.request.method", method),
            text("url.path", path),
            whole("http.response.status_code", status),
            text("pagoda.request_id", id),
        ];
        attributes.extend(route.map(|route| text("http.route", route)));
        let name = route.map_or_else(|| method.to_owned(), |route| format!("{method} {route}"));
        let status = (status >= 500).then(|| Status { message: String::new(), code: ERROR });
        traces.take(Span { status, ..self.span(name, SERVER, attributes) });
    }

    fn span(self, name: String, kind: i32, attributes: Vec<KeyValue>) -> Span {
        Span {
            trace_id: self.context.trace.to_be_bytes().into(),
            span_id: self.context.span.to_be_bytes().into(),
            parent_span_id: self.parent.map_or_else(Vec::new, |parent| parent.to_be_bytes().into()),
            name,
            kind,
            start_time_unix_nano: nanoseconds(self.since),
            end_time_unix_nano: nanoseconds(SystemTime::now()),
            attributes,
            events: Vec::new(),
            status: None,
        }
    }
}

/// What a language model does for a request, until it is dropped.
pub struct ModelSpan {
    traces: Arc<Traces>,
    started: Option<Started>,
    model: String,
    first_token: Option<SystemTime>,
    /// Tokens of prompts.
    pub input: usize,
    /// Tokens of answers.
    pub output: usize,
}

impl ModelSpan {
    /// Inside of the span of a request.
    pub fn new(traces: &Arc<Traces>, request: Context, model: &str) -> Self {
        let since = SystemTime::now();
        let started = Started { context: request.child(), parent: Some(request.span), since };
        let model = model.to_owned();
        Self { traces: Arc::clone(traces), started: Some(started), model, first_token: None, input: 0, output: 0 }
    }

    /// A token has come.
    pub fn token(&mut self) {
        self.first_token.get_or_insert_with(SystemTime::now);
        self.output += 1;
    }
}

impl Drop for ModelSpan {
    fn drop(&mut self) {
        let Some(started) = self.started.take() else { return };
        let attributes = vec![
            text("gen_ai.request.model", self.model.as_str()),
            whole("gen_ai.usage.input_tokens", self.input),
            whole("gen_ai.usage.output_tokens", self.output),
        ];
        let first = |at: SystemTime| Event { time_unix_nano: nanoseconds(at), name: "first token".to_owned() };
        let events = self.first_token.map(first).into_iter().collect();
        let span = started.span(format!("generate {}", self.model), INTERNAL, attributes);
        self.traces.take(Span { events, ..span });
    }
}

fn nanoseconds(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64
}
