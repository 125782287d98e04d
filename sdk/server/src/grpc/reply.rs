//! The response of a call: messages, and a status after them.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, HttpBody};
use axum::http::StatusCode;
use axum::http::header::HeaderMap;
use axum::response::Response;
use bytes::{BufMut, Bytes, BytesMut};
use hyper::body::Frame;
use prost::Message;

use super::frame::{HEAD, head};
use super::status::{GRPC, trailers};
use crate::failure::Failure;
use crate::reply;

/// A message in its frame. `tail` follows what `message` is encoded as, and belongs to it: fields that need no copy.
pub fn encode(message: &impl Message, tail: &[Bytes]) -> Result<Vec<Bytes>, Failure> {
    let own = message.encoded_len();
    let mut first = BytesMut::with_capacity(HEAD + own);
    first.put_slice(&head(own + tail.iter().map(Bytes::len).sum::<usize>())?);
    // The buffer grows, which is all that could fail.
    let _ = message.encode(&mut first);
    let mut parts = vec![first.freeze()];
    parts.extend(tail.iter().filter(|part| !part.is_empty()).cloned());
    Ok(parts)
}

/// The response of one message.
pub fn of(message: &impl Message) -> Result<Response, Failure> {
    Ok(parts(encode(message, &[])?))
}

/// The response of messages that are encoded.
pub fn parts(parts: Vec<Bytes>) -> Response {
    let mut parts = parts.into_iter();
    stream(move |_| Poll::Ready(parts.next().map(Ok)))
}

/// A response whose parts come as `next` has them. After a failure there is none.
pub fn stream<F>(next: F) -> Response
where
    F: FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> + Send + Unpin + 'static,
{
    reply::of(StatusCode::OK, GRPC, Body::new(Parts { next, ended: false }))
}

struct Parts<F> {
    next: F,
    ended: bool,
}

impl<F: FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> + Unpin> HttpBody for Parts<F> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let end: HeaderMap = match (self.next)(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(Ok(part))) => return Poll::Ready(Some(Ok(Frame::data(part)))),
            Poll::Ready(Some(Err(failure))) => trailers(Some(&failure)),
            Poll::Ready(None) => trailers(None),
        };
        self.ended = true;
        Poll::Ready(Some(Ok(Frame::trailers(end))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
