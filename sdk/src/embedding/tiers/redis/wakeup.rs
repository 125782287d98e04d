//! Wakes the thread that refreshes the slot map.

use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

/// A flag that any thread sets and one thread waits for.
#[derive(Default)]
pub(super) struct Wakeup {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    woken: bool,
    closed: bool,
}

impl Wakeup {
    pub(super) fn wake(&self) {
        self.state.lock().woken = true;
        self.changed.notify_all();
    }

    /// Ends every wait.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until the flag is set, at most for the limit, and clears it. Returns false once it is closed.
    pub(super) fn wait(&self, limit: Option<Duration>) -> bool {
        let go_on = self.wait_until(limit, |state| state.woken);
        self.state.lock().woken = false;
        go_on
    }

    /// Sleeps. The flag is not cleared. Returns false once it is closed.
    pub(super) fn sleep(&self, time: Duration) -> bool {
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
    fn a_wakeup_ends_one_wait_and_is_not_lost_while_sleeping() {
        let wakeup = Wakeup::default();
        wakeup.wake();
        assert!(wakeup.wait(None));
        let limit = Duration::from_millis(20);
        let start = Instant::now();
        assert!(wakeup.wait(Some(limit)) && start.elapsed() >= limit, "the flag was cleared");
        wakeup.wake();
        assert!(wakeup.sleep(limit));
        assert!(wakeup.wait(None));
        wakeup.close();
        assert!(!wakeup.wait(None) && !wakeup.sleep(limit));
    }
}
