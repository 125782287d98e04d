//! Events that operators wait for before they read a pool, by the pool's address.
//!
//! Tokens come back into a pool on a stream of their own, with an event behind them. Operators find the event by the address of
//! their pool. So each layer waits for its own tokens alone, and a run starts while those of later layers are still on their way.

use std::collections::BTreeMap;
use std::sync::Arc;

use pagoda_kernels::cuda::{CUdeviceptr, CUstream, CudaError};
use parking_lot::RwLock;

use super::run;

/// What a stream waits for: an event of the driver.
pub trait Arrival: Send + Sync {
    /// Enqueues on a stream the wait for the event as it is recorded now. In a stream that is being captured: as it is recorded at
    /// each replay.
    ///
    /// # Safety
    /// The stream is one of the event's device. The event lives until the stream has passed the wait, or the graph is destroyed.
    unsafe fn wait_on(&self, stream: CUstream) -> Result<(), CudaError>;
}

static POOLS: RwLock<BTreeMap<CUdeviceptr, Arc<dyn Arrival>>> = RwLock::new(BTreeMap::new());

/// The registration of a pool's event. Operators find it while this lives.
#[derive(Debug)]
pub struct PoolArrivals(CUdeviceptr);

impl PoolArrivals {
    /// Registers the event for the pool that starts at that address.
    pub fn new(pool: CUdeviceptr, arrival: Arc<dyn Arrival>) -> Self {
        POOLS.write().insert(pool, arrival);
        Self(pool)
    }
}

impl Drop for PoolArrivals {
    fn drop(&mut self) {
        POOLS.write().remove(&self.0);
    }
}

/// Enqueues on a stream the wait for what is on its way into a pool, unless the run expects none.
///
/// # Safety
/// The stream is one of the pool's device. The pool lives until the stream has passed the wait, or the captured graph is destroyed.
pub(crate) unsafe fn wait_for_arrivals(pool: CUdeviceptr, stream: CUstream) -> Result<(), CudaError> {
    if !run::expects_arrivals() {
        return Ok(());
    }
    match POOLS.read().get(&pool) {
        // SAFETY: by contract; the event lives as long as the pool.
        Some(arrival) => unsafe { arrival.wait_on(stream) },
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::side_channel::with_arrivals;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Arrival for Counted {
        unsafe fn wait_on(&self, _stream: CUstream) -> Result<(), CudaError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }

    #[test]
    fn operators_wait_for_their_own_pool_while_it_is_registered() {
        let event = Arc::new(Counted::default());
        // SAFETY: nothing is on a device.
        let wait = |pool| unsafe { wait_for_arrivals(pool, null_mut()) }.unwrap();
        let registered = PoolArrivals::new(1 << 40, event.clone());
        wait(1 << 40);
        wait(1 << 41);
        with_arrivals(false, || wait(1 << 40));
        assert_eq!(event.0.load(Ordering::Relaxed), 1);
        drop(registered);
        wait(1 << 40);
        assert_eq!(event.0.load(Ordering::Relaxed), 1);
    }
}
