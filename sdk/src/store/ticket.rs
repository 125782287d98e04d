//! Tickets: how callers learn that a queued operation is done.

use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex};
use std::sync::Arc;

/// The outcome of a queued operation, now or later.
#[derive(Clone, Debug)]
pub struct Ticket(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    outcome: Mutex<Option<Result<()>>>,
    done: Condvar,
}

impl Ticket {
    /// A ticket for an operation that is done already.
    pub fn ready(outcome: Result<()>) -> Self {
        Self(Arc::new(Shared { outcome: Mutex::new(Some(outcome)), done: Condvar::new() }))
    }

    /// Waits until it is done.
    pub fn wait(&self) -> Result<()> {
        let mut outcome = self.0.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            self.0.done.wait(&mut outcome);
        }
    }

    /// Waits until all are done, even if one fails. Returns the first error.
    pub(crate) fn wait_all<'a>(tickets: impl IntoIterator<Item = &'a Self>) -> Result<()> {
        tickets.into_iter().map(Self::wait).fold(Ok(()), Result::and)
    }

    /// How it ended; `None` if it is not done yet.
    pub fn outcome(&self) -> Option<Result<()>> {
        self.0.outcome.lock().clone()
    }
}

/// The other end of a ticket. If it is dropped without an outcome, the ticket fails, so that a caller never waits for
/// ever.
pub(super) struct Promise(Arc<Shared>);

impl Promise {
    pub(super) fn new() -> (Self, Ticket) {
        let shared = Arc::new(Shared::default());
        (Self(shared.clone()), Ticket(shared))
    }

    pub(super) fn keep(self, outcome: Result<()>) {
        self.settle(outcome);
    }

    fn settle(&self, result: Result<()>) {
        self.0.outcome.lock().get_or_insert(result);
        self.0.done.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.settle(Err(Error::new(Status::Internal, "a bug in Pagoda, please report it: the store's writer ended")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_outcome_counts_and_a_lost_promise_is_an_error() {
        let (promise, ticket) = Promise::new();
        assert!(ticket.outcome().is_none());
        promise.keep(Ok(()));
        assert_eq!(ticket.wait(), Ok(()));
        let (promise, ticket) = Promise::new();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| ticket.wait());
            drop(promise);
            assert_eq!(waiting.join().unwrap().unwrap_err().status(), Status::Internal);
        });
    }
}
