//! The compiled kernels that the library carries, and their loading.

use std::collections::HashMap;
use std::ffi::{CString, c_void};

use cudarc::driver::result;
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as Attribute, CUlaunchAttribute, CUlaunchAttributeID_enum, CUlaunchConfig,
    CUmodule, CUstream, cuLaunchKernelEx, cuOccupancyMaxActiveClusters,
};
use parking_lot::Mutex;

use super::capture::no_capture;
use super::error::{CudaError, asked};

/// The fatbin of `kernels/cuda/**/$name.cu`; empty where the build had no nvcc.
macro_rules! fatbin {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))
    };
}

/// Whether the build had nvcc: without it there are no kernels, and [`Gpu::open`](super::gpu::Gpu::open) fails.
pub fn built() -> bool {
    !fatbin!("kv_pack").is_empty()
}

/// The kernels on a device, a module for each file of `kernels/cuda`.
#[derive(Debug)]
pub struct Modules {
    pub kv_pack: Module,
    pub cache_policy: Module,
    pub embedding_bag: Module,
    pub embedding_table: Module,
    pub paged_kv_append: Module,
    pub attention_simt: Module,
    /// From sm_80 on.
    pub attention_sm80: Option<Module>,
    /// On sm_90 alone, as all that are named so.
    pub attention_sm90: Option<Module>,
    pub embed: Module,
    pub gemm_simt: Module,
    pub gemm_sm90: Option<Module>,
    pub linear_sm90: Option<Module>,
    pub norm: Module,
    pub block_projection_sm90: Option<Module>,
    pub cut_rows: Module,
    pub gated_gemm_sm90: Option<Module>,
    pub glu: Module,
    pub paged_attention_simt: Module,
    pub paged_attention_sm90: Option<Module>,
    /// From sm_80 on, as all that are named so.
    pub paged_decode_sm80: Option<Module>,
    pub paged_prefill_sm80: Option<Module>,
    pub projection_sm90: Option<Module>,
    pub quantised_pool: Module,
    pub rms_norm: Module,
    pub sampling: Module,
    pub sampling_sm90: Option<Module>,
    pub unit: Module,
}

impl Modules {
    /// Loads what a device of that major compute capability takes into the current context.
    pub fn load(major: i32) -> Result<Self, CudaError> {
        let sm80 = |fatbin: &'static [u8]| (major >= 8).then(|| Module::load(fatbin)).transpose();
        let sm90 = |fatbin: &'static [u8]| (major == 9).then(|| Module::load(fatbin)).transpose();
        Ok(Self {
            kv_pack: Module::load(fatbin!("kv_pack"))?,
            cache_policy: Module::load(fatbin!("cache_policy"))?,
            embedding_bag: Module::load(fatbin!("embedding_bag"))?,
            embedding_table: Module::load(fatbin!("embedding_table"))?,
            paged_kv_append: Module::load(fatbin!("paged_kv_append"))?,
            attention_simt: Module::load(fatbin!("hstu_attention_simt"))?,
            attention_sm80: sm80(fatbin!("hstu_attention_sm80"))?,
            attention_sm90: sm90(fatbin!("hstu_attention_sm90"))?,
            embed: Module::load(fatbin!("hstu_embed"))?,
            gemm_simt: Module::load(fatbin!("hstu_gemm_simt"))?,
            gemm_sm90: sm90(fatbin!("hstu_gemm_sm90"))?,
            linear_sm90: sm90(fatbin!("hstu_linear_sm90"))?,
            norm: Module::load(fatbin!("hstu_norm"))?,
            block_projection_sm90: sm90(fatbin!("block_projection_sm90"))?,
            cut_rows: Module::load(fatbin!("cut_rows"))?,
            gated_gemm_sm90: sm90(fatbin!("gated_gemm_sm90"))?,
            glu: Module::load(fatbin!("glu"))?,
            paged_attention_simt: Module::load(fatbin!("paged_attention_simt"))?,
            paged_attention_sm90: sm90(fatbin!("paged_attention_sm90"))?,
            paged_decode_sm80: sm80(fatbin!("paged_decode_sm80"))?,
            paged_prefill_sm80: sm80(fatbin!("paged_prefill_sm80"))?,
            projection_sm90: sm90(fatbin!("projection_sm90"))?,
            quantised_pool: Module::load(fatbin!("quantised_pool"))?,
            rms_norm: Module::load(fatbin!("rms_norm"))?,
            sampling: Module::load(fatbin!("sampling"))?,
            sampling_sm90: sm90(fatbin!("sampling_sm90"))?,
            unit: Module::load(fatbin!("hstu_unit"))?,
        })
    }
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
    fn load(fatbin: &'static [u8]) -> Result<Self, CudaError> {
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
        let known = || self.functions.lock();
        if let Some(found) = known().get(name) {
            return Ok(*found);
        }
        // The driver loads a kernel at its first use. Before the map's lock, which a thread that captures may take.
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

/// Programmatic dependent launch.
fn early() -> CUlaunchAttribute {
    // SAFETY: plain data, of which zeros are a value.
    let mut early: CUlaunchAttribute = unsafe { std::mem::zeroed() };
    early.id = CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    early.value.programmaticStreamSerializationAllowed = 1;
    early
}

fn clusters_of(blocks: u32) -> CUlaunchAttribute {
    // SAFETY: plain data, of which zeros are a value.
    let mut size: CUlaunchAttribute = unsafe { std::mem::zeroed() };
    size.id = CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    size.value.clusterDim.x = blocks;
    size.value.clusterDim.y = 1;
    size.value.clusterDim.z = 1;
    size
}

fn most_clusters(function: CUfunction, shared: usize, threads: u32, cluster: u32) -> Result<u32, CudaError> {
    // SAFETY: plain data, of which zeros are a value.
    let mut config: CUlaunchConfig = unsafe { std::mem::zeroed() };
    let mut size = clusters_of(cluster);
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
    /// Enqueues the kernel on a stream.
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

    /// As [`launch`](Self::launch), by programmatic dependent launch: the kernel may start before the one in front of
    /// it on the stream has ended (cuda/common/dependent_launch.cuh). It waits for that one itself, at the latest
    /// before its own end.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); only kernels of this library are in front on the stream, unless the kernel
    /// waits before it reads or writes what others do.
    pub unsafe fn launch_dependent(
        self,
        blocks: u32,
        threads: u32,
        shared: usize,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.launch_with(&mut [early()], [blocks, threads, shared as u32], stream, arguments) }
    }

    unsafe fn launch_with(
        self,
        attributes: &mut [CUlaunchAttribute],
        [blocks, threads, shared]: [u32; 3],
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: plain data, of which zeros are a value.
        let mut config: CUlaunchConfig = unsafe { std::mem::zeroed() };
        (config.gridDimX, config.gridDimY, config.gridDimZ) = (blocks, 1, 1);
        (config.blockDimX, config.blockDimY, config.blockDimZ) = (threads, 1, 1);
        (config.sharedMemBytes, config.hStream) = (shared, stream);
        (config.attrs, config.numAttrs) = (attributes.as_mut_ptr(), attributes.len() as u32);
        // SAFETY: the caller's; the configuration and its attributes live until the call has returned.
        unsafe { cuLaunchKernelEx(&config, self.function, arguments.as_mut_ptr(), std::ptr::null_mut()) }
            .result()
            .map_err(asked("launching a kernel"))
    }
}
