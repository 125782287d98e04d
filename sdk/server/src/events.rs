//! Streams of events (SSE): a response whose body is made as tokens come.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, HeaderValue};
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use hyper::body::Frame;
use pagoda::engine::Event;
use serde::Serialize;

use crate::reply;
use crate::run::Running;

/// What a protocol makes of the events of a generator.
pub trait Protocol: Send + Unpin + 'static {
    /// Writes what comes before all events.
    fn begin(&mut self, _: &mut Lines) {}
    /// Writes what an event of a prompt is.
    fn event(&mut self, prompt: usize, event: Event, lines: &mut Lines);
    /// Writes what comes after all events.
    fn end(&mut self, _: &mut Lines) {}
}

/// The lines of a stream.
#[derive(Default)]
pub struct Lines(BytesMut);

impl Lines {
    /// Adds an object.
    pub fn json(&mut self, value: &impl Serialize) {
        self.0.extend_from_slice(b"data: ");
        // Memory does not fail, and the server's own structs are JSON.
        let _ = serde_json::to_writer((&mut self.0).writer(), value);
        self.0.extend_from_slice(b"\n\n");
    }

    /// Adds the line that ends a stream.
    pub fn done(&mut self) {
        self.0.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// The response that streams what runs.
pub fn response(running: Running, protocol: impl Protocol) -> Response {
    let stream = EventStream { running, protocol, state: State::New };
    let mut response = reply::of(StatusCode::OK, "text/event-stream", Body::new(stream));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// Dropping it, as happens when the client goes away, cancels the request.
struct EventStream<P> {
    running: Running,
    protocol: P,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    New,
    Running,
    Ended,
}

impl<P: Protocol> HttpBody for EventStream<P> {
    type Data = Bytes;
    type Error = Infallible;

    /// All events that have come are one frame, and one write.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let mut lines = Lines::default();
        if this.state == State::New {
            this.protocol.begin(&mut lines);
            this.state = State::Running;
        }
        while this.state == State::Running {
            match this.running.poll_next(context) {
                Poll::Ready(Some((prompt, event))) => this.protocol.event(prompt, event, &mut lines),
                Poll::Ready(None) => {
                    this.protocol.end(&mut lines);
                    this.state = State::Ended;
                }
                Poll::Pending if lines.0.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        if lines.0.is_empty() { Poll::Ready(None) } else { Poll::Ready(Some(Ok(Frame::data(lines.0.freeze())))) }
    }
}
