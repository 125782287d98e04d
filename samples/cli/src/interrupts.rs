//! SIGINT, which Ctrl-C sends: it ends an answer, and not the process.

use std::sync::Arc;

use pagoda::{Error, Result, Status};
use parking_lot::Mutex;

/// The exit code of a command that was interrupted, as shells have it: 128 and the number of the signal.
pub const INTERRUPTED: u8 = 130;

type Reaction = Box<dyn FnMut() + Send>;

/// What happens at an interrupt. The process ends, until [`Interrupts::set`] says otherwise.
#[derive(Clone)]
pub struct Interrupts {
    reaction: Arc<Mutex<Reaction>>,
}

impl Interrupts {
    /// Begins to receive interrupts. To be called before other threads start: they take over what is blocked. A process
    /// whose parent ignores interrupts, as `nohup` does, goes on to ignore them.
    pub fn receive() -> Result<Self> {
        let interrupts = Self { reaction: Arc::new(Mutex::new(Box::new(|| end()))) };
        // SAFETY: the structs are plain numbers, for which zeros are valid; each function gets pointers to structs that
        // live as long as the call.
        let set = unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            libc::sigaction(libc::SIGINT, std::ptr::null(), &mut old);
            if old.sa_sigaction == libc::SIG_IGN {
                return Ok(interrupts);
            }
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            libc::sigaddset(&mut set, libc::SIGINT);
            // Blocked, they wait for `sigwait`: a thread may do more than a signal handler may.
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            set
        };
        let reaction = Arc::clone(&interrupts.reaction);
        let wait = move || {
            loop {
                let mut signal = 0;
                // SAFETY: both are this thread's own.
                if unsafe { libc::sigwait(&set, &mut signal) } == 0 {
                    reaction.lock()();
                }
            }
        };
        let thread = std::thread::Builder::new().name("pagoda-sigint".into()).spawn(wait);
        thread
            .map_err(|error| Error::new(Status::Internal, format!("no thread for signals can be started: {error}")))?;
        Ok(interrupts)
    }

    /// What the next interrupts do. It runs on a thread of its own, and must not call this.
    pub fn set(&self, reaction: impl FnMut() + Send + 'static) {
        *self.reaction.lock() = Box::new(reaction);
    }
}

/// Ends the process at once, as an interrupt does that nothing receives.
pub fn end() -> ! {
    // SAFETY: it does not return. Unlike `exit` it runs no destructors of libraries, whose threads may be at work.
    unsafe { libc::_exit(INTERRUPTED.into()) }
}
