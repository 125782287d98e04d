//! Counters of kernels that share their work out as they go: some for each stream, on which one kernel comes after the other.
//!
//! A kernel finds them 0 and leaves them 0, so that no one has to clear them in between.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUresult, CUstreamCaptureStatus_enum as Status, cuStreamIsCapturing};

use super::{CUdeviceptr, CUstream, no_capture};

/// Bytes that a stream has.
pub const BYTES: usize = 64 << 10;

/// The handle that means another stream on each thread.
const PER_THREAD: usize = 2;

/// Those of a device. They stay there until the process ends: a stream that is gone leaves its own to the one that gets its
/// handle.
#[derive(Debug, Default)]
pub struct Counters(Mutex<HashMap<usize, CUdeviceptr>>);

impl Counters {
    /// Those of a stream of the current context; none where there is no memory for them, and none for a stream that is being
    /// captured, unless it had some before.
    pub fn of(&self, stream: CUstream) -> Option<CUdeviceptr> {
        // First, as for whoever else speaks to the driver: its holders must not wait for the map's.
        let _hold = no_capture();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let handle = stream.addr();
        if let Some(address) = known.get(&handle) {
            return Some(*address);
        }
        if handle == PER_THREAD || is_captured(stream) {
            return None;
        }
        let address = zeros()?;
        known.insert(handle, address);
        Some(address)
    }
}

fn is_captured(stream: CUstream) -> bool {
    let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a stream that its owner is about to use; the answer lives until the call has returned.
    let asked = unsafe { cuStreamIsCapturing(stream, &mut status) };
    asked != CUresult::CUDA_SUCCESS || status != Status::CU_STREAM_CAPTURE_STATUS_NONE
}

fn zeros() -> Option<CUdeviceptr> {
    // SAFETY: the context is current; the memory is never freed, and it is cleared before anyone has its address.
    unsafe {
        let address = result::malloc_sync(BYTES).ok()?;
        let cleared = result::memset_d8_sync(address, 0, BYTES).and_then(|()| stream::synchronize(stream::null()));
        if cleared.is_err() {
            let _ = result::free_sync(address);
            return None;
        }
        Some(address)
    }
}
