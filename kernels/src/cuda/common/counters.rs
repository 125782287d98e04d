//! Counters of kernels that share their work out as they go: some for each stream, on which one kernel comes after the other.
//!
//! A kernel finds them 0 and leaves them 0, so that no one has to clear them in between. A launch that is captured into a graph
//! has some of its own: the graph may be replayed on any stream, but never while it runs already. Whoever knows when the graph is
//! gone keeps them until then ([`keep_counters`]), and others get them; without that they are the graph's for good.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream, CUstreamCaptureStatus_enum as Status, cuStreamIsCapturing};
use parking_lot::{Mutex, MutexGuard};

use super::capture::no_capture;

/// Bytes that a stream has.
pub const BYTES: usize = 64 << 10;

/// Bytes that are kept ready for launches that are captured, when nothing can be allocated; and what those begin at multiples of.
const RESERVE: usize = 256 << 10;
const ALIGNMENT: usize = 256;

/// The handle that means another stream on each thread.
const PER_THREAD: usize = 2;

/// Those of a device. They stay there until the process ends: a stream that is gone leaves its own to the one that gets its
/// handle.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    streams: HashMap<usize, CUdeviceptr>,
    /// Where what no graph has had begins, and how many bytes there are.
    reserve: Vec<(CUdeviceptr, usize)>,
    /// What graphs had that are gone.
    returned: Vec<(CUdeviceptr, usize)>,
}

thread_local! {
    /// What launches that are captured on this thread get, if someone keeps it.
    static KEPT: RefCell<Option<KeptCounters>> = const { RefCell::new(None) };
}

/// Counters of launches that were captured. To be dropped when their graph is gone, and not before.
#[derive(Debug, Default)]
#[must_use = "what it holds is given to others when it is dropped"]
pub struct KeptCounters(Vec<(Counters, CUdeviceptr, usize)>);

impl Drop for KeptCounters {
    fn drop(&mut self) {
        for (counters, address, bytes) in self.0.drain(..) {
            // As every kernel left them: 0.
            counters.lock().returned.push((address, bytes));
        }
    }
}

/// Does something on this thread, and keeps the counters of what it captures.
pub fn keep_counters<R>(work: impl FnOnce() -> R) -> (R, KeptCounters) {
    KEPT.set(Some(KeptCounters::default()));
    let done = work();
    (done, KEPT.take().unwrap_or_default())
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
        let mut known = self.lock();
        let (handle, bytes) = (stream.addr(), bytes.next_multiple_of(ALIGNMENT));
        if is_captured(stream) {
            let address = known.take(bytes)?;
            KEPT.with_borrow_mut(|kept| {
                if let Some(kept) = kept {
                    kept.0.push((self.clone(), address, bytes));
                }
            });
            return Some(Given { address, own: true });
        }
        if handle == PER_THREAD {
            return None;
        }
        // Whoever is captured has run before.
        if known.reserve.iter().map(|(_, left)| left).sum::<usize>() < RESERVE / 2 {
            known.reserve.push((zeros(RESERVE)?, RESERVE));
        }
        if let Some(address) = known.streams.get(&handle) {
            return Some(Given { address: *address, own: false });
        }
        let address = zeros(BYTES)?;
        known.streams.insert(handle, address);
        Some(Given { address, own: false })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock()
    }
}

impl Known {
    /// So many bytes for a launch of a graph: what one like it had, or some of the reserve.
    fn take(&mut self, bytes: usize) -> Option<CUdeviceptr> {
        if let Some(at) = self.returned.iter().position(|(_, had)| *had == bytes) {
            return Some(self.returned.swap_remove(at).0);
        }
        let (address, left) = self.reserve.iter_mut().find(|(_, left)| *left >= bytes)?;
        let taken = *address;
        (*address, *left) = (taken + bytes as CUdeviceptr, *left - bytes);
        self.reserve.retain(|(_, left)| *left > 0);
        Some(taken)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_graph_had_the_next_one_gets() {
        let counters = Counters::default();
        counters.lock().reserve = vec![(1000, 512), (8000, 1024)];
        let take = |bytes| {
            let address = counters.lock().take(bytes);
            KEPT.with_borrow_mut(|kept| {
                if let Some(kept) = kept {
                    kept.0.push((counters.clone(), address.unwrap(), bytes));
                }
            });
            address
        };
        let (given, first) = keep_counters(|| [256, 512, 256].map(take));
        assert_eq!(given, [Some(1000), Some(8000), Some(1256)]);
        // No one keeps these.
        assert_eq!((take(256), take(512)), (Some(8512), None));
        assert_eq!(counters.lock().reserve, [(8768, 256)]);
        drop(first);
        let (mut given, second) = keep_counters(|| [256, 512, 256].map(take).map(Option::unwrap));
        given.sort();
        assert_eq!(given, [1000, 1256, 8000]);
        assert_eq!(counters.lock().reserve, [(8768, 256)]);
        drop(second);
        assert_eq!(counters.lock().returned.len(), 3);
    }
}
