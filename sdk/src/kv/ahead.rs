//! Storing the users who are to leave next before they leave, so that whoever needs their pages does not wait for a copy.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::Inner;
use crate::error::{Error, Result, Status};
use crate::store::Room;
use crate::sync::{Condvar, Mutex};

/// How long to leave a store alone that could not take something.
const PAUSE: Duration = Duration::from_secs(1);

/// Through which the thread hears that there may be something to do.
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

/// The thread that does it.
pub(super) struct Ahead {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

impl Ahead {
    pub(super) fn start(inner: &Arc<Inner>) -> Result<Self> {
        let own = Arc::clone(inner);
        let spawned = Builder::new().name("pagoda-ahead".into()).spawn(move || own.store_ahead());
        let thread =
            spawned.map_err(|error| Error::new(Status::Capacity, format!("no thread to store ahead with: {error}")))?;
        Ok(Self { inner: Arc::clone(inner), thread: Some(thread) })
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.inner.signal.set(|state| state.stop = true);
        if let Some(thread) = self.thread.take() {
            // A panic has been reported where it happened.
            let _ = thread.join();
        }
    }
}

impl Inner {
    /// Has the thread look, if there is something for it to do.
    pub(super) fn wake_ahead(&self) {
        if self.table.wants_saving() {
            self.signal.set(|state| state.wanted = true);
        }
    }

    fn store_ahead(&self) {
        while self.signal.wait() {
            while !self.signal.stopped() && self.table.wants_saving() {
                let Some(user) = self.table.least_recent_unsaved() else { break };
                if let Err(error) = self.save_copying(user, Room::Wait) {
                    // Nothing is lost yet: it is tried again, at the latest when the user leaves.
                    log::debug!("user {user} could not be stored ahead: {error}");
                    self.signal.pause();
                }
            }
        }
    }
}
