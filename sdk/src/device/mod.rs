//! GPU memory, streams, events and the capture of CUDA graphs.
//!
//! What is here owns what it allocates, and frees it when it is dropped. Kernels are launched by `pagoda_kernels::cuda`, which owns
//! nothing of its caller's. Three things stay there because launches need them too, and are passed on from here: the device with
//! its modules ([`Gpu`]), the lock between captures and what a capture does not survive ([`no_capture`], [`capture`]), and the
//! counters of captured launches ([`KeptCounters`]).

mod arrivals;
mod memory;
mod miss_list;
mod row_cache;
mod stream;

pub use pagoda_kernels::cuda::{
    CUdeviceptr, CUstream, CudaError, Gpu, KeptCounters, asked, capture, keep_counters, may_wait, no_capture,
};

pub use arrivals::Arrivals;
pub use memory::{DeviceMemory, PinnedMemory};
pub use miss_list::MissList;
pub use row_cache::{BagCall, HostRows, RowCache};
pub use stream::{Event, SideStream};
