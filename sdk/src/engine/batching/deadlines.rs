//! Ends jobs at their deadlines, on a thread of its own.

use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::Job;
use super::pending::Pending;
use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard, Worker};

/// The deadlines of jobs with a callback. A blocking caller watches its deadline itself ([`Pending::wait`]).
pub(in super::super) struct Deadlines<J: Job> {
    state: Mutex<State<J>>,
    changed: Condvar,
}

struct State<J: Job> {
    heap: BinaryHeap<Deadline<J>>,
    stop: bool,
    /// Whether the thread ends when the heap is empty.
    closing: bool,
    thread: Option<Worker>,
}

struct Deadline<J: Job> {
    at: Instant,
    pending: Weak<Pending<J>>,
}

impl<J: Job> Default for Deadlines<J> {
    fn default() -> Self {
        Self { state: Mutex::new(State::new()), changed: Condvar::new() }
    }
}

impl<J: Job> Deadlines<J> {
    /// Watches a job that has a time limit. The first one starts the thread.
    pub(in super::super) fn watch(self: &Arc<Self>, pending: &Arc<Pending<J>>) -> Result<()> {
        let Some(at) = pending.deadline() else { return Ok(()) };
        let mut state = self.lock();
        if state.thread.is_none() {
            let deadlines = Arc::clone(self);
            let thread = Worker::spawn("pagoda-deadline", "watch time limits with", move || deadlines.run())?;
            state.thread = Some(thread);
        }
        let earliest = state.push(Deadline { at, pending: Arc::downgrade(pending) });
        drop(state);
        if earliest {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Lets the thread end by itself after the last deadline.
    pub(in super::super) fn end_when_empty(&self) {
        let mut state = self.lock();
        state.closing = true;
        if let Some(thread) = state.thread.take() {
            thread.detach();
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Stops the thread and waits for its end.
    pub(in super::super) fn stop(&self) {
        let thread = {
            let mut state = self.lock();
            state.stop = true;
            state.thread.take()
        };
        self.changed.notify_one();
        drop(thread);
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.stop {
            let Some(first) = state.heap.peek() else {
                if state.closing {
                    return;
                }
                self.changed.wait(&mut state);
                continue;
            };
            let left = first.at.saturating_duration_since(Instant::now());
            if !left.is_zero() && first.pending.strong_count() > 0 {
                self.changed.wait_for(&mut state, left);
                continue;
            }
            let deadline = state.heap.pop();
            drop(state);
            if let Some(pending) = deadline.and_then(|deadline| deadline.pending.upgrade()) {
                pending.expire();
            }
            state = self.lock();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock()
    }
}

impl<J: Job> State<J> {
    fn new() -> Self {
        Self { heap: BinaryHeap::new(), stop: false, closing: false, thread: None }
    }

    /// Adds a deadline. Returns whether it is the earliest.
    fn push(&mut self, deadline: Deadline<J>) -> bool {
        // Jobs that ended in time must not stay here until their deadlines.
        if self.heap.len() == self.heap.capacity() {
            self.heap.retain(|deadline| deadline.pending.strong_count() > 0);
        }
        let earliest = self.heap.peek().is_none_or(|first| deadline.at < first.at);
        self.heap.push(deadline);
        earliest
    }
}

/// The earliest is the greatest: `BinaryHeap` is a max-heap.
impl<J: Job> Ord for Deadline<J> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.at.cmp(&self.at)
    }
}

impl<J: Job> PartialOrd for Deadline<J> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<J: Job> PartialEq for Deadline<J> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl<J: Job> Eq for Deadline<J> {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Nothing;

    impl Job for Nothing {
        type Key = u64;
        type Response = ();

        fn key(&self) -> u64 {
            0
        }
    }

    #[test]
    fn requests_that_ended_in_time_leave_the_heap() {
        let (mut state, now) = (State::<Nothing>::new(), Instant::now());
        for second in 0..10_000 {
            state.push(Deadline { at: now + Duration::from_secs(3600 + second), pending: Weak::new() });
        }
        assert!(state.heap.len() < 100 && state.heap.capacity() < 100, "{} are left", state.heap.len());
        assert!(state.push(Deadline { at: now, pending: Weak::new() }));
        assert!(!state.push(Deadline { at: now + Duration::from_secs(1), pending: Weak::new() }));
    }
}
