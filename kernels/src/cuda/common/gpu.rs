//! A device with the kernels on it: what every launch needs.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice_attribute_enum as Attribute, CUdeviceptr, CUresult, CUstream, CUstreamCaptureStatus_enum as Capture,
};
use cudarc::driver::{CudaContext, result};
use parking_lot::Mutex;

use super::blas::Blas;
use super::capture::no_capture;
use super::counters::Counters;
use super::error::{CudaError, asked};
use super::module::{Function, Modules, built};

/// A GPU with the kernels on it. Any thread may use it.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    pub(in crate::cuda) modules: Modules,
    pub(in crate::cuda) multiprocessors: u32,
    pub(in crate::cuda) counters: Counters,
    pub(in crate::cuda) blas: Blas,
}

impl Gpu {
    /// Opens the device of that number, in its primary context: the one that ONNX Runtime and PyTorch use too.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        if !built() {
            return Err(CudaError::NotBuilt);
        }
        // SAFETY: only tries to load the driver's library.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let _hold = no_capture();
        let context = CudaContext::new(ordinal).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => {
                CudaError::Unsupported(format!("there is no GPU {ordinal} on this machine: nvidia-smi -L lists them"))
            }
            _ => asked("opening the device")(error),
        })?;
        let attribute = |which| context.attribute(which).map_err(asked("asking for the device's attributes"));
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(Self {
            modules: Modules::load(major)?,
            multiprocessors: multiprocessors.max(1) as u32,
            counters: Counters::default(),
            blas: Blas::default(),
            context,
        })
    }

    /// The device of that number, opened once for the whole process.
    pub fn shared(ordinal: usize) -> Result<&'static Self, CudaError> {
        static GPUS: Mutex<Vec<(usize, &'static Gpu)>> = Mutex::new(Vec::new());
        // Before the list's lock, because opening a device takes it too: one order of the two locks everywhere.
        let _hold = no_capture();
        let mut gpus = GPUS.lock();
        if let Some((_, gpu)) = gpus.iter().find(|(known, _)| *known == ordinal) {
            return Ok(gpu);
        }
        let gpu: &'static Self = Box::leak(Box::new(Self::open(ordinal)?));
        gpus.push((ordinal, gpu));
        Ok(gpu)
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Whether it is a Hopper GPU, of compute capability 9.x: it runs the kernels named sm90.
    pub fn is_hopper(&self) -> bool {
        self.modules.attention_sm90.is_some()
    }

    /// Bytes of free memory on the device.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        result::mem_get_info().map(|(free, _)| free).map_err(asked("asking how much memory is free"))
    }

    /// Makes the device's context current on this thread, as every call of the driver's interface needs it.
    pub fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(asked("making the context current"))
    }

    /// The device's context, for allocations and streams.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Enqueues a copy of `bytes` bytes on a stream: `PagedKvAppend` works in place, so a caller with two pools copies
    /// first.
    ///
    /// # Safety
    /// Both addresses are ones of this device, of memory as long as that and alive until the stream has done this; the two
    /// are apart, nothing else writes them meanwhile, and nothing reads what is written.
    pub unsafe fn copy(
        &self,
        to: CUdeviceptr,
        from: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }.map_err(asked("copying on the device"))
    }

    /// Launches a kernel by programmatic dependent launch where the chip has it (Hopper): it starts while the kernel in
    /// front still runs, and waits for that one before it reads or writes what another kernel writes.
    ///
    /// # Safety
    /// As for [`Function::launch`]; the kernel waits (cuda/common/dependent_launch.cuh).
    pub(in crate::cuda) unsafe fn launch_dependent(
        &self,
        function: Function,
        blocks: u32,
        threads: u32,
        shared: usize,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's; on Hopper the kernels wait for the kernel in front of them.
        unsafe {
            if self.modules.attention_sm90.is_some() {
                function.launch_dependent(blocks, threads, shared, stream, arguments)
            } else {
                function.launch(blocks, threads, shared, stream, arguments)
            }
        }
    }

    /// Reads numbers from the device behind what is on the stream, and waits for it.
    ///
    /// # Safety
    /// The address and the stream are of this device, the memory there is as long as `into`, and `T` has no invalid bit
    /// patterns.
    pub unsafe fn read<T: Copy>(&self, from: CUdeviceptr, into: &mut [T], stream: CUstream) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.bind()?;
        if !into.is_empty() {
            // SAFETY: the caller's; it is waited for below.
            unsafe { result::memcpy_dtoh_async(into, from, stream) }.map_err(asked("copying from the device"))?;
        }
        // SAFETY: the caller's.
        unsafe { self.wait(stream) }
    }

    /// Writes numbers to the device behind what is on the stream, and waits for it.
    ///
    /// # Safety
    /// The address and the stream are of this device, and the memory there is as long as `from`; nothing else uses it
    /// meanwhile.
    pub unsafe fn write<T: Copy>(&self, to: CUdeviceptr, from: &[T], stream: CUstream) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.bind()?;
        if !from.is_empty() {
            // SAFETY: the caller's; it is waited for below.
            unsafe { result::memcpy_htod_async(to, from, stream) }.map_err(asked("copying to the device"))?;
        }
        // SAFETY: the caller's.
        unsafe { self.wait(stream) }
    }

    /// Waits until a stream is done with everything on it.
    ///
    /// # Safety
    /// The stream is one of this device.
    pub unsafe fn wait(&self, stream: CUstream) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { result::stream::synchronize(stream) }.map_err(asked("waiting for the stream"))
    }

    /// Waits until everything that was put on any stream is done.
    pub fn let_all_end(&self) -> Result<(), CudaError> {
        let _guard = no_capture();
        self.bind()?;
        result::ctx::synchronize().map_err(asked("waiting for the device"))
    }

    /// Whether a stream is being captured into a CUDA graph: then nothing can wait for it.
    ///
    /// # Safety
    /// The stream is one of this device.
    pub unsafe fn is_capturing(&self, stream: CUstream) -> Result<bool, CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        let status =
            unsafe { result::stream::is_capturing(stream) }.map_err(asked("asking whether a stream is captured"))?;
        Ok(status != Capture::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads the driver's library")]
    fn a_machine_without_a_gpu_is_told_so() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(gpu.context().name().is_ok()),
            Err(CudaError::NotBuilt) => assert!(!built()),
            Err(error) => assert!(error.to_string().contains("GPU") || error.to_string().contains("device"), "{error}"),
        }
    }
}
