//! Requests that run in a generator: their events, and what cancels them.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use pagoda::engine::{Event, Prompt};
use pagoda::{Cancel, Error, GenerateRequest, GenerateResponse, Generator, Result, Status};
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::heavy;
use crate::statistics::Timing;
use crate::tally::Tally;

/// All that run, for the end of the server.
#[derive(Default)]
pub struct RunningRequests {
    next: AtomicU64,
    cancels: Mutex<HashMap<u64, Arc<Cancel>>>,
}

impl RunningRequests {
    /// Cancels all that run. Their answers have what was generated until now.
    pub fn cancel_all(&self) {
        let cancels: Vec<_> = self.lock().values().cloned().collect();
        cancels.iter().for_each(|cancel| cancel.trigger());
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Cancel>>> {
        self.cancels.lock()
    }
}

/// One or more prompts of a client that run. Dropping it cancels them.
pub struct Running {
    events: UnboundedReceiver<(usize, Event)>,
    /// Prompts that have not ended.
    left: usize,
    cancel: Arc<Cancel>,
    all: Arc<RunningRequests>,
    number: u64,
    tally: Tally,
    /// Which prompts have a first token.
    begun: Vec<bool>,
    /// Those of the prompts that have not ended.
    timings: Vec<Option<Timing>>,
    /// A model that is unloaded meanwhile stays until then.
    _generator: Arc<Generator>,
}

impl Running {
    /// Sends the requests, one for each prompt, to the generator.
    pub fn start(
        generator: &Arc<Generator>,
        requests: Vec<GenerateRequest>,
        all: &Arc<RunningRequests>,
        tally: Tally,
    ) -> Result<Self> {
        let (sender, events) = unbounded_channel();
        let cancel = Arc::new(Cancel::new());
        let number = all.next.fetch_add(1, Ordering::Relaxed);
        all.lock().insert(number, Arc::clone(&cancel));
        // From here on dropping it cancels those that were sent before one is refused.
        let (all, left) = (Arc::clone(all), requests.len());
        let begun = vec![false; left];
        let timings = (0..left).map(|_| Some(tally.statistics.begin())).collect();
        let running =
            Self { events, left, cancel, all, number, tally, begun, timings, _generator: Arc::clone(generator) };
        // Prompts become tokens here, and grammars are compiled.
        heavy::work(requests.iter().map(weight).sum(), || {
            requests.into_iter().enumerate().try_for_each(|(prompt, request)| {
                let sender = sender.clone();
                let request = GenerateRequest { cancel: Some(Arc::clone(&running.cancel)), ..request };
                generator.generate_async(&request, move |event| {
                    // The client may be gone.
                    let _ = sender.send((prompt, event));
                })
            })
        })?;
        Ok(running)
    }

    /// The next event and the number of its prompt. `None` after the last prompt has ended.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.events.poll_recv(context).map(|event| {
            let (prompt, event) = event.unwrap_or_else(|| (0, Event::End(Err(dropped()))));
            self.count(prompt, &event);
            Some((prompt, event))
        })
    }

    fn count(&mut self, prompt: usize, event: &Event) {
        match event {
            Event::Token(_) => {
                if !std::mem::replace(&mut self.begun[prompt], true) {
                    self.tally.first_token();
                }
                self.tally.token();
            }
            Event::End(outcome) => {
                self.left -= 1;
                self.tally.prompt(outcome.as_ref().map_or(0, |response| response.prompt_tokens.len()));
                let timing = self.timings[prompt].take();
                if let (Some(timing), Ok(response)) = (timing, outcome) {
                    timing.succeeded(response.choices.first().map(|choice| choice.timings.queued));
                }
            }
        }
    }

    /// Waits for the end of all. The responses are in the order of the prompts.
    pub async fn responses(mut self) -> Result<Vec<GenerateResponse>> {
        let mut responses = vec![GenerateResponse::default(); self.left];
        while let Some((prompt, event)) = poll_fn(|context| self.poll_next(context)).await {
            if let Event::End(outcome) = event {
                responses[prompt] = outcome?;
            }
        }
        Ok(responses)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.all.lock().remove(&self.number);
        if self.left > 0 {
            self.cancel.trigger();
        }
    }
}

/// As heavy as this many bytes.
const GRAMMAR: usize = 1 << 20;

/// The bytes of a request, as far as time grows with them. A grammar may take long however short it is.
fn weight(request: &GenerateRequest) -> usize {
    if request.grammar.is_some() {
        return GRAMMAR;
    }
    match &request.prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Tokens(tokens) => size_of_val(&tokens[..]),
        Prompt::Chat(chat) => {
            let length = |message: &Value| message.get("content").and_then(Value::as_str).map_or(0, str::len);
            chat.messages.iter().map(length).sum()
        }
    }
}

/// Cancels what it was given to when it is dropped, as happens when a client goes away.
pub struct CancelOnDrop {
    cancel: Arc<Cancel>,
    armed: bool,
}

impl CancelOnDrop {
    /// One that is armed.
    pub fn new() -> Self {
        Self { cancel: Arc::new(Cancel::new()), armed: true }
    }

    /// What it triggers.
    pub fn cancel(&self) -> Arc<Cancel> {
        Arc::clone(&self.cancel)
    }

    /// What it was for has ended.
    pub fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if self.armed {
            self.cancel.trigger();
        }
    }
}

fn dropped() -> Error {
    Error::new(Status::Internal, "a bug in Pagoda, please report it: a request was dropped unanswered")
}
