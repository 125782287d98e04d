//! The answers to one request, which its sequences fill, and where they go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Instant;

use super::mailbox::Sender;
use super::request::{Choice, Event, GenerateResponse, Token};
use super::sampling::TokenLogprobs;
use crate::error::{Error, Result};
use crate::kv::Owner;
use crate::runtime::Cancel;
use crate::sync::Mutex;

/// A function that gets events, on a thread of the generator.
pub(super) type Callback = Box<dyn FnMut(Event) + Send>;

/// Where events go.
pub(super) enum Sink {
    /// A stream, which the caller reads. `tokens`: not only the end.
    Stream { sender: Sender, tokens: bool },
    /// A callback, by the thread that delivers to callbacks.
    Callback { callback: Arc<Mutex<Callback>>, deliver: mpsc::Sender<Delivery> },
}

/// An event for a callback.
pub(super) struct Delivery {
    pub(super) callback: Arc<Mutex<Callback>>,
    pub(super) event: Event,
}

impl Sink {
    fn wants_tokens(&self) -> bool {
        !matches!(self, Self::Stream { tokens: false, .. })
    }

    /// Returns false if nothing receives events any more. The reader of a stream is not woken.
    fn send(&self, event: Event) -> bool {
        match self {
            Self::Stream { sender, .. } => sender.push(event),
            Self::Callback { callback, deliver } => {
                deliver.send(Delivery { callback: Arc::clone(callback), event }).is_ok()
            }
        }
    }

    /// Wakes the reader of a stream.
    fn wake(&self) {
        if let Self::Stream { sender, .. } = self {
            sender.wake();
        }
    }
}

/// The answers to one request.
pub(super) struct Answers {
    sink: Sink,
    /// Set when nothing receives the answers any more.
    disconnected: AtomicBool,
    cancel: Option<Arc<Cancel>>,
    deadline: Option<Instant>,
    state: Mutex<State>,
}

struct State {
    response: GenerateResponse,
    /// How many answers have not ended.
    left: usize,
    /// The error that ended the request.
    error: Option<Error>,
    /// The owner that has the keys and values of the prompt, for the other answers.
    prompt_owner: Option<Owner>,
    /// Whether the answers that wait for the prompt may begin.
    prompt_done: bool,
    /// The owners of answers that ended.
    owners: Vec<Owner>,
}

impl Answers {
    pub(super) fn new(
        sink: Sink,
        cancel: Option<Arc<Cancel>>,
        deadline: Option<Instant>,
        choices: usize,
        response: GenerateResponse,
    ) -> Self {
        let response = GenerateResponse { choices: vec![Choice::default(); choices], ..response };
        let state =
            State { response, left: choices, error: None, prompt_owner: None, prompt_done: false, owners: Vec::new() };
        Self { sink, disconnected: false.into(), cancel, deadline, state: Mutex::new(state) }
    }

    /// Nothing receives the answers any more.
    pub(super) fn disconnect(&self) {
        self.disconnected.store(true, Ordering::Relaxed);
    }

    /// Whether the request was cancelled, or its receiver is gone.
    pub(super) fn is_cancelled(&self) -> bool {
        self.disconnected.load(Ordering::Relaxed) || self.cancel.as_ref().is_some_and(|cancel| cancel.is_triggered())
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Whether a failed answer has ended the request.
    pub(super) fn has_failed(&self) -> bool {
        self.state.lock().error.is_some()
    }

    /// Adds a token. Its reader is woken by [`wake`](Self::wake).
    pub(super) fn send(&self, token: Token) {
        if self.sink.wants_tokens() && !self.sink.send(Event::Token(token)) {
            self.disconnect();
        }
    }

    /// Wakes what waits for tokens.
    pub(super) fn wake(&self) {
        if self.sink.wants_tokens() {
            self.sink.wake();
        }
    }

    /// The prompt was found cached in part, by the first answer.
    pub(super) fn prompt_cached(&self, owner: Owner, tokens: usize) {
        let mut state = self.state.lock();
        (state.response.cached_tokens, state.prompt_owner) = (tokens as u32, Some(owner));
    }

    /// Adds those of a token of the prompt. They may be there: a prompt is computed anew after its sequence was preempted.
    pub(super) fn add_prompt_logprobs(&self, position: usize, logprobs: TokenLogprobs) {
        let all = &mut self.state.lock().response.prompt_logprobs;
        if position == all.len() {
            all.push(Some(logprobs));
        }
    }

    /// The prompt is computed, or never will be.
    pub(super) fn prompt_done(&self) {
        self.state.lock().prompt_done = true;
    }

    /// Whether the other answers may begin.
    pub(super) fn is_prompt_done(&self) -> bool {
        self.state.lock().prompt_done
    }

    /// Another owner has the keys and values of the prompt.
    pub(super) fn set_prompt_owner(&self, owner: Owner) {
        self.state.lock().prompt_owner = Some(owner);
    }

    pub(super) fn prompt_owner(&self) -> Option<Owner> {
        self.state.lock().prompt_owner
    }

    /// An answer has ended. Returns the owners of all answers after the last one.
    pub(super) fn end(&self, choice: usize, owner: Owner, outcome: Result<Choice>, computed: u64) -> Option<Ended> {
        let mut state = self.state.lock();
        state.prompt_done = true;
        match outcome {
            Ok(ended) => state.response.choices[choice] = ended,
            Err(error) => drop(state.error.get_or_insert(error)),
        }
        state.response.computed_tokens += computed;
        state.owners.push(owner);
        state.left -= 1;
        if state.left > 0 {
            return None;
        }
        let response = std::mem::take(&mut state.response);
        let outcome = state.error.take().map_or(Ok(response), Err);
        Some(Ended { outcome, owners: std::mem::take(&mut state.owners) })
    }

    /// All answers have ended at once. Returns the outcome of the request.
    pub(super) fn end_all(&self, outcome: Result<Vec<Choice>>, computed: u64) -> Result<GenerateResponse> {
        let mut state = self.state.lock();
        (state.prompt_done, state.left) = (true, 0);
        state.response.computed_tokens += computed;
        let response = std::mem::take(&mut state.response);
        outcome.map(|choices| GenerateResponse { choices, ..response })
    }

    /// Delivers the end of the request.
    pub(super) fn deliver(&self, outcome: Result<GenerateResponse>) {
        self.sink.send(Event::End(outcome));
        self.sink.wake();
    }
}

/// The end of a request.
pub(super) struct Ended {
    pub(super) outcome: Result<GenerateResponse>,
    pub(super) owners: Vec<Owner>,
}
