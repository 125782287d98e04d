//! The circuit breaker of one node: whether it is asked at all.

use crate::sync::Mutex;
use std::time::{Duration, Instant};

/// After some failures in a row the node is left alone for a while, so that lookups do not wait for it. Then one trial
/// decides whether it is asked again; no lookup has to be that trial.
pub(super) struct Breaker {
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

/// What a thread of the node does about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing: the node is asked, or another thread tries.
    Wait,
    /// Nothing for so long.
    WaitFor(Duration),
    /// Try, and say how it went.
    Try,
}

impl Breaker {
    pub(super) fn new(failures: u32, pause: Duration) -> Self {
        Self { failures, pause, state: Mutex::new(State::Closed { failures: 0 }) }
    }

    /// Whether the node is asked.
    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.state.lock(), State::Closed { .. })
    }

    /// The node answered. Says whether it was left alone until now.
    pub(super) fn worked(&self) -> bool {
        let mut state = self.state.lock();
        // Something sent before the breaker opened is no trial.
        if matches!(*state, State::Open { .. }) {
            return false;
        }
        let recovered = matches!(*state, State::Trial);
        *state = State::Closed { failures: 0 };
        recovered
    }

    /// The node did not answer, or not as it should. Says whether it is left alone from now on.
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

    /// What a thread that has nothing else to do does. Only one is told to try.
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
        let breaker = Breaker::new(3, pause);
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
        assert!(!breaker.is_closed(), "nobody else gets through");
        assert!(breaker.failed(later), "one failed trial is enough");
        assert_eq!(breaker.next(later + pause), Next::Try);
        assert!(breaker.worked() && breaker.is_closed());
    }
}
