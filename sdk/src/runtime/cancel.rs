//! Cancelling runs from another thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, Weak};

use ort_sys::OrtRunOptions;

use super::api::Api;
use super::run_options::{NO_GRAPH, RunOptions};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;

/// Cancels the runs that it is passed to. One may serve any number of runs; once triggered it stays triggered.
#[derive(Default)]
pub struct Cancel {
    triggered: AtomicBool,
    options: OnceLock<RunOptions>,
    watchers: Mutex<Vec<Weak<dyn Watcher>>>,
}

/// Notified at once when a run is cancelled, also one that has not begun.
pub(crate) trait Watcher: Send + Sync {
    /// Called once, when it is triggered.
    fn cancelled(&self);
}

impl Cancel {
    /// One that is not triggered.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops the runs that use it, now and later: they fail with [`Status::Cancelled`], each between two nodes of its
    /// graph.
    pub fn trigger(&self) {
        self.triggered.store(true, Ordering::SeqCst);
        if let Some(options) = self.options.get() {
            options.terminate();
        }
        let watchers = std::mem::take(&mut *self.watchers.lock());
        for watcher in watchers.iter().filter_map(Weak::upgrade) {
            watcher.cancelled();
        }
    }

    /// Notifies `watcher` when it is triggered, or now if it was.
    pub(crate) fn watch(&self, watcher: Weak<dyn Watcher>) {
        let mut watchers = self.watchers.lock();
        // `trigger` sets the flag before it takes the list of watchers, so it notifies those that are in the list.
        if self.is_triggered() {
            drop(watchers);
            if let Some(watcher) = watcher.upgrade() {
                watcher.cancelled();
            }
            return;
        }
        // A long-lived `Cancel` must not keep a watcher of every request that it served.
        if watchers.len() == watchers.capacity() {
            watchers.retain(|watcher| watcher.strong_count() > 0);
        }
        watchers.push(watcher);
    }

    /// Whether it was triggered.
    pub fn is_triggered(&self) -> bool {
        self.triggered.load(Ordering::SeqCst)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.is_triggered() { Err(cancelled()) } else { Ok(()) }
    }

    /// The run options whose terminate flag stops the run in ONNX Runtime.
    pub(super) fn options(&self, api: &'static Api) -> Result<*mut OrtRunOptions> {
        if self.options.get().is_none() {
            // Two runs may race to here. The first one's options are kept, the other's released.
            let _ = self.options.set(RunOptions::new(api, NO_GRAPH)?);
        }
        let options = self.options.get().expect("set above");
        // `trigger` may have looked for the options just before they were set.
        if self.is_triggered() {
            options.terminate();
        }
        Ok(options.raw())
    }
}

pub(crate) fn cancelled() -> Error {
    Error::new(Status::Cancelled, "the run was cancelled by the caller")
}
