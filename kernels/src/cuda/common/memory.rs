//! Memory on the device and memory of the host that the device reaches, streams, and events: what whoever moves data to and
//! from a GPU needs, freed when it is dropped.

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::result::{self, event, stream};
use cudarc::driver::sys::{
    CUdeviceptr, CUevent, CUevent_flags, CUevent_wait_flags_enum as Wait, CUresult, CUstream, cuMemcpyDtoHAsync_v2,
    cuMemcpyHtoDAsync_v2, cuStreamQuery,
};

use super::capture::no_capture;
use super::error::{CudaError, asked};
use super::gpu::Gpu;

/// Memory on a device.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: &'static Gpu,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates `bytes` bytes, all 0.
    pub fn zeroed(gpu: &'static Gpu, bytes: usize) -> Result<Self, CudaError> {
        let _guard = no_capture();
        gpu.bind()?;
        // The driver gives nothing for 0 bytes.
        // SAFETY: the context is current; the memory is freed once, below.
        let address = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(asked("allocating memory on the device"))?;
        let memory = Self { gpu, address, bytes };
        // SAFETY: just allocated, with so many bytes; whoever uses it next does so after the copy has ended.
        unsafe { result::memset_d8_sync(address, 0, bytes.max(1)) }.map_err(asked("clearing memory on the device"))?;
        result::ctx::synchronize().map_err(asked("clearing memory on the device"))?;
        Ok(memory)
    }

    /// Where it begins.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device that it is on.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// Copies from it and waits until that is done.
    ///
    /// # Safety
    /// Nothing on the device writes there meanwhile.
    pub unsafe fn read(&self, from: usize, to: &mut [u8]) -> Result<(), CudaError> {
        self.inside(from, to.len())?;
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: inside the memory, by the check; the caller's.
        unsafe { result::memcpy_dtoh_sync(to, self.address + from as CUdeviceptr) }
            .map_err(asked("copying to the host"))
    }

    /// Copies to it and waits until that is done.
    ///
    /// # Safety
    /// Nothing on the device reads or writes there meanwhile.
    pub unsafe fn write(&self, to: usize, from: &[u8]) -> Result<(), CudaError> {
        self.inside(to, from.len())?;
        let _guard = no_capture();
        self.gpu.bind()?;
        // SAFETY: inside the memory, by the check; the caller's.
        unsafe { result::memcpy_htod_sync(self.address + to as CUdeviceptr, from) }
            .map_err(asked("copying to the device"))?;
        // Of memory that is not pinned the copy may return as soon as it has read it.
        // SAFETY: the stream that copies which wait are on is always there.
        unsafe { stream::synchronize(stream::null()) }.map_err(asked("copying to the device"))
    }

    fn inside(&self, at: usize, len: usize) -> Result<(), CudaError> {
        match at.checked_add(len) {
            Some(end) if end <= self.bytes => Ok(()),
            _ => Err(CudaError::Unsupported(format!("{len} bytes at {at} of {} on the device", self.bytes))),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _guard = no_capture();
        // SAFETY: ours, freed once; whoever put work on it waited for that.
        let _ = self.gpu.bind().map(|()| unsafe { result::free_sync(self.address) });
    }
}

/// Memory of the host that stays where it is, so that the device copies from and to it by itself.
#[derive(Debug)]
pub struct PinnedMemory {
    gpu: &'static Gpu,
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain bytes that belong to no thread; writing takes `&mut`, or the contract of whoever gets the address.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `bytes` bytes, all 0.
    pub fn zeroed(gpu: &'static Gpu, bytes: usize) -> Result<Self, CudaError> {
        let _guard = no_capture();
        gpu.bind()?;
        // SAFETY: the context is current; the memory is freed once, below.
        let data = unsafe { result::malloc_host(bytes.max(1), 0) }.map_err(asked("allocating pinned host memory"))?;
        let data = NonNull::new(data.cast::<u8>()).expect("the driver gives memory or an error");
        // SAFETY: just allocated, with so many bytes.
        unsafe { data.write_bytes(0, bytes) };
        Ok(Self { gpu, data, bytes })
    }

    /// Where it begins, for the device: the same as for the host.
    pub fn address(&self) -> CUdeviceptr {
        self.data.as_ptr().addr() as CUdeviceptr
    }

    /// Where it begins.
    pub fn data(&self) -> *mut u8 {
        self.data.as_ptr()
    }

    /// The device that reaches it.
    pub fn gpu(&self) -> &'static Gpu {
        self.gpu
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _guard = no_capture();
        // SAFETY: ours, freed once; whoever put work on it waited for that.
        let _ = self.gpu.bind().map(|()| unsafe { result::free_host(self.data.as_ptr().cast()) });
    }
}

/// A stream of its own: what is put on it runs beside everything else, in order.
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

    /// Puts a copy to the device on it.
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

    /// Puts a copy to the host on it.
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

/// A mark on a stream that other streams wait for.
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
    /// Makes one. Who waits for it before it is on a stream waits for nothing.
    pub fn new(gpu: &'static Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let raw = event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(asked("making an event"))?;
        Ok(Self { gpu, raw })
    }

    /// Puts it behind everything that is on the stream; where it was before no one waits for it any more.
    pub fn record(&self, stream: &SideStream) -> Result<(), CudaError> {
        self.gpu.bind()?;
        // SAFETY: both are live.
        unsafe { event::record(self.raw, stream.raw) }.map_err(asked("recording an event"))
    }

    /// Has a stream wait for it where it is now; in a graph that is being captured: where it is at each replay.
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
