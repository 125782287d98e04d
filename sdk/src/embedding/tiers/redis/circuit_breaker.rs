//! The circuit breaker of one node.

use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// After some consecutive failures the breaker opens: requests to the node fail at once, so that lookups do not wait
/// for it. After a pause one trial decides whether it closes again. A lookup is never that trial.
pub(super) struct CircuitBreaker {
    failures: u32,
    pause: Duration,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant },
    Trial,
}

/// What an idle worker of the node does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Waits: the breaker is closed, or another worker runs the trial.
    Wait,
    /// Waits at most this long.
    WaitFor(Duration),
    /// Runs the trial and reports its outcome.
    Try,
}

impl CircuitBreaker {
    pub(super) fn new(failures: u32, pause: Duration) -> Self {
        Self { failures, pause, state: Mutex::new(State::Closed { failures: 0 }) }
    }

    /// Whether requests are sent to the node.
    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.state.lock(), State::Closed { .. })
    }

    /// Records an answer of the node. Returns whether it closed the breaker.
    pub(super) fn worked(&self) -> bool {
        let mut state = self.state.lock();
        // An answer to a request from before the breaker opened is no trial.
        if matches!(*state, State::Open { .. }) {
            return false;
        }
        let recovered = matches!(*state, State::Trial);
        *state = State::Closed { failures: 0 };
        recovered
    }

    /// Records a failure of the node. Returns whether it opened the breaker.
    pub(super) fn failed(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        let failures = match *state {
            State::Closed { failures } => failures + 1,
            State::Trial => self.failures,
            State::Open { .. } => return false,
        };
        let tripped = failures >= self.failures;
        *state = if tripped { State::Open { until: now + self.pause } } else { State::Closed { failures } };
        tripped
    }

    /// What an idle worker does. Only one worker gets [`Next::Try`].
    pub(super) fn next(&self, now: Instant) -> Next {
        let mut state = self.state.lock();
        match *state {
            State::Closed { .. } | State::Trial => Next::Wait,
            State::Open { until } if now < until => Next::WaitFor(until - now),
            State::Open { .. } => {
                *state = State::Trial;
                Next::Try
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_closes_after_one_trial() {
        let pause = Duration::from_secs(10);
        let breaker = CircuitBreaker::new(3, pause);
        let start = Instant::now();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        assert!(!breaker.worked(), "it was not open");
        assert!(!breaker.failed(start) && !breaker.failed(start) && breaker.is_closed());
        assert_eq!(breaker.next(start), Next::Wait);
        assert!(breaker.failed(start), "the third in a row");
        assert!(!breaker.is_closed());
        assert!(!breaker.failed(start) && !breaker.worked(), "late answers change nothing");
        assert_eq!(breaker.next(start), Next::WaitFor(pause));

        let later = start + pause;
        assert_eq!(breaker.next(later), Next::Try);
        assert_eq!(breaker.next(later), Next::Wait, "one trial at a time");
        assert!(!breaker.is_closed(), "no request gets through");
        assert!(breaker.failed(later), "one failed trial is enough");
        assert_eq!(breaker.next(later + pause), Next::Try);
        assert!(breaker.worked() && breaker.is_closed());
    }
}
