//! Threads that are expected to block.

use std::fs;
use std::sync::mpsc::channel;
use std::thread::{Scope, ScopedJoinHandle, sleep};
use std::time::Duration;

/// How often in a row a thread has to be asleep before it counts as blocked.
const SAMPLES: u32 = 5;

/// Starts a thread, and returns when it has finished or is blocked: asleep in the kernel, as Linux reports it.
///
/// # Panics
/// If the state of the thread can not be read.
pub fn spawn_until_blocked<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> ScopedJoinHandle<'scope, T> {
    let (started, own) = channel();
    let thread = scope.spawn(move || {
        started.send(fs::read_link("/proc/thread-self").expect("the thread has an entry in /proc")).unwrap();
        work()
    });
    let stat = std::path::Path::new("/proc").join(own.recv().unwrap()).join("stat");
    let mut asleep = 0;
    while asleep < SAMPLES && !thread.is_finished() {
        // A thread that has just ended has no file any more.
        let text = fs::read_to_string(&stat).unwrap_or_default();
        // The state follows the name, which is in parentheses.
        let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
        asleep = if state == Some('S') { asleep + 1 } else { 0 };
        sleep(Duration::from_millis(1));
    }
    thread
}
