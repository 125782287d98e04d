//! Counters of kernels that share their work out as they go: some for each stream, on which one kernel comes after the other.
//!
//! A kernel finds them 0 and leaves them 0, so that no one has to clear them in between. A launch that is captured into a graph
//! has some of its own: the graph may be replayed on any stream, but never while it runs already.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUresult, CUstreamCaptureStatus_enum as Status, cuStreamIsCapturing};

use super::{CUdeviceptr, CUstream, no_capture};

/// Bytes that a stream has.
pub const BYTES: usize = 64 << 10;

/// Bytes that are kept ready for launches that are captured, when nothing can be allocated; and what those begin at multiples of.
const RESERVE: usize = 256 << 10;
const ALIGNMENT: usize = 256;

/// The handle that means another stream on each thread.
const PER_THREAD: usize = 2;

/// Those of a device. They stay there until the process ends: a stream that is gone leaves its own to the one that gets its
/// handle.
#[derive(Debug, Default)]
pub struct Counters(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    streams: HashMap<usize, CUdeviceptr>,
    /// Where what no graph has begins, and how long it is.
    reserve: (CUdeviceptr, usize),
}

/// Counters for a launch.
#[derive(Clone, Copy, Debug)]
pub struct Given {
    pub address: CUdeviceptr,
    /// No other launch has them.
    pub own: bool,
}

impl Counters {
    /// `bytes` bytes, up to [`BYTES`], for a launch on a stream of the current context; none where there is no memory, or no
    /// more in reserve for a stream that is being captured.
    pub fn of(&self, stream: CUstream, bytes: usize) -> Option<Given> {
        // First, as for whoever else speaks to the driver: its holders must not wait for the map's.
        let _hold = no_capture();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (handle, bytes) = (stream.addr(), bytes.next_multiple_of(ALIGNMENT));
        if is_captured(stream) {
            let (address, left) = known.reserve;
            let rest = left.checked_sub(bytes)?;
            known.reserve = (address + bytes as CUdeviceptr, rest);
            return Some(Given { address, own: true });
        }
        if handle == PER_THREAD {
            return None;
        }
        // Whoever is captured has run before.
        if known.reserve.1 < RESERVE / 2 {
            known.reserve = (zeros(RESERVE)?, RESERVE);
        }
        if let Some(address) = known.streams.get(&handle) {
            return Some(Given { address: *address, own: false });
        }
        let address = zeros(BYTES)?;
        known.streams.insert(handle, address);
        Some(Given { address, own: false })
    }
}

fn is_captured(stream: CUstream) -> bool {
    let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a stream that its owner is about to use; the answer lives until the call has returned.
    let asked = unsafe { cuStreamIsCapturing(stream, &mut status) };
    asked != CUresult::CUDA_SUCCESS || status != Status::CU_STREAM_CAPTURE_STATUS_NONE
}

fn zeros(bytes: usize) -> Option<CUdeviceptr> {
    // SAFETY: the context is current; the memory is never freed, and it is cleared before anyone has its address.
    unsafe {
        let address = result::malloc_sync(bytes).ok()?;
        let cleared = result::memset_d8_sync(address, 0, bytes).and_then(|()| stream::synchronize(stream::null()));
        if cleared.is_err() {
            let _ = result::free_sync(address);
            return None;
        }
        Some(address)
    }
}
