//! SIGINT, which Ctrl-C sends: it ends an answer, and not the process. SIGTERM, where something has to be cleaned up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use pagoda::{Error, Result, Status};
use parking_lot::Mutex;

/// The exit code of a command that was interrupted, as shells have it: 128 and the number of the signal.
pub const INTERRUPTED: u8 = 130;

type Reaction = Box<dyn FnMut() + Send>;

/// What happens at an interrupt. The process ends, until [`Interrupts::set`] says otherwise.
#[derive(Clone)]
pub struct Interrupts {
    reaction: Arc<Mutex<Reaction>>,
    code: Arc<AtomicU8>,
}

impl Interrupts {
    /// Begins to receive SIGINT. To be called before other threads start: they take over what is blocked. A process
    /// whose parent ignores interrupts, as `nohup` does, goes on to ignore them.
    pub fn receive() -> Result<Self> {
        Self::receive_these(&[libc::SIGINT])
    }

    /// Begins to receive SIGINT and SIGTERM, as [`receive`](Self::receive) does.
    pub fn receive_with_termination() -> Result<Self> {
        Self::receive_these(&[libc::SIGINT, libc::SIGTERM])
    }

    fn receive_these(signals: &[libc::c_int]) -> Result<Self> {
        let (reaction, code): (Reaction, _) = (Box::new(|| end()), AtomicU8::new(INTERRUPTED));
        let interrupts = Self { reaction: Arc::new(Mutex::new(reaction)), code: Arc::new(code) };
        // SAFETY: the structs are plain numbers, for which zeros are valid; each function gets pointers to structs that
        // live as long as the call.
        let set = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for &signal in signals {
                let mut old: libc::sigaction = std::mem::zeroed();
                libc::sigaction(signal, std::ptr::null(), &mut old);
                if old.sa_sigaction != libc::SIG_IGN {
                    libc::sigaddset(&mut set, signal);
                }
            }
            // Blocked, they wait for `sigwait`: a thread may do more than a signal handler may.
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            set
        };
        let (reaction, code) = (Arc::clone(&interrupts.reaction), Arc::clone(&interrupts.code));
        let wait = move || {
            loop {
                let mut signal = 0;
                // SAFETY: both are this thread's own.
                if unsafe { libc::sigwait(&set, &mut signal) } == 0 {
                    code.store(128 + signal as u8, Ordering::Relaxed);
                    reaction.lock()();
                }
            }
        };
        let thread = std::thread::Builder::new().name("pagoda-signals".into()).spawn(wait);
        thread
            .map_err(|error| Error::new(Status::Internal, format!("no thread for signals can be started: {error}")))?;
        Ok(interrupts)
    }

    /// What the next interrupts do. It runs on a thread of its own, and must not call this.
    pub fn set(&self, reaction: impl FnMut() + Send + 'static) {
        *self.reaction.lock() = Box::new(reaction);
    }

    /// The exit code of a command that the last signal ended.
    pub fn code(&self) -> u8 {
        self.code.load(Ordering::Relaxed)
    }
}

/// Ends the process at once, as an interrupt does that nothing receives.
pub fn end() -> ! {
    // SAFETY: it does not return. Unlike `exit` it runs no destructors of libraries, whose threads may be at work.
    unsafe { libc::_exit(INTERRUPTED.into()) }
}
