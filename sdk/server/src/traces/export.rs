//! Sends spans to a collector: OTLP over HTTP, messages of protobuf.

use std::fmt;
use std::io::{Error, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::Uri;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::messages::{
    ExportTraceServiceRequest, InstrumentationScope, Resource, ResourceSpans, ScopeSpans, Span, text,
};

/// The most spans of a message, and how long the first of them waits for others.
const MOST: usize = 512;
const WAIT: Duration = Duration::from_secs(1);
/// How long a collector may take for a message.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the address of a collector is followed by.
const PATH: &str = "/v1/traces";

/// Spans that were dropped since the log said so.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// A collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    authority: String,
    port: u16,
    path: String,
}

impl Endpoint {
    /// Reads an address such as `http://127.0.0.1:4318`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("{text:?} {what}: expected an address such as \"http://127.0.0.1:4318\"");
        let uri: Uri = text.parse().map_err(|error| wrong(&format!("is no URL ({error})")))?;
        let authority = uri.authority().ok_or_else(|| wrong("names no host"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(wrong("would need TLS, which a collector on this machine or beside it does without"));
            }
            _ => return Err(wrong("is not of HTTP")),
        }
        let path = format!("{}{PATH}", uri.path().trim_end_matches('/'));
        Ok(Self { authority: authority.as_str().to_owned(), port: authority.port_u16().unwrap_or(80), path })
    }

    fn host(&self) -> &str {
        let host = self.authority.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        host.map_or(self.authority.as_str(), |(host, _)| host).trim_matches(['[', ']'])
    }

    /// Sends a message.
    async fn post(&self, body: &[u8]) -> Result<(), Error> {
        let mut stream = TcpStream::connect((self.host(), self.port)).await?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/x-protobuf\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.path,
            self.authority,
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body).await?;
        let mut status = [0; "HTTP/1.1 200".len()];
        stream.read_exact(&mut status).await?;
        match &status[status.len() - 3..] {
            [b'2', ..] => Ok(()),
            code => Err(Error::other(format!("it answers with {}", String::from_utf8_lossy(code)))),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.path)
    }
}

/// What the queue has.
pub enum Item {
    /// A span.
    Span(Box<Span>),
    /// Says when what was before it is sent.
    Flush(oneshot::Sender<()>),
}

/// A span is dropped.
pub fn dropped() {
    DROPPED.fetch_add(1, Ordering::Relaxed);
}

/// Sends what comes, until nothing can come any more.
pub async fn run(endpoint: Endpoint, service: String, mut receiver: mpsc::Receiver<Item>) {
    let mut is_failing = false;
    while let Some(first) = receiver.recv().await {
        let (mut spans, mut waiting) = (Vec::new(), None);
        let deadline = Instant::now() + WAIT;
        let mut next = Some(first);
        while let Some(item) = next.take() {
            match item {
                Item::Span(span) => spans.push(*span),
                Item::Flush(sent) => waiting = Some(sent),
            }
            if spans.len() < MOST && waiting.is_none() {
                next = timeout_at(deadline, receiver.recv()).await.ok().flatten();
            }
        }
        let count = spans.len();
        if count > 0 {
            let body = message(&service, spans).encode_to_vec();
            let sent = timeout(PATIENCE, endpoint.post(&body)).await;
            let sent = sent.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()));
            if sent.is_err() {
                DROPPED.fetch_add(count as u64, Ordering::Relaxed);
            }
            report(&endpoint, sent, &mut is_failing);
        }
        if let Some(waiting) = waiting {
            let _ = waiting.send(());
        }
    }
}

/// Says once that spans can not be sent, and once that they can again.
fn report(endpoint: &Endpoint, sent: Result<(), Error>, is_failing: &mut bool) {
    match sent {
        Err(error) if !*is_failing => {
            log::warn!("traces can not be sent to {endpoint}, and are dropped until they can: {error}");
            *is_failing = true;
        }
        Err(_) => {}
        Ok(()) => {
            *is_failing = false;
            let dropped = DROPPED.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                log::warn!("traces are sent to {endpoint} again; {dropped} spans were dropped");
            }
        }
    }
}

fn message(service: &str, spans: Vec<Span>) -> ExportTraceServiceRequest {
    let version = env!("CARGO_PKG_VERSION");
    let attributes = vec![text("service.name", service), text("service.version", version)];
    let scope = InstrumentationScope { name: "pagoda-server".into(), version: version.into() };
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(Resource { attributes }),
            scope_spans: vec![ScopeSpans { scope: Some(scope), spans }],
        }],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_has_an_address() {
        let of = |text: &str| Endpoint::parse(text).map(|endpoint| (endpoint.to_string(), endpoint.port));
        assert_eq!(of("http://127.0.0.1:4318"), Ok(("http://127.0.0.1:4318/v1/traces".into(), 4318)));
        assert_eq!(of("http://otel/base/"), Ok(("http://otel/base/v1/traces".into(), 80)));
        assert_eq!(Endpoint::parse("http://[::1]:4318").unwrap().host(), "::1");
        for (text, message) in [
            ("https://a", "\"https://a\" would need TLS"),
            ("a:4318", "\"a:4318\" "),
            ("/v1/traces", "\"/v1/traces\" names no host"),
            ("grpc://a", "\"grpc://a\" is not of HTTP"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
