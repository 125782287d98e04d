//! Ends jobs when their time is over, on a thread of its own.

use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use super::Job;
use super::pending::Pending;
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// Ends jobs whose time is over, of those that no thread waits for.
pub(in super::super) struct Deadlines<J: Job> {
    state: Mutex<Dues<J>>,
    changed: Condvar,
}

struct Dues<J: Job> {
    heap: BinaryHeap<Due<J>>,
    stop: bool,
    /// Whether no more will come.
    last: bool,
    thread: Option<JoinHandle<()>>,
}

struct Due<J: Job> {
    at: Instant,
    pending: Weak<Pending<J>>,
}

impl<J: Job> Default for Deadlines<J> {
    fn default() -> Self {
        Self { state: Mutex::new(Dues::new()), changed: Condvar::new() }
    }
}

impl<J: Job> Deadlines<J> {
    /// Watches a job, if it has a time limit.
    pub(in super::super) fn watch(self: &Arc<Self>, pending: &Arc<Pending<J>>) -> Result<()> {
        let Some(at) = pending.due() else { return Ok(()) };
        let mut state = self.lock();
        if state.thread.is_none() {
            let deadlines = Arc::clone(self);
            let thread = Builder::new().name("pagoda-deadline".into()).spawn(move || deadlines.run());
            let no_thread =
                |error| Error::new(Status::Capacity, format!("no thread to watch time limits with: {error}"));
            state.thread = Some(thread.map_err(no_thread)?);
        }
        let sooner = state.push(Due { at, pending: Arc::downgrade(pending) });
        drop(state);
        if sooner {
            self.changed.notify_one();
        }
        Ok(())
    }

    /// Has the thread end by itself, when no job is left that it watches.
    pub(in super::super) fn let_end(&self) {
        let mut state = self.lock();
        state.last = true;
        state.thread = None;
        drop(state);
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub(in super::super) fn stop(&self) {
        let thread = {
            let mut state = self.lock();
            state.stop = true;
            state.thread.take()
        };
        self.changed.notify_one();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }

    fn run(&self) {
        let mut state = self.lock();
        while !state.stop {
            let Some(first) = state.heap.peek() else {
                if state.last {
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
            let due = state.heap.pop();
            drop(state);
            if let Some(pending) = due.and_then(|due| due.pending.upgrade()) {
                pending.out_of_time();
            }
            state = self.lock();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Dues<J>> {
        self.state.lock()
    }
}

impl<J: Job> Dues<J> {
    fn new() -> Self {
        Self { heap: BinaryHeap::new(), stop: false, last: false, thread: None }
    }

    /// Puts one in, and says whether it is the soonest.
    fn push(&mut self, due: Due<J>) -> bool {
        // Those that were answered in time must not stay until it is over.
        if self.heap.len() == self.heap.capacity() {
            self.heap.retain(|due| due.pending.strong_count() > 0);
        }
        let sooner = self.heap.peek().is_none_or(|first| due.at < first.at);
        self.heap.push(due);
        sooner
    }
}

/// The soonest is the largest.
impl<J: Job> Ord for Due<J> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        other.at.cmp(&self.at)
    }
}

impl<J: Job> PartialOrd for Due<J> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<J: Job> PartialEq for Due<J> {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl<J: Job> Eq for Due<J> {}

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
    fn requests_that_were_answered_in_time_leave_the_clock() {
        let (mut dues, now) = (Dues::<Nothing>::new(), Instant::now());
        for second in 0..10_000 {
            dues.push(Due { at: now + Duration::from_secs(3600 + second), pending: Weak::new() });
        }
        assert!(dues.heap.len() < 100 && dues.heap.capacity() < 100, "{} are left", dues.heap.len());
        assert!(dues.push(Due { at: now, pending: Weak::new() }));
        assert!(!dues.push(Due { at: now + Duration::from_secs(1), pending: Weak::new() }));
    }
}
