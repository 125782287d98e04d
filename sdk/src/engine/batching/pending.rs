//! A job on its way: it ends once, with its response, by its deadline, or because it is cancelled.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Counters, Job};
use crate::error::{Error, Result, Status};
use crate::runtime::{Cancel, Watcher, cancelled};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What is called with the outcome.
type Callback<J> = Box<dyn FnOnce(Result<<J as Job>::Response>) + Send>;

/// A job on its way.
pub(in super::super) struct Pending<J: Job> {
    pub(in super::super) job: J,
    pub(super) arrived: Instant,
    /// Whether anything can end it early.
    pub(super) limited: bool,
    /// Whether a callback gets the outcome, and not a thread that waits for it.
    pub(super) calls_back: bool,
    timeout: Option<Duration>,
    state: Mutex<State<J>>,
    ended: Condvar,
    counters: Arc<Counters>,
}

struct State<J: Job> {
    ended: bool,
    /// Whether a thread waits for the outcome.
    awaited: bool,
    outcome: Option<Result<J::Response>>,
    callback: Option<Callback<J>>,
    /// Stops the run that it is alone in.
    stop: Option<Arc<Cancel>>,
}

impl<J: Job> Pending<J> {
    pub(in super::super) fn new(
        job: J,
        timeout: Option<Duration>,
        limited: bool,
        calls_back: bool,
        counters: &Arc<Counters>,
    ) -> Arc<Self> {
        Arc::new(Self {
            job,
            arrived: Instant::now(),
            limited,
            calls_back,
            timeout,
            state: Mutex::new(State { ended: false, awaited: false, outcome: None, callback: None, stop: None }),
            ended: Condvar::new(),
            counters: Arc::clone(counters),
        })
    }

    /// Has `callback` told the outcome. If it has ended already, which only a cancel does so early, that is said here.
    pub(in super::super) fn call(&self, callback: Callback<J>) -> Result<()> {
        let mut state = self.lock();
        if let Some(Err(error)) = state.outcome.take() {
            return Err(error);
        }
        state.callback = Some(callback);
        Ok(())
    }

    /// Ends it, unless it has ended.
    pub(in super::super) fn end(&self, outcome: Result<J::Response>) {
        let mut state = self.lock();
        if state.ended {
            return;
        }
        state.ended = true;
        match &outcome {
            Ok(_) => self.counters.answered(),
            Err(error) => self.counters.failed(error),
        }
        let (stop, callback, awaited) = (state.stop.take(), state.callback.take(), state.awaited);
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
        // The thread that has run it need not be woken, which would be a call of the system.
        if awaited {
            self.ended.notify_all();
        }
        if let Some((callback, outcome)) = told {
            let around = IN_CALLBACK.replace(true);
            // A caller's panic must not end a thread of ours.
            if catch_unwind(AssertUnwindSafe(|| callback(outcome))).is_err() {
                log::error!("the callback of a request panicked");
            }
            IN_CALLBACK.set(around);
        }
    }

    /// Ends it without telling anyone but the caller of this; false if it has ended.
    pub(in super::super) fn withdraw(&self, error: &Error) -> bool {
        let mut state = self.lock();
        if state.ended {
            return false;
        }
        state.ended = true;
        state.callback = None;
        self.counters.failed(error);
        true
    }

    /// Whether it has ended.
    pub(in super::super) fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Waits for the outcome, no longer than its time limit.
    pub(in super::super) fn wait(&self) -> Result<J::Response> {
        let due = self.due();
        let mut state = self.lock();
        loop {
            if let Some(outcome) = state.outcome.take() {
                return outcome;
            }
            state.awaited = true;
            match due.map(|due| due.saturating_duration_since(Instant::now())) {
                None => self.ended.wait(&mut state),
                Some(Duration::ZERO) => {
                    drop(state);
                    self.out_of_time();
                    state = self.lock();
                }
                Some(left) => drop(self.ended.wait_for(&mut state, left)),
            }
        }
    }

    /// When its time is over.
    pub(in super::super) fn due(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| self.arrived.checked_add(timeout))
    }

    /// Ends it because its time is over.
    pub(in super::super) fn out_of_time(&self) {
        let message = format!("the time limit of {:?} is over", self.timeout.unwrap_or_default());
        self.end(Err(Error::new(Status::Cancelled, message).about("timeout")));
    }

    /// What stops the run that it is alone in, if anything may.
    pub(super) fn runs_alone(&self) -> Option<Arc<Cancel>> {
        if !self.limited {
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

    /// The run that it was alone in is over: there is nothing to stop any more.
    pub(super) fn has_run(&self) {
        if self.limited {
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

/// Whether this thread is in the callback of a request, which is there until that returns.
pub(in super::super) fn in_callback() -> bool {
    IN_CALLBACK.get()
}
