//! Who may speak to the driver while a graph is captured.
//!
//! ONNX Runtime captures in the mode in which an allocation, a copy that waits, or the like, on any thread of the process
//! makes the driver give the capture up. So whoever does such things holds on to [`no_capture`] meanwhile, and whoever
//! captures to [`capture`]. A thread that has either may ask for [`no_capture`] again, but waits for no other thread that may
//! ask for it: that one could be behind someone who waits to capture, who waits for the first.

use std::cell::Cell;
use std::marker::PhantomData;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

static CAPTURE: RwLock<()> = RwLock::new(());

thread_local! {
    /// How many holds this thread has.
    static HOLDS: Cell<u32> = const { Cell::new(0) };
}

/// A thread's hold, until it is dropped.
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

/// Keeps others from capturing.
pub fn no_capture() -> Hold {
    // A second lock would wait for someone who waits for the first.
    let first = HOLDS.get() == 0;
    Hold::new(first.then(|| CAPTURE.read()), None)
}

/// Keeps others from what would end a capture. Waits until no one else is at that, so no thread asks for it that has
/// [`no_capture`].
pub fn capture() -> Hold {
    assert_eq!(HOLDS.get(), 0, "this thread keeps itself from capturing");
    Hold::new(None, Some(CAPTURE.write()))
}

/// Whether this thread may wait for others that speak to the driver: it has no hold.
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
