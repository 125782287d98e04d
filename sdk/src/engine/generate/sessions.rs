//! The ends of sessions: an answer is delivered when the keys and values of its conversation are as durable as the store
//! promises. A thread of its own waits for that, so that no step does.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use super::super::batching::catch_panic;
use super::answers::Answers;
use super::open_model::OpenModel;
use super::request::GenerateResponse;
use crate::error::Result;
use crate::kv::{Owner, Owners};
use crate::store::Ticket;
use crate::sync::Worker;

/// Ends sessions.
pub(super) struct Sessions {
    /// Set if there is a durable store.
    thread: Option<(Sender<EndOfTurn>, Worker)>,
}

struct EndOfTurn {
    owner: Owner,
    answers: Arc<Answers>,
    outcome: Result<GenerateResponse>,
    /// With a policy: what its slots are written by.
    slots: Option<Result<Vec<Ticket>>>,
}

impl Sessions {
    /// For a cache with a durable store, or without.
    pub(super) fn start(model: &Arc<OpenModel>, is_durable: bool) -> Result<Self> {
        if !is_durable {
            return Ok(Self { thread: None });
        }
        let (sender, ends) = channel::<EndOfTurn>();
        let model = Arc::clone(model);
        let worker = Worker::spawn("pagoda-session", "store conversations on", move || {
            for EndOfTurn { owner, answers, outcome, slots } in ends {
                let stored = match slots {
                    Some(tickets) => tickets.and_then(|tickets| Ticket::wait_all(&tickets)),
                    None => catch_panic(|| model.kv.offload(Owners::These(&[owner]))).map(drop),
                };
                let stored = stored.map_err(|error| {
                    let message =
                        format!("the answer was generated, but its conversation could not be stored: {error}");
                    crate::Error::new(error.status(), message)
                });
                answers.deliver(outcome.and_then(|response| stored.map(|()| response)));
            }
        })?;
        Ok(Self { thread: Some((sender, worker)) })
    }

    /// Delivers the end of a turn, once it is stored.
    pub(super) fn end(
        &self,
        owner: Owner,
        answers: Arc<Answers>,
        outcome: Result<GenerateResponse>,
        slots: Option<Result<Vec<Ticket>>>,
    ) {
        match &self.thread {
            None => {
                if let Some(Err(error)) = slots {
                    log::debug!("a session is in the pool alone: {error}");
                }
                answers.deliver(outcome);
            }
            Some((thread, _)) => {
                if let Err(unsent) = thread.send(EndOfTurn { owner, answers, outcome, slots }) {
                    unsent.0.answers.deliver(unsent.0.outcome);
                }
            }
        }
    }

    /// Waits until all ends are delivered.
    pub(super) fn finish(&mut self) {
        if let Some((sender, worker)) = self.thread.take() {
            drop(sender);
            drop(worker);
        }
    }
}
