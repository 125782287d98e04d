//! The rest of a body whose request was answered before it was read, as most that are refused are.
//!
//! A connection of HTTP/1 ends where a request was not read to its end: the client would find it broken while it still sends, and
//! some never look at the answer then. So the rest is read and forgotten, if it is not too much.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::http::{StatusCode, Version};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;

/// How long to wait for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// What was not read of a request's body.
pub struct Rest(Arc<Mutex<Body>>);

impl Rest {
    /// That of a request, if there may be one that its client sends in any case.
    pub fn of(request: &mut Request) -> Option<Self> {
        let is_sent = !request.body().is_end_stream() && !request.headers().contains_key(EXPECT);
        if request.version() > Version::HTTP_11 || !is_sent {
            return None;
        }
        let body = Arc::new(Mutex::new(std::mem::take(request.body_mut())));
        *request.body_mut() = Body::new(Shared(Arc::clone(&body)));
        Some(Self(body))
    }

    /// Forgets up to so many bytes.
    pub async fn forget(self, status: StatusCode, most: u64) {
        // Who was too slow already gets no more time.
        if status == StatusCode::REQUEST_TIMEOUT {
            return;
        }
        let mut body = Shared(self.0);
        let read = async {
            let mut left = most;
            while let Some(Ok(frame)) = body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len) as u64);
                if left == 0 {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(PATIENCE, read).await;
    }
}

/// A body that is still there when it is dropped.
struct Shared(Arc<Mutex<Body>>);

impl HttpBody for Shared {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut *self.0.lock()).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.lock().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.lock().size_hint()
    }
}
