//! Memory on a device, and memory of the host that the device reaches.

use std::ptr::NonNull;

use cudarc::driver::result::{self, stream};
use pagoda_kernels::cuda::{CUdeviceptr, CudaError, Gpu, asked, no_capture};

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
        // SAFETY: just allocated, with so many bytes; it is waited for below.
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
        // SAFETY: ours, freed once; work on it was waited for.
        let _ = self.gpu.bind().map(|()| unsafe { result::free_sync(self.address) });
    }
}

/// Pinned (page-locked) memory of the host: the device copies from and to it without the CPU.
#[derive(Debug)]
pub struct PinnedMemory {
    gpu: &'static Gpu,
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain bytes that belong to no thread; writing takes `&mut`, or the contract of the address's users.
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
        // SAFETY: ours, freed once; work on it was waited for.
        let _ = self.gpu.bind().map(|()| unsafe { result::free_host(self.data.as_ptr().cast()) });
    }
}
