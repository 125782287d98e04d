//! What a pool's readers wait for: tokens that are on their way into it from the host.
//!
//! Whoever brings tokens into a pool does so on a stream of its own and marks its end with an event. Operators find the
//! event by the pool's address, so that graphs say nothing of it, and a layer waits for its own tokens alone.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use cudarc::driver::sys::{CUdeviceptr, CUstream};

use super::error::CudaError;
use super::gpu::Gpu;
use super::memory::{Event, SideStream};

thread_local! {
    /// Whether operators have to wait.
    static EXPECTED: Cell<bool> = const { Cell::new(true) };
}

static EVENTS: RwLock<Option<HashMap<CUdeviceptr, Arc<Event>>>> = RwLock::new(None);

/// The mark behind the tokens that were last brought into a pool; known to the operators as long as it lives.
#[derive(Debug)]
pub struct Arrivals {
    pool: CUdeviceptr,
    event: Arc<Event>,
}

impl Arrivals {
    /// For the pool that begins there.
    pub fn new(gpu: &'static Gpu, pool: CUdeviceptr) -> Result<Self, CudaError> {
        let event = Arc::new(Event::new(gpu)?);
        let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
        events.get_or_insert_default().insert(pool, Arc::clone(&event));
        Ok(Self { pool, event })
    }

    /// Marks what is on the stream. Everything that was marked before must be on the same stream, or done.
    pub fn mark(&self, stream: &SideStream) -> Result<(), CudaError> {
        self.event.record(stream)
    }
}

impl Drop for Arrivals {
    fn drop(&mut self) {
        let mut events = EVENTS.write().unwrap_or_else(PoisonError::into_inner);
        events.get_or_insert_default().remove(&self.pool);
    }
}

/// Does something on this thread. Where no arrivals are expected, nothing that its operators read is on its way: they do not wait
/// for it, and one that can begin while the kernel in front of it ends does so. A graph that is captured then is for such times
/// alone.
pub fn with_arrivals<R>(expected: bool, work: impl FnOnce() -> R) -> R {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            EXPECTED.set(self.0);
        }
    }
    let _before = Before(EXPECTED.replace(expected));
    work()
}

/// Has a stream wait for what is on its way into a pool, if anything can be.
///
/// # Safety
/// The stream is one of the pool's device, and the pool lives until the stream has gone past this, or, where a graph is
/// captured, until that is gone.
pub unsafe fn hold_for_arrivals(pool: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
    if !EXPECTED.get() {
        return Ok(());
    }
    let events = EVENTS.read().unwrap_or_else(PoisonError::into_inner);
    match events.as_ref().and_then(|events| events.get(&pool)) {
        // SAFETY: the caller's; the event lives as long as the pool's owner does.
        Some(event) => unsafe { event.hold(stream) },
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_wait_unless_nothing_is_expected() {
        let waits = || EXPECTED.get();
        assert!(waits() && !with_arrivals(false, waits) && with_arrivals(true, waits));
        let failed = std::panic::catch_unwind(|| with_arrivals(false, || panic!("on purpose")));
        assert!(failed.is_err() && waits());
    }
}
