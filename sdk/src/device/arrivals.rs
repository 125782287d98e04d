//! Events behind what was last brought into a pool.

use std::sync::Arc;

use pagoda_custom_ops::side_channel::PoolArrivals;
use pagoda_kernels::cuda::{CUdeviceptr, CudaError, Gpu};

use super::stream::{Event, SideStream};

/// The event behind the tokens that were last brought into a pool. Operators that read the pool wait for it while this lives.
#[derive(Debug)]
pub struct Arrivals {
    event: Arc<Event>,
    _registered: PoolArrivals,
}

impl Arrivals {
    /// For the pool that begins there.
    pub fn new(gpu: &'static Gpu, pool: CUdeviceptr) -> Result<Self, CudaError> {
        let event = Arc::new(Event::new(gpu)?);
        let _registered = PoolArrivals::new(pool, Arc::clone(&event) as _);
        Ok(Self { event, _registered })
    }

    /// Records the event behind what is on the stream. What it was recorded behind before must be on the same stream, or done.
    pub fn mark(&self, stream: &SideStream) -> Result<(), CudaError> {
        self.event.record(stream)
    }
}
