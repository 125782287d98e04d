//! How the threads of the nodes wake the one that knows the way.

use crate::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Something that can be rung, and waited for by one thread.
#[derive(Default)]
pub(super) struct Bell {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    rung: bool,
    closed: bool,
}

impl Bell {
    pub(super) fn ring(&self) {
        self.state.lock().rung = true;
        self.changed.notify_all();
    }

    /// Ends every wait.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits for a ring that nobody has waited for yet, no longer than the limit. Says whether to go on: no once it is
    /// closed.
    pub(super) fn wait(&self, limit: Option<Duration>) -> bool {
        let go_on = self.wait_until(limit, |state| state.rung);
        self.state.lock().rung = false;
        go_on
    }

    /// Lets time pass. A ring meanwhile is kept for later.
    pub(super) fn rest(&self, time: Duration) -> bool {
        self.wait_until(Some(time), |_| false)
    }

    fn wait_until(&self, limit: Option<Duration>, is_enough: impl Fn(&State) -> bool) -> bool {
        let end = limit.map(|limit| Instant::now() + limit);
        let mut state = self.state.lock();
        loop {
            let rest = end.map(|end| end.saturating_duration_since(Instant::now()));
            if state.closed || is_enough(&state) || rest.is_some_and(|rest| rest.is_zero()) {
                return !state.closed;
            }
            match rest {
                None => self.changed.wait(&mut state),
                Some(rest) => drop(self.changed.wait_for(&mut state, rest)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_heard_once_and_not_lost_while_resting() {
        let bell = Bell::default();
        bell.ring();
        assert!(bell.wait(None));
        let limit = Duration::from_millis(20);
        let start = Instant::now();
        assert!(bell.wait(Some(limit)) && start.elapsed() >= limit, "the ring was heard already");
        bell.ring();
        assert!(bell.rest(limit));
        assert!(bell.wait(None));
        bell.close();
        assert!(!bell.wait(None) && !bell.rest(limit));
    }
}
