//! The threads that asynchronous runs run on.

use std::collections::VecDeque;

use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::{Condvar, Mutex};

/// Runs that wait; more are refused, so that a caller who is faster than the model hears of it.
const QUEUE_LIMIT: usize = 65_536;

/// One thing to do.
pub(super) type Job = Box<dyn FnOnce() + Send>;

struct Executor {
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

static EXECUTOR: Executor =
    Executor { state: Mutex::new(State { queue: VecDeque::new(), threads: 0, idle: 0 }), work: Condvar::new() };

/// Has `job` run on a thread of the executor, in order of arrival.
pub(super) fn submit(job: Job) -> Result<()> {
    let mut state = EXECUTOR.state.lock();
    if state.queue.len() >= QUEUE_LIMIT {
        return Err(Error::new(
            Status::Capacity,
            format!("{QUEUE_LIMIT} asynchronous runs are waiting already: wait for some to complete"),
        ));
    }
    // Threads are started as they are needed and stay: at most one for each core, and never fewer than two, so that
    // one long run does not hold up every other.
    let limit = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let mut fewer = None;
    if state.idle <= state.queue.len() && state.threads < limit {
        let name = format!("pagoda-run-{}", state.threads);
        match std::thread::Builder::new().name(name).spawn(work) {
            Ok(_) => state.threads += 1,
            Err(error) if state.threads == 0 => {
                return Err(Error::new(Status::Capacity, format!("no thread for asynchronous runs: {error}")));
            }
            Err(error) => fewer = Some((state.threads, error)),
        }
    }
    state.queue.push_back(job);
    metrics::async_queue().set(state.queue.len() as i64);
    drop(state);
    EXECUTOR.work.notify_one();
    // The log is told without the lock: its callback may start a run.
    if let Some((threads, error)) = fewer {
        log::warn!("asynchronous runs go on with {threads} threads: {error}");
    }
    Ok(())
}

fn work() {
    let mut state = EXECUTOR.state.lock();
    loop {
        while let Some(job) = state.queue.pop_front() {
            metrics::async_queue().set(state.queue.len() as i64);
            drop(state);
            // The job reports its own panics; a second line of defence keeps the thread alive.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            state = EXECUTOR.state.lock();
        }
        state.idle += 1;
        EXECUTOR.work.wait(&mut state);
        state.idle -= 1;
    }
}
