//! The end of a server: requests that run may end, up to a deadline.

use std::sync::Arc;
use std::time::Duration;

use pagoda::{Error, Result, Status};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::state::State;

/// How long requests that were cut have to send their last event.
const LAST_EVENTS: Duration = Duration::from_secs(5);
/// The exit code of a process that a second signal ended, as shells have it for SIGTERM.
const TERMINATED: i32 = 143;

/// The signals that end a server: SIGTERM, and SIGINT, which Ctrl-C sends.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Begins to receive them.
    pub fn receive() -> Result<Self> {
        let fail = |error| Error::new(Status::Internal, format!("signals can not be received: {error}"));
        Ok(Self {
            terminate: signal(SignalKind::terminate()).map_err(fail)?,
            interrupt: signal(SignalKind::interrupt()).map_err(fail)?,
        })
    }

    /// Waits for one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Takes no new requests, waits for those that run, and cuts them at the deadline. A second signal ends the process at once.
pub async fn drain(state: &Arc<State>, mut signals: Signals) {
    state.set_ending();
    let deadline = state.limits.drain_timeout;
    log::info!("ending: no new requests; those that run have {} s", deadline.as_secs_f64());
    tokio::spawn(async move {
        signals.next().await;
        log::warn!("ended at once by a second signal");
        // SAFETY: it does not return. Unlike `exit` it runs no destructors of libraries, whose threads are at work.
        unsafe { libc::_exit(TERMINATED) };
    });
    let all = || state.slots.acquire_many(state.limits.requests);
    if tokio::time::timeout(deadline, all()).await.is_err() {
        log::warn!("{} requests are cut", state.limits.requests as usize - state.slots.available_permits());
        state.running.cancel_all();
        let _ = tokio::time::timeout(LAST_EVENTS, all()).await;
    }
    second_signal_ends();
}

/// From now on a signal ends the process without the runtime, which does not live as long as the models: those write what they keep when
/// they are closed, and that may take long.
fn second_signal_ends() {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: see above. A handler of signals may call it.
        unsafe { libc::_exit(TERMINATED) };
    }
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler calls nothing but what a handler may.
        unsafe { libc::signal(signal, end as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}
