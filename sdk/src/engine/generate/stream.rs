//! How answers reach callers: streams, callbacks, and many requests at once.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};

use super::answers::{Answers, Delivery};
use super::mailbox::Receiver;
use super::request::{Event, GenerateRequest, GenerateResponse, Token};
use super::{Driver, Generator, Shared};
use crate::error::{Error, Result, Status};
use crate::sync::{Mutex, Worker};

/// The tokens of a request, as they are generated. Dropping it cancels the request.
pub struct TokenStream {
    events: Receiver,
    answers: Arc<Answers>,
    /// Weak: a stream does not keep a generator open that was dropped.
    shared: Weak<Shared>,
    ended: Option<Result<GenerateResponse>>,
    /// The error that ended the request was an item.
    error_taken: bool,
}

impl TokenStream {
    pub(super) fn new(events: Receiver, answers: Arc<Answers>, shared: Weak<Shared>) -> Self {
        Self { events, answers, shared, ended: None, error_taken: false }
    }

    /// Waits for the end, and returns the whole response.
    ///
    /// # Errors
    /// Those that ended the request.
    pub fn response(mut self) -> Result<GenerateResponse> {
        while self.receive().is_some() {}
        self.ended.take().unwrap_or_else(closed)
    }

    /// What has arrived, without waiting: for callers that run the steps themselves. `None`: nothing new.
    pub fn try_next(&mut self) -> Option<Event> {
        let event = self.events.try_take()?;
        if let Event::End(outcome) = &event {
            self.ended = Some(outcome.clone());
        }
        Some(event)
    }

    fn wait_for_event(&self) -> Option<Event> {
        self.run_steps().or_else(|| self.events.take())
    }

    /// If callers run the steps, the thread that asks for a token does, until there is an event.
    fn run_steps(&self) -> Option<Event> {
        while let Some(shared) = self.shared.upgrade().filter(|shared| shared.options.driver == Driver::Caller) {
            match self.events.try_take() {
                Some(event) => return Some(event),
                None if shared.step() => {}
                None => break,
            }
        }
        None
    }

    fn receive(&mut self) -> Option<Token> {
        while self.ended.is_none() {
            let event = self.wait_for_event();
            if let Some(token) = self.token_of(event) {
                return Some(token);
            }
        }
        None
    }

    /// The token of an event. Another event is the end.
    fn token_of(&mut self, event: Option<Event>) -> Option<Token> {
        match event {
            Some(Event::Token(token)) => return Some(token),
            Some(Event::End(outcome)) => self.ended = Some(outcome),
            None => self.ended = Some(closed()),
        }
        None
    }

    /// The error that ended the request, once.
    fn last_item(&mut self) -> Option<Result<Token>> {
        let Some(Err(error)) = &self.ended else { return None };
        (!std::mem::replace(&mut self.error_taken, true)).then(|| Err(error.clone()))
    }

    /// The tokens as a `Stream`, for async code.
    #[cfg(feature = "futures")]
    pub fn into_async(self) -> AsyncTokens {
        AsyncTokens(self)
    }
}

fn closed() -> Result<GenerateResponse> {
    Err(Error::new(Status::Internal, "the generator ended without an answer"))
}

/// The tokens; an error is the last item.
impl Iterator for TokenStream {
    type Item = Result<Token>;

    fn next(&mut self) -> Option<Result<Token>> {
        self.receive().map(Ok).or_else(|| self.last_item())
    }
}

/// The tokens of a request as a [`Stream`](futures_core::Stream), for any executor; an error is the last item. Dropping it cancels
/// the request. With [`Driver::Caller`] a poll runs steps, and returns with a token.
///
/// ```no_run
/// # use pagoda::engine::{GenerateRequest, Generator};
/// # async fn tokens(generator: &Generator) -> pagoda::Result<()> {
/// use std::pin::pin;
/// use futures_core::Stream;
///
/// let mut tokens = pin!(generator.stream(&GenerateRequest::new("The sea"))?.into_async());
/// while let Some(token) = std::future::poll_fn(|task| tokens.as_mut().poll_next(task)).await {
///     print!("{}", token?.text);
/// }
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "futures")]
pub struct AsyncTokens(TokenStream);

#[cfg(feature = "futures")]
impl AsyncTokens {
    /// The stream for code that waits. What was taken is gone from it.
    pub fn into_inner(self) -> TokenStream {
        self.0
    }
}

#[cfg(feature = "futures")]
impl futures_core::Stream for AsyncTokens {
    type Item = Result<Token>;

    fn poll_next(
        self: std::pin::Pin<&mut Self>,
        task: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Self::Item>> {
        let stream = &mut self.get_mut().0;
        while stream.ended.is_none() {
            let event = match stream.run_steps() {
                Some(event) => Some(event),
                None => std::task::ready!(stream.events.poll_take(task)),
            };
            if let Some(token) = stream.token_of(event) {
                return std::task::Poll::Ready(Some(Ok(token)));
            }
        }
        std::task::Poll::Ready(stream.last_item())
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.answers.disconnect();
            if let Some(shared) = self.shared.upgrade() {
                shared.notice_cancelled();
            }
        }
    }
}

/// The thread that calls callbacks, so that a slow one does not delay steps. It starts with the first one.
#[derive(Default)]
pub(super) struct Callbacks {
    thread: Mutex<Option<(Sender<Delivery>, Worker)>>,
}

impl Callbacks {
    /// The thread's channel.
    pub(super) fn start(&self) -> Result<Sender<Delivery>> {
        let mut thread = self.thread.lock();
        if let Some((sender, _)) = &*thread {
            return Ok(sender.clone());
        }
        let (sender, deliveries) = channel::<Delivery>();
        let worker = Worker::spawn("pagoda-stream", "call callbacks on", move || {
            for Delivery { callback, event } in deliveries {
                // The panic hook has reported it. The callbacks of other requests are called all the same.
                if catch_unwind(AssertUnwindSafe(|| callback.lock()(event))).is_err() {
                    log::error!("the callback of a request panicked");
                }
            }
        })?;
        *thread = Some((sender.clone(), worker));
        Ok(sender)
    }

    /// Ends the thread after all events are delivered.
    pub(super) fn stop(&self) {
        let thread = self.thread.lock().take();
        if let Some((sender, worker)) = thread {
            drop(sender);
            drop(worker);
        }
    }
}

/// See [`Generator::generate_all`].
pub(super) fn generate_all(
    generator: &Generator,
    requests: &[GenerateRequest],
    progress: &mut dyn FnMut(usize),
) -> Vec<Result<GenerateResponse>> {
    // As many as the queue takes: the others follow as these end.
    let mut streams: Vec<Option<Result<TokenStream>>> = Vec::with_capacity(requests.len());
    let mut outcomes = Vec::with_capacity(requests.len());
    while outcomes.len() < requests.len() {
        while streams.len() < requests.len() {
            match generator.open_stream(&requests[streams.len()], false) {
                // Room comes as earlier requests end.
                Err(error)
                    if error.status() == Status::Capacity
                        && error.argument().is_none()
                        && outcomes.len() < streams.len() =>
                {
                    break;
                }
                opened => streams.push(Some(opened)),
            }
        }
        let next = streams[outcomes.len()].take().expect("each is taken once");
        outcomes.push(next.and_then(TokenStream::response));
        progress(outcomes.len());
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::super::answers::Sink;
    use super::super::mailbox::mailbox;
    use super::*;

    fn failed() -> TokenStream {
        let (sender, events) = mailbox();
        let answers = Answers::new(Sink::Stream { sender, tokens: true }, None, None, 1, GenerateResponse::default());
        answers.send(Token { choice: 0, id: 7, text: "a".into(), logprobs: None, finish_reason: None });
        answers.deliver(Err(Error::new(Status::Runtime, "the model is broken")));
        TokenStream::new(events, Arc::new(answers), Weak::new())
    }

    #[test]
    fn an_error_is_the_last_item_and_stays_the_outcome() {
        let mut stream = failed();
        let items: Vec<_> =
            stream.by_ref().map(|item| item.map(|token| token.id).map_err(|error| error.status())).collect();
        assert_eq!(items, [Ok(7), Err(Status::Runtime)]);
        assert!(stream.next().is_none());
        assert_eq!(stream.response().unwrap_err().status(), Status::Runtime);
    }

    #[cfg(feature = "futures")]
    #[test]
    fn a_task_gets_the_error_once() {
        use std::pin::Pin;
        use std::task::{Context, Poll, Waker};

        use futures_core::Stream;

        let mut stream = failed().into_async();
        let mut poll = || Pin::new(&mut stream).poll_next(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(poll(), Poll::Ready(Some(Ok(token))) if token.id == 7));
        assert!(matches!(poll(), Poll::Ready(Some(Err(_)))));
        assert!(matches!((poll(), poll()), (Poll::Ready(None), Poll::Ready(None))));
        assert_eq!(stream.into_inner().response().unwrap_err().status(), Status::Runtime);
    }
}
