//! What a connection of HTTP/2 does: its requests, and whether the client takes their responses.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;

/// The bytes of a frame that a client may take a second for.
const SLOWEST: usize = 16 << 10;

/// The requests of a connection.
pub struct Activity {
    state: Mutex<State>,
}

struct State {
    next: u64,
    open: HashMap<u64, Arc<Mutex<Response>>>,
    /// When the last one ended.
    since: Instant,
}

/// The response to a request.
#[derive(Default)]
struct Response {
    /// Nothing before it begins, and after it was cut.
    body: Option<Body>,
    /// When the last frame was handed over that the client has not taken, and its bytes.
    handed: Option<(Instant, usize)>,
}

/// A request that is answered, until it is dropped.
pub struct Busy {
    activity: Arc<Activity>,
    number: u64,
    response: Arc<Mutex<Response>>,
}

impl Default for Activity {
    fn default() -> Self {
        Self { state: Mutex::new(State { next: 0, open: HashMap::new(), since: Instant::now() }) }
    }
}

impl Activity {
    /// A request has come.
    pub fn begin(self: &Arc<Self>) -> Busy {
        let response = Arc::<Mutex<Response>>::default();
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Arc::clone(&response));
        Busy { activity: Arc::clone(self), number, response }
    }

    /// Waits until there was no request for this time.
    pub async fn idle(&self, timeout: Duration) {
        loop {
            let left = {
                let state = self.state.lock();
                if state.open.is_empty() { timeout.saturating_sub(state.since.elapsed()) } else { timeout }
            };
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    /// Ends each response that the client has not read for this time, and with it the request. Returns when the client has not
    /// read one for twice as long: then the connection is to end, as the frame that was handed over stays until then.
    pub async fn unread(&self, timeout: Duration) {
        loop {
            tokio::time::sleep(timeout / 4).await;
            let open: Vec<_> = self.state.lock().open.values().cloned().collect();
            for response in open {
                let mut response = response.lock();
                let Some((at, bytes)) = response.handed else { continue };
                let patience = timeout + Duration::from_secs((bytes / SLOWEST) as u64);
                let cut = response.body.take_if(|_| at.elapsed() > patience);
                drop(response);
                // This cancels the request.
                drop(cut);
                if at.elapsed() > 2 * patience {
                    return;
                }
            }
        }
    }
}

impl Busy {
    /// The body of the response, which is watched.
    pub fn answers(self, body: Body) -> Body {
        self.response.lock().body = Some(body);
        Body::new(Watched { busy: self })
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = self.activity.state.lock();
        state.open.remove(&self.number);
        state.since = Instant::now();
    }
}

/// A body that knows whether the client takes it: the next frame is asked for when there is room for it.
struct Watched {
    busy: Busy,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut response = self.busy.response.lock();
        let Some(body) = &mut response.body else {
            return Poll::Ready(Some(Err(axum::Error::new("the client did not read the response"))));
        };
        let frame = Pin::new(body).poll_frame(context);
        response.handed = match &frame {
            Poll::Ready(Some(Ok(frame))) => Some((Instant::now(), frame.data_ref().map_or(0, Bytes::len))),
            _ => None,
        };
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.busy.response.lock().body.as_ref().is_some_and(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.busy.response.lock().body.as_ref().map_or_else(SizeHint::default, HttpBody::size_hint)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    const WAIT: Duration = Duration::from_millis(40);

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(test);
    }

    #[test]
    fn a_connection_with_a_request_is_not_idle() {
        run(async {
            let activity = Arc::new(Activity::default());
            let busy = activity.begin();
            assert!(tokio::time::timeout(5 * WAIT, activity.idle(WAIT)).await.is_err());
            drop(busy);
            let since = Instant::now();
            activity.idle(WAIT).await;
            assert!(since.elapsed() >= WAIT);
        });
    }

    #[test]
    fn what_the_client_does_not_read_is_cut() {
        run(async {
            let activity = Arc::new(Activity::default());
            // One that is read, one that is not, and one whose next frame does not come.
            let [mut read, mut unread] = [(); 2].map(|()| activity.begin().answers(Body::from("text")));
            let mut late = activity.begin().answers(Body::new(Late));
            assert_eq!(read.frame().await.unwrap().unwrap().into_data().unwrap(), "text");
            assert!(read.frame().await.is_none());
            assert!(unread.frame().await.unwrap().is_ok());
            assert!(tokio::time::timeout(4 * WAIT, late.frame()).await.is_err());
            assert!(tokio::time::timeout(20 * WAIT, activity.unread(WAIT)).await.is_ok());
            assert!(unread.frame().await.unwrap().is_err() && !unread.is_end_stream());
            assert!(read.frame().await.is_none());
            assert!(tokio::time::timeout(WAIT, late.frame()).await.is_err());
        });
    }

    struct Late;

    impl HttpBody for Late {
        type Data = Bytes;
        type Error = axum::Error;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
            Poll::Pending
        }
    }
}
