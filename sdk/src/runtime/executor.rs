//! The worker threads of asynchronous runs.

use std::collections::VecDeque;

use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::{Condvar, Mutex, Worker};

/// The most runs that may wait. Beyond it a run is rejected: the caller is faster than the model.
const QUEUE_LIMIT: usize = 65_536;

/// One asynchronous run.
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

/// Queues `job` for the worker threads, first in, first out.
pub(super) fn submit(job: Job) -> Result<()> {
    let mut state = EXECUTOR.state.lock();
    if state.queue.len() >= QUEUE_LIMIT {
        return Err(Error::new(
            Status::Capacity,
            format!("{QUEUE_LIMIT} asynchronous runs are waiting already: wait for some to complete"),
        ));
    }
    // Workers are started on demand and never end: at most one per core, but at least two, so that one long run does
    // not block all others.
    let limit = std::thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let mut spawn_error = None;
    if state.idle <= state.queue.len() && state.threads < limit {
        let name = format!("pagoda-run-{}", state.threads);
        match Worker::spawn(name, "run models asynchronously", work) {
            Ok(worker) => {
                worker.detach();
                state.threads += 1;
            }
            Err(error) if state.threads == 0 => return Err(error),
            Err(error) => spawn_error = Some((state.threads, error)),
        }
    }
    state.queue.push_back(job);
    metrics::async_queue().set(state.queue.len() as i64);
    drop(state);
    EXECUTOR.work.notify_one();
    // Logged without the lock: the log callback may start a run.
    if let Some((threads, error)) = spawn_error {
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
            // A job reports its own panics. This keeps the worker alive if one does not.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            state = EXECUTOR.state.lock();
        }
        state.idle += 1;
        EXECUTOR.work.wait(&mut state);
        state.idle -= 1;
    }
}
