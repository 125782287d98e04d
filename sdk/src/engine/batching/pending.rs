//! A job that has not ended yet. It ends once: with its response, at its deadline, or when it is cancelled.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Counters, Job};
use crate::error::{Error, Result, Status};
use crate::runtime::{Cancel, Watcher, cancelled};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The function that gets the outcome.
type Callback<J> = Box<dyn FnOnce(Result<<J as Job>::Response>) + Send>;

/// A job that was accepted.
pub(in super::super) struct Pending<J: Job> {
    pub(in super::super) job: J,
    pub(super) arrived: Instant,
    /// Whether it has a deadline or can be cancelled.
    pub(super) can_end_early: bool,
    /// Whether a callback gets the outcome instead of a blocked thread.
    pub(super) has_callback: bool,
    timeout: Option<Duration>,
    state: Mutex<State<J>>,
    ended: Condvar,
    counters: Arc<Counters>,
}

struct State<J: Job> {
    ended: bool,
    /// Whether a thread is blocked in [`Pending::wait`].
    has_waiter: bool,
    outcome: Option<Result<J::Response>>,
    callback: Option<Callback<J>>,
    /// Cancels the run, if it is the only job in it.
    stop: Option<Arc<Cancel>>,
}

impl<J: Job> Pending<J> {
    pub(in super::super) fn new(
        job: J,
        timeout: Option<Duration>,
        can_end_early: bool,
        has_callback: bool,
        counters: &Arc<Counters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            job,
            arrived: Instant::now(),
            can_end_early,
            has_callback,
            timeout,
            state: Mutex::new(State { ended: false, has_waiter: false, outcome: None, callback: None, stop: None }),
            ended: Condvar::new(),
            counters: Arc::clone(counters),
        })
    }

    /// Sets the callback. If a cancel has ended the job already, returns that error instead.
    pub(in super::super) fn set_callback(&self, callback: Callback<J>) -> Result<()> {
        let mut state = self.lock();
        if let Some(Err(error)) = state.outcome.take() {
            return Err(error);
        }
        state.callback = Some(callback);
        Ok(())
    }

    /// Ends it with an outcome, unless it has ended already.
    pub(in super::super) fn end(&self, outcome: Result<J::Response>) {
        let mut state = self.lock();
        if state.ended {
            return;
        }
        state.ended = true;
        match &outcome {
            Ok(_) => self.counters.count_answered(),
            Err(error) => self.counters.count_failed(error),
        }
        let (stop, callback, has_waiter) = (state.stop.take(), state.callback.take(), state.has_waiter);
        let told = match callback {
            Some(callback) => Some((callback, outcome)),
            None => {
                state.outcome = Some(outcome);
                None
            }
        };
        drop(state);
        if let Some(stop) = stop {
            stop.trigger();
        }
        // Without a blocked thread this saves a system call.
        if has_waiter {
            self.ended.notify_all();
        }
        if let Some((callback, outcome)) = told {
            let around = IN_CALLBACK.replace(true);
            // A panic in a callback must not end a worker thread.
            if catch_unwind(AssertUnwindSafe(|| callback(outcome))).is_err() {
                log::error!("the callback of a request panicked");
            }
            IN_CALLBACK.set(around);
        }
    }

    /// Ends it without calling the callback. Returns false if it has ended already.
    pub(in super::super) fn withdraw(&self, error: &Error) -> bool {
        let mut state = self.lock();
        if state.ended {
            return false;
        }
        state.ended = true;
        state.callback = None;
        self.counters.count_failed(error);
        true
    }

    /// Whether it has ended.
    pub(in super::super) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Waits for the outcome, at most until the deadline.
    pub(in super::super) fn wait(&self) -> Result<J::Response> {
        let due = self.deadline();
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            state.has_waiter = true;
            match due.map(|due| due.saturating_duration_since(Instant::now())) {
                None => self.ended.wait(&mut state),
                Some(Duration::ZERO) => {
                    drop(state);
                    self.expire();
                    state = self.lock();
                }
                Some(left) => drop(self.ended.wait_for(&mut state, left)),
            }
        }
    }

    /// Its deadline.
    pub(in super::super) fn deadline(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| self.arrived.checked_add(timeout))
    }

    /// Ends it at its deadline.
    pub(in super::super) fn expire(&self) {
        let message = format!("the time limit of {:?} is over", self.timeout.unwrap_or_default());
        self.end(Err(Error::new(Status::Cancelled, message).about("timeout")));
    }

    /// Begins a run in which this is the only job. Returns what cancels the run, if the job can end early.
    pub(super) fn begin_single_run(&self) -> Option<Arc<Cancel>> {
        if !self.can_end_early {
            return None;
        }
        let stop = Arc::new(Cancel::new());
        let mut state = self.lock();
        if state.ended {
            stop.trigger();
        } else {
            state.stop = Some(Arc::clone(&stop));
        }
        Some(stop)
    }

    /// The run has ended: a cancel has nothing to stop any more.
    pub(super) fn end_single_run(&self) {
        if self.can_end_early {
            self.lock().stop = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock()
    }
}

impl<J: Job> Watcher for Pending<J> {
    fn cancelled(&self) {
        self.end(Err(cancelled()));
    }
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside the callback of a request.
pub(in super::super) fn in_callback() -> bool {
    IN_CALLBACK.get()
}
