//! Counters by which the blocks of a kernel share out work at run time: one buffer for each stream, on which kernels
//! run one after the other.
//!
//! A kernel finds its counters 0 and leaves them 0, so nothing has to clear them in between. A launch that is captured
//! into a CUDA graph gets counters of its own: the graph may be replayed on any stream, but not while it still runs. A
//! caller that knows when the graph is destroyed keeps the counters until then ([`keep_counters`]), and later captures
//! reuse them. Without that they belong to the graph for good.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::result::{self, stream};
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream, CUstreamCaptureStatus_enum as Status, cuStreamIsCapturing};
use parking_lot::{Mutex, MutexGuard};

use super::capture::no_capture;

/// Bytes of a stream's buffer.
pub const BYTES: usize = 64 << 10;

/// Bytes kept in reserve for captured launches, during which nothing can be allocated, and the alignment of what they
/// get. A language model's graph has four products a layer, and each takes 768 bytes on an H200: half of the reserve, below which it
/// is filled up, is enough for 600 layers.
const RESERVE: usize = 4 << 20;
const ALIGNMENT: usize = 256;

/// The handle of the per-thread default stream: a different stream on each thread.
const PER_THREAD: usize = 2;

/// The counters of a device. They stay allocated until the process ends: a stream that is destroyed leaves its buffer
/// to the next stream with the same handle.
#[derive(Clone, Debug, Default)]
pub struct Counters(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    streams: HashMap<usize, CUdeviceptr>,
    /// Memory that no graph has had: address and bytes.
    reserve: Vec<(CUdeviceptr, usize)>,
    /// Memory of graphs that are destroyed.
    returned: Vec<(CUdeviceptr, usize)>,
}

thread_local! {
    /// What captured launches on this thread got, if it is kept.
    static KEPT: RefCell<Option<KeptCounters>> = const { RefCell::new(None) };
}

/// Counters of captured launches. Must be dropped after their graph is destroyed, not before.
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

/// Runs `work` on this thread, and returns the counters of the launches that it captures.
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
    /// `bytes` bytes, up to [`BYTES`], for a launch on a stream of the current context; none where there is no memory,
    /// or no more in reserve for a stream that is being captured.
    pub fn of(&self, stream: CUstream, bytes: usize) -> Option<Given> {
        // Before the map's lock: a thread that holds `no_capture` may wait for that one.
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
        // A launch runs before it is captured: this fills the reserve.
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
    /// Memory for a captured launch: that of a destroyed graph, or some of the reserve.
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
    // SAFETY: the context is current; the memory is never freed, and it is cleared before its address is used.
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
        // These are not kept.
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
