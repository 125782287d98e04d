//! Background threads.

use std::thread::{Builder, JoinHandle};

use crate::error::{Error, Result, Status};

/// A background thread. Dropping it waits for the thread to end: tell the thread to stop first.
pub(crate) struct Worker {
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Starts a thread. `purpose` completes the error message "no thread to ...".
    pub(crate) fn spawn(name: impl Into<String>, purpose: &str, work: impl FnOnce() + Send + 'static) -> Result<Self> {
        let thread = Builder::new().name(name.into()).spawn(work).map_err(|error| {
            let message = format!("no thread to {purpose}: {error}; raise the limit of threads of this process");
            Error::new(Status::Capacity, message)
        })?;
        Ok(Self { thread: Some(thread) })
    }

    /// Lets the thread run on by itself.
    pub(crate) fn detach(mut self) {
        self.thread = None;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // A thread that drops the last reference to its own owner can not wait for itself.
        if thread.thread().id() != std::thread::current().id() {
            // The panic hook has reported a panic where it happened.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::sync::Mutex;

    #[test]
    fn dropping_a_worker_waits_for_its_end() {
        let (done, gate) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(())));
        let held = gate.lock();
        let (thread_done, thread_gate) = (Arc::clone(&done), Arc::clone(&gate));
        let worker = Worker::spawn("pagoda-test", "test with", move || {
            drop(thread_gate.lock());
            thread_done.store(true, Ordering::Release);
        })
        .unwrap();
        drop(held);
        drop(worker);
        assert!(done.load(Ordering::Acquire));
    }

    #[test]
    fn a_worker_may_drop_itself_and_may_panic() {
        let slot = Arc::new(Mutex::new(None::<Worker>));
        let (own, gate) = (Arc::clone(&slot), Arc::new(Mutex::new(())));
        let (held, wait) = (gate.lock(), Arc::clone(&gate));
        let (ended, end) = std::sync::mpsc::channel();
        let worker = Worker::spawn("pagoda-test", "test with", move || {
            drop(wait.lock());
            drop(own.lock().take());
            ended.send(()).unwrap();
        });
        *slot.lock() = Some(worker.unwrap());
        drop(held);
        end.recv().unwrap();
        drop(Worker::spawn("pagoda-test", "test with", || panic!("on purpose")).unwrap());
    }
}
