//! A body that tells when it has ended.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};

/// A body, and what is called once: with true after its last frame was taken, or with false if it is dropped before.
pub struct Tracked<F: FnOnce(bool)> {
    body: Body,
    done: Option<F>,
}

impl<F: FnOnce(bool)> Tracked<F> {
    /// Tracks a body.
    pub fn new(body: Body, done: F) -> Self {
        Self { body, done: Some(done) }
    }
}

impl<F: FnOnce(bool) + Unpin> HttpBody for Tracked<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        let has_ended = matches!(frame, Poll::Ready(None)) || self.body.is_end_stream();
        if let Some(done) = self.done.take_if(|_| has_ended) {
            done(true);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<F: FnOnce(bool)> Drop for Tracked<F> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            // A body that has nothing to send need not be polled.
            done(self.body.is_end_stream());
        }
    }
}
