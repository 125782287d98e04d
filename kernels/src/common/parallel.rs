//! How a kernel spreads its tasks over threads.
//!
//! A kernel does not own threads: inside ONNX Runtime it runs on that runtime's pool. It says how many independent
//! tasks there are and leaves the rest to a [`Parallel`]. No result depends on which thread runs which task.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

/// Something that runs tasks, perhaps on several threads.
pub trait Parallel: Sync {
    /// Calls `task(i)` once for each `i` below `tasks`, in any order and on any thread, and returns when all have
    /// returned. Kernels stay sound where an implementation calls one twice or forgets one.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// Runs every task on the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}

/// Runs each task exactly once, whatever `parallel` does: tasks write through raw pointers to places of their own, so
/// a task run twice at the same time would be a data race, which no safe implementation of [`Parallel`] may cause.
pub(crate) fn run_once(parallel: &dyn Parallel, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    if tasks <= 1 {
        return (0..tasks).for_each(task);
    }
    let taken: Vec<AtomicBool> = (0..tasks).map(|_| AtomicBool::new(false)).collect();
    let take = |i: usize| {
        if !taken[i].swap(true, Ordering::Relaxed) {
            task(i);
        }
    };
    parallel.run(tasks, &take);
    (0..tasks).for_each(take);
}

/// A pool of threads of our own, for tests and benchmarks.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a `run`: the pool carries one job at a time.
    running: Mutex<()>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    next: AtomicUsize,
}

#[derive(Debug, Default)]
struct State {
    job: Option<Job>,
    /// Counts jobs, so that a worker knows whether it has seen the one that is there.
    number: u64,
    busy: usize,
    stop: bool,
    panic: Option<Box<dyn Any + Send>>,
}

#[derive(Clone, Copy)]
struct Job {
    task: &'static (dyn Fn(usize) + Sync),
    tasks: usize,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job of {} tasks", self.tasks)
    }
}

impl Threads {
    /// A pool in which `threads` threads work, the caller of `run` being one of them.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared::default());
        let workers = (1..threads)
            .map(|_| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || shared.work())
            })
            .collect();
        Threads { shared, workers, running: Mutex::new(()) }
    }
}

impl Parallel for Threads {
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let _running = self.running.lock();
        // SAFETY: the lifetime is only forgotten, not outlived: this function does not return or unwind before `busy`
        // is 0 again and the job is gone, and no worker touches a job after it has counted itself out of `busy`.
        let task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task) };
        let job = Job { task, tasks };
        self.shared.next.store(0, Ordering::Relaxed);
        {
            let mut state = self.shared.state.lock();
            state.job = Some(job);
            state.number += 1;
            state.busy = self.workers.len();
            self.shared.changed.notify_all();
        }
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.drain(job)));
        let mut state = self.shared.state.lock();
        while state.busy > 0 {
            self.shared.changed.wait(&mut state);
        }
        state.job = None;
        let theirs = state.panic.take();
        drop(state);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks; there is nothing to learn here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        loop {
            let mut state = self.state.lock();
            let job = loop {
                if state.stop {
                    return;
                }
                match state.job {
                    Some(job) if state.number != seen => break job,
                    _ => self.changed.wait(&mut state),
                }
            };
            seen = state.number;
            drop(state);
            let result = catch_unwind(AssertUnwindSafe(|| self.drain(job)));
            let mut state = self.state.lock();
            if let Err(panic) = result {
                state.panic = Some(panic);
            }
            state.busy -= 1;
            if state.busy == 0 {
                self.changed.notify_all();
            }
        }
    }

    fn drain(&self, job: Job) {
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= job.tasks {
                return;
            }
            (job.task)(i);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(parallel: &dyn Parallel, tasks: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        run_once(parallel, tasks, &|i| {
            counts[i].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Threads::new(threads);
            for tasks in [0, 1, 2, 7, 100] {
                assert_eq!(counts(&pool, tasks), vec![1; tasks]);
            }
        }
        assert_eq!(counts(&Serial, 7), vec![1; 7]);
    }

    #[test]
    fn a_careless_runner_does_no_harm() {
        struct Careless;
        impl Parallel for Careless {
            fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
                (1..tasks).chain(1..tasks).for_each(task);
            }
        }
        assert_eq!(counts(&Careless, 7), vec![1; 7]);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Threads::new(3);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|i| assert!(i != 11, "task eleven"));
        }));
        assert!(caught.is_err());
        assert_eq!(counts(&pool, 9), vec![1; 9]);
    }
}
