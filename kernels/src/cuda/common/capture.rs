//! The lock between the capture of CUDA graphs and the driver calls that would invalidate a capture.
//!
//! ONNX Runtime captures in global mode: an allocation, a synchronous copy or the like on any thread of the process
//! invalidates the capture. So a thread holds [`no_capture`] during such calls, and [`capture`] during a capture: a
//! reader-writer lock. A thread that holds either may take [`no_capture`] again. It must not wait for another thread
//! that may take [`no_capture`]: that thread could be queued behind one that waits to capture, which waits for the
//! first. [`may_wait`] says whether waiting is safe.

use std::cell::Cell;
use std::marker::PhantomData;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

static CAPTURE: RwLock<()> = RwLock::new(());

thread_local! {
    /// How many holds this thread has.
    static HOLDS: Cell<u32> = const { Cell::new(0) };
}

/// A thread's hold on the lock, until it is dropped.
#[must_use = "it ends when this is dropped"]
pub struct Hold {
    _shared: Option<RwLockReadGuard<'static, ()>>,
    _alone: Option<RwLockWriteGuard<'static, ()>>,
    /// Counted for the thread that it was made on.
    _thread: PhantomData<*const ()>,
}

impl Hold {
    fn new(shared: Option<RwLockReadGuard<'static, ()>>, alone: Option<RwLockWriteGuard<'static, ()>>) -> Self {
        HOLDS.set(HOLDS.get() + 1);
        Self { _shared: shared, _alone: alone, _thread: PhantomData }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        HOLDS.set(HOLDS.get() - 1);
    }
}

/// Prevents captures on other threads. Reentrant.
pub fn no_capture() -> Hold {
    // A second read lock could be queued behind a writer that waits for the first.
    let first = HOLDS.get() == 0;
    Hold::new(first.then(|| CAPTURE.read()), None)
}

/// Prevents driver calls that would invalidate a capture. Waits until no other thread is in one, so a thread that holds
/// [`no_capture`] must not call it.
///
/// # Panics
/// If this thread holds the lock already.
pub fn capture() -> Hold {
    assert_eq!(HOLDS.get(), 0, "this thread keeps itself from capturing");
    Hold::new(None, Some(CAPTURE.write()))
}

/// Whether this thread may wait for other threads that call the driver: it does not hold the lock.
pub fn may_wait() -> bool {
    HOLDS.get() == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let alone = capture();
        drop((no_capture(), no_capture()));
        drop(alone);
        assert!(may_wait());
        let first = no_capture();
        assert!(!may_wait());
        std::thread::scope(|scope| {
            let capturing = scope.spawn(|| drop(capture()));
            while CAPTURE.try_read().is_some() {
                std::thread::yield_now();
            }
            drop(no_capture());
            drop(first);
            capturing.join().unwrap();
        });
        assert!(may_wait());
    }
}
