//! Streams and events.

use std::ffi::c_void;

use cudarc::driver::result::{event, stream};
use cudarc::driver::sys::{
    CUevent, CUevent_flags, CUevent_wait_flags_enum as Wait, CUresult, cuMemcpyDtoDAsync_v2, cuMemcpyDtoHAsync_v2,
    cuMemcpyHtoDAsync_v2, cuStreamQuery,
};
use pagoda_custom_ops::side_channel::Arrival;
use pagoda_kernels::cuda::{CUdeviceptr, CUstream, CudaError, Gpu, asked, no_capture};

/// A non-blocking stream: what is enqueued on it runs in order, concurrently with all other streams.
#[derive(Debug)]
pub struct SideStream {
    gpu: &'static Gpu,
    raw: CUstream,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for SideStream {}
// SAFETY: as above.
unsafe impl Sync for SideStream {}

impl SideStream {
    /// Makes one.
    pub fn new(gpu: &'static Gpu) -> Result<Self, CudaError> {
        let _guard = no_capture();
        gpu.bind()?;
        let raw = stream::create(stream::StreamKind::NonBlocking).map_err(asked("making a stream"))?;
        Ok(Self { gpu, raw })
    }

    /// For launches.
    pub fn raw(&self) -> CUstream {
        self.raw
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// There are `bytes` bytes at either place, alive and left alone until the stream has done this.
    pub unsafe fn upload(&self, to: CUdeviceptr, from: *const u8, bytes: usize) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: the caller's.
        unsafe { cuMemcpyHtoDAsync_v2(to, from.cast::<c_void>(), bytes, self.raw) }
            .result()
            .map_err(asked("copying to the device"))
    }

    /// Enqueues a copy to the host.
    ///
    /// # Safety
    /// As for [`upload`](Self::upload).
    pub unsafe fn download(&self, to: *mut u8, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: the caller's.
        unsafe { cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, self.raw) }
            .result()
            .map_err(asked("copying to the host"))
    }

    /// Enqueues a copy on the device.
    ///
    /// # Safety
    /// As for [`upload`](Self::upload).
    pub unsafe fn copy(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: the caller's.
        unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) }.result().map_err(asked("copying on the device"))
    }

    /// Waits until everything on it is done.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: the stream is live.
        unsafe { stream::synchronize(self.raw) }.map_err(asked("waiting for a stream"))
    }

    /// Whether everything on it is done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: the stream is live.
        match unsafe { cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => other.result().map(|()| true).map_err(asked("asking after a stream")),
        }
    }
}

impl Drop for SideStream {
    fn drop(&mut self) {
        let _guard = no_capture();
        // SAFETY: ours, destroyed once; the driver lets what is on it end.
        let _ = self.gpu.bind().map(|()| unsafe { stream::destroy(self.raw) });
    }
}

/// An event: a position on a stream that other streams wait for.
#[derive(Debug)]
pub struct Event {
    gpu: &'static Gpu,
    raw: CUevent,
}

// SAFETY: a handle of the driver, which may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes one. A wait for an event that was never recorded returns at once.
    pub fn new(gpu: &'static Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let raw = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(asked("making an event"))?;
        Ok(Self { gpu, raw })
    }

    /// Records it behind everything on the stream. Later waits are for this position alone.
    pub fn record(&self, stream: &SideStream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: both are live.
        unsafe { event::record(self.raw, stream.raw) }.map_err(asked("recording an event"))
    }

    /// Has a stream wait for the position recorded last; a stream that is being captured: recorded last at each replay.
    ///
    /// # Safety
    /// The stream is one of the event's device, and the event lives until the stream has gone past this, or the graph is
    /// gone.
    pub unsafe fn hold(&self, stream: CUstream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: the caller's.
        unsafe {
            let captured = self.gpu.is_capturing(stream)?;
            let kind = if captured { Wait::CU_EVENT_WAIT_EXTERNAL } else { Wait::CU_EVENT_WAIT_DEFAULT };
            stream::wait_event(stream, self.raw, kind).map_err(asked("waiting for an event"))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours, destroyed once.
        let _ = self.gpu.bind().map(|()| unsafe { event::destroy(self.raw) });
    }
}

impl Arrival for Event {
    unsafe fn wait_on(&self, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.hold(stream) }
    }
}
