//! Stores the owners that are evicted next ahead of their eviction, so that a request that needs their pages does not wait
//! for a copy.

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use super::offload::Copying;
use crate::error::Result;
use crate::store::Room;
use crate::sync::{Condvar, Mutex, Worker};

/// How long the thread pauses after the store has refused a write.
const PAUSE: Duration = Duration::from_secs(1);

/// Wakes the thread.
#[derive(Default)]
pub(super) struct Signal {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    wanted: bool,
    stop: bool,
}

impl Signal {
    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    fn stopped(&self) -> bool {
        self.state.lock().stop
    }

    /// Waits until something is wanted, which is false if it is to stop.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while(&mut state, |state| !state.wanted && !state.stop);
        state.wanted = false;
        !state.stop
    }

    fn pause(&self) {
        let mut state = self.state.lock();
        let _ = self.changed.wait_while_for(&mut state, |state| !state.stop, PAUSE);
    }
}

/// The thread that stores ahead.
pub(super) struct Ahead {
    inner: Arc<Inner>,
    /// Joined after `drop` has told it to stop.
    _worker: Worker,
}

impl Ahead {
    pub(super) fn start(inner: &Arc<Inner>) -> Result<Self> {
        let own = Arc::clone(inner);
        let worker = Worker::spawn("pagoda-ahead", "store ahead with", move || own.store_ahead())?;
        Ok(Self { inner: Arc::clone(inner), _worker: worker })
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.inner.signal.set(|state| state.stop = true);
    }
}

impl Inner {
    /// Wakes the thread if owners should be stored.
    pub(super) fn wake_ahead(&self) {
        if self.table.wants_saving() {
            self.signal.set(|state| state.wanted = true);
        }
    }

    fn store_ahead(&self) {
        while self.signal.wait() {
            while !self.signal.stopped() && self.table.wants_saving() {
                let Some(owner) = self.table.next_unsaved() else { break };
                if let Err(error) = self.save_copying(Copying { inner: self, owner }, Room::Wait) {
                    // Nothing is lost yet: it is tried again, at the latest at eviction.
                    log::debug!("owner {owner} could not be stored ahead: {error}");
                    self.signal.pause();
                }
            }
        }
    }
}
