//! The compiled kernels that the library carries, and their loading.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result;
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUlaunchAttribute, CUlaunchAttributeID_enum, CUlaunchConfig,
    CUmodule, CUstream, cuLaunchKernelEx, cuOccupancyMaxActiveClusters,
};

use super::{CudaError, asked, no_capture};

pub const APPEND: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/append.fatbin"));
pub const PLAIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/plain.fatbin"));
pub const BAG: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bag.fatbin"));
pub const TABLE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/table.fatbin"));
pub const TOKENS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tokens.fatbin"));
pub const DENSE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dense.fatbin"));
pub const ENDS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ends.fatbin"));
pub const MMA: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/mma.fatbin"));
pub const HOPPER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hopper.fatbin"));
pub const DENSE_HOPPER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dense_hopper.fatbin"));
pub const LINEAR_HOPPER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/linear_hopper.fatbin"));

/// Whether the build had nvcc: without it there are no kernels, and [`Gpu::open`](super::Gpu::open) fails.
pub fn built() -> bool {
    !APPEND.is_empty()
}

/// One fatbin on the device. It stays there until the process ends.
#[derive(Debug)]
pub struct Module {
    module: CUmodule,
    functions: Mutex<HashMap<String, Function>>,
}

/// A kernel that is ready to launch.
#[derive(Clone, Copy, Debug)]
pub struct Function {
    function: CUfunction,
    /// How many clusters of it the device holds at once; 0 of a kernel without clusters.
    pub clusters: u32,
}

// SAFETY: handles of the driver, which may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; the map is behind a lock.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}

impl Module {
    /// Loads a fatbin into the current context.
    pub fn load(fatbin: &'static [u8]) -> Result<Self, CudaError> {
        // SAFETY: a whole fatbin, by build.rs.
        let module = unsafe { result::module::load_data(fatbin.as_ptr().cast()) }.map_err(asked("loading kernels"))?;
        Ok(Self { module, functions: Mutex::default() })
    }

    /// The kernel of that name, allowed to use `shared` bytes of shared memory.
    pub fn function(&self, name: &str, shared: usize) -> Result<Function, CudaError> {
        self.find(name, shared, |_| Ok(0))
    }

    /// As [`function`](Self::function), of a kernel whose blocks of `threads` threads make clusters of `cluster`.
    pub fn clustered(&self, name: &str, shared: usize, threads: u32, cluster: u32) -> Result<Function, CudaError> {
        self.find(name, shared, |function| most_clusters(function, shared, threads, cluster))
    }

    fn find(
        &self,
        name: &str,
        shared: usize,
        clusters: impl Fn(CUfunction) -> Result<u32, CudaError>,
    ) -> Result<Function, CudaError> {
        let known = || self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = known().get(name) {
            return Ok(*found);
        }
        // The driver loads a kernel when it is first asked for. Before the map's lock, which whoever captures may want.
        let _hold = no_capture();
        let mut functions = known();
        let c_name = CString::new(name).expect("names of kernels have no zeros");
        // SAFETY: the module is loaded and stays so.
        let function =
            unsafe { result::module::get_function(self.module, c_name) }.map_err(asked("finding a kernel"))?;
        let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was found just now.
        unsafe { result::function::set_function_attribute(function, most, shared as i32) }
            .map_err(asked("reserving shared memory for a kernel"))?;
        let found = Function { function, clusters: clusters(function)? };
        functions.insert(name.to_owned(), found);
        Ok(found)
    }
}

fn most_clusters(function: CUfunction, shared: usize, threads: u32, cluster: u32) -> Result<u32, CudaError> {
    // SAFETY: plain data, of which zeros are a value.
    let (mut size, mut config): (CUlaunchAttribute, CUlaunchConfig) = unsafe { std::mem::zeroed() };
    size.id = CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    size.value.clusterDim.x = cluster;
    size.value.clusterDim.y = 1;
    size.value.clusterDim.z = 1;
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (cluster, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (threads, 1, 1);
    config.sharedMemBytes = shared as u32;
    (config.attrs, config.numAttrs) = (&mut size, 1);
    let mut clusters = 0;
    // SAFETY: the configuration and its attribute live until the call has returned.
    unsafe { cuOccupancyMaxActiveClusters(&mut clusters, function, &config) }
        .result()
        .map_err(asked("asking how many clusters fit onto the device"))?;
    if clusters < 1 {
        return Err(CudaError::Unsupported(format!("clusters of {cluster} blocks do not fit onto this device")));
    }
    Ok(clusters as u32)
}

impl Function {
    /// Puts the kernel on a stream.
    ///
    /// # Safety
    /// `arguments` point to values of the types that the kernel takes, in its order.
    pub unsafe fn launch(
        self,
        blocks: u32,
        threads: u32,
        shared: usize,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        // SAFETY: the caller's; the function's module is never unloaded.
        unsafe { result::launch_kernel(self.function, grid, block, shared as u32, stream, arguments) }
            .map_err(asked("launching a kernel"))
    }

    /// As [`launch`](Self::launch), of a kernel that may begin before the one in front of it on the stream has ended
    /// (`let_follow` of cuda/async.cuh). It waits for that one itself, at the latest before its own end.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); nothing on the stream but kernels of this library stands in front, unless the kernel
    /// waits before it reads or writes what others do.
    pub unsafe fn follow(
        self,
        blocks: u32,
        threads: u32,
        shared: usize,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: plain data, of which zeros are a value.
        let (mut early, mut config): (CUlaunchAttribute, CUlaunchConfig) = unsafe { std::mem::zeroed() };
        early.id = CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        (config.gridDimX, config.gridDimY, config.gridDimZ) = (blocks, 1, 1);
        (config.blockDimX, config.blockDimY, config.blockDimZ) = (threads, 1, 1);
        (config.sharedMemBytes, config.hStream) = (shared as u32, stream);
        (config.attrs, config.numAttrs) = (&mut early, 1);
        // SAFETY: the caller's; the configuration and its attribute live until the call has returned.
        unsafe { cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(asked("launching a kernel"))
    }
}
