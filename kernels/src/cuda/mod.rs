//! The operators on NVIDIA's GPUs.
//!
//! A [`Gpu`] is a device with the kernels loaded onto it; [`Gpu::attention`], [`Gpu::append`] and those of the dense
//! operators put one call of an operator on a stream. Calls are described by device addresses, because index tensors live on
//! the device too: nothing here waits for the GPU, or allocates on it but counters in the first call of a stream, so a launch can
//! be captured into a CUDA graph and replayed.
//!
//! Whoever has the index tensors in host memory checks them first ([`crate::HstuAttention::check`]). The kernels do not
//! trust them: whatever they hold, no kernel reads or writes outside its tensors.
//!
//! The kernels themselves are in `kernels/cuda`.

mod append;
mod arrivals;
mod attention;
mod bag;
mod call;
mod capture;
mod counters;
mod dense;
mod dense_call;
mod dense_hopper;
mod embed;
mod ends;
mod held;
mod linear;
mod maps;
mod memory;
mod missing;
mod module;
mod settled;
mod table;
mod tokens;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute_enum as Attribute, CUresult};
pub use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::driver::{CudaContext, DriverError, result};

pub use arrivals::{Arrivals, hold_for_arrivals, with_arrivals};
pub use bag::{GivenRows, Slots, TableBag};
pub use call::{Append, Attention, Cache, Rows, Scratch, Type};
pub use capture::{capture, may_wait, no_capture};
pub use counters::{KeptCounters, keep_counters};
pub use dense_call::{DensePath, Gate, Norm, Output, Project, Taken};
pub use embed::{Embed, Lookup};
pub use ends::Unit;
pub use held::{BagCall, HeldTable, HostRows};
pub use linear::Linear;
pub use memory::{DeviceMemory, Event, PinnedMemory, SideStream};
pub use missing::BagScratch;
use module::Module;
pub use module::built;
pub use settled::{is_settled, with_settled};
pub use table::{DeviceTable, TableLookup, TablePut};
pub use tokens::Tokens;

/// A kernel that computes `HstuAttention`; later ones are faster and take less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// Every type, D up to 512.
    Plain,
    /// Matrix units of sm_80 and later: f16 and bf16, D = 32, 64, 128 or 256.
    Mma,
    /// Warpgroup matrix units and the copy engine of sm_90a: as `Mma`.
    Hopper,
}

/// Why a call was not launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// The library was built without nvcc.
    NotBuilt,
    /// The host has no driver of NVIDIA.
    NoDriver,
    /// The driver refused something.
    Driver {
        /// What was asked of it.
        what: &'static str,
        /// What it answered.
        error: CUresult,
    },
    /// No kernel takes the call, or there is no such device.
    Unsupported(String),
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotBuilt => {
                write!(f, "this build has no CUDA kernels: build again with nvcc (`make build CUDA=1` fetches it)")
            }
            Self::NoDriver => write!(f, "no GPU: libcuda.so.1, NVIDIA's driver, is not on this machine"),
            Self::Driver { what, error } => write!(f, "{what}: the driver says {error:?}"),
            Self::Unsupported(message) => f.write_str(message),
        }
    }
}

impl std::error::Error for CudaError {}

impl CudaError {
    /// Whether there was no memory for it: less may fit.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Driver { error: CUresult::CUDA_ERROR_OUT_OF_MEMORY, .. })
    }
}

pub(crate) fn asked(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { what, error: error.0 }
}

/// A GPU with the kernels on it. Any thread may use it.
#[derive(Debug)]
pub struct Gpu {
    context: Arc<CudaContext>,
    append: Module,
    plain: Module,
    bag: Module,
    table: Module,
    tokens: Module,
    dense: Module,
    ends: Module,
    mma: Option<Module>,
    hopper: Option<Module>,
    dense_hopper: Option<Module>,
    linear_hopper: Option<Module>,
    multiprocessors: u32,
    counters: counters::Counters,
}

impl Gpu {
    /// Opens the device of that number, in its primary context: the one that ONNX Runtime and PyTorch use too.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        if !module::built() {
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
            append: Module::load(module::APPEND)?,
            plain: Module::load(module::PLAIN)?,
            bag: Module::load(module::BAG)?,
            table: Module::load(module::TABLE)?,
            tokens: Module::load(module::TOKENS)?,
            dense: Module::load(module::DENSE)?,
            ends: Module::load(module::ENDS)?,
            mma: (major >= 8).then(|| Module::load(module::MMA)).transpose()?,
            hopper: (major == 9).then(|| Module::load(module::HOPPER)).transpose()?,
            dense_hopper: (major == 9).then(|| Module::load(module::DENSE_HOPPER)).transpose()?,
            linear_hopper: (major == 9).then(|| Module::load(module::LINEAR_HOPPER)).transpose()?,
            multiprocessors: multiprocessors.max(1) as u32,
            counters: counters::Counters::default(),
            context,
        })
    }

    /// The device of that number, opened once for the whole process.
    pub fn shared(ordinal: usize) -> Result<&'static Self, CudaError> {
        static GPUS: Mutex<Vec<(usize, &'static Gpu)>> = Mutex::new(Vec::new());
        // First: opening one asks for it too, and must not wait for someone who waits for the list.
        let _hold = no_capture();
        let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Bytes of memory on the device that no one has.
    pub fn free_bytes(&self) -> Result<usize, CudaError> {
        self.bind()?;
        result::mem_get_info().map(|(free, _)| free).map_err(asked("asking how much memory is free"))
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(asked("making the context current"))
    }

    /// The device's context, for allocations and streams.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The kernels that take a call on this device, slowest first.
    pub fn paths(&self, call: &Attention) -> Vec<Path> {
        let mut paths = vec![Path::Plain];
        paths.extend((self.mma.is_some() && call.suits_matrix_units()).then_some(Path::Mma));
        paths.extend((self.hopper.is_some() && call.suits_copy_engine()).then_some(Path::Hopper));
        paths
    }

    /// Puts `HstuAttention` on a stream, by the fastest kernel that takes the call. Every element of the output is
    /// written that is in some user's rows. A call that appends does what [`append`](Self::append) does, too.
    ///
    /// # Safety
    /// Every address of the call is one of this device, of memory as long as the call's shapes say and alive until the
    /// stream has done this; nothing else writes it meanwhile, or touches the output, or what is appended. Where indices are
    /// said to be settled, nothing on the stream in front of this writes them.
    pub unsafe fn attention(&self, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
        let path = *self.paths(call).last().expect("there is always a plain one");
        // SAFETY: the caller's.
        unsafe { self.attention_by(path, call, stream) }
    }

    /// How much memory on the device makes a call faster, where it is given to [`attention_in`](Self::attention_in); 0
    /// where none does. It depends on the shapes alone: B, T, H, D, the page size and how many page ids there are.
    pub fn scratch_bytes(&self, call: &Attention) -> Result<usize, CudaError> {
        let most = self.most_scratch_bytes(call)?;
        self.bind()?;
        Ok(if most > 0 && attention::wants_scratch(self, call)? { most } else { 0 })
    }

    /// How much memory [`attention_in`](Self::attention_in) uses where it is given that much, faster or not.
    pub fn most_scratch_bytes(&self, call: &Attention) -> Result<usize, CudaError> {
        call.check()?;
        Ok(if self.paths(call).contains(&Path::Hopper) { attention::scratch_bytes(call) } else { 0 })
    }

    /// As [`attention`](Self::attention), with memory to work in, which is not used where it is less than
    /// [`most_scratch_bytes`](Self::most_scratch_bytes). The output is the same to the bit.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention); nothing else touches the scratch memory until the stream has done this.
    pub unsafe fn attention_in(&self, call: &Attention, scratch: Scratch, stream: CUstream) -> Result<(), CudaError> {
        let path = *self.paths(call).last().expect("there is always a plain one");
        // SAFETY: the caller's.
        unsafe { self.attend(path, call, Some(scratch), stream) }
    }

    /// As [`attention`](Self::attention), by the kernel given.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention).
    pub unsafe fn attention_by(&self, path: Path, call: &Attention, stream: CUstream) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.attend(path, call, None, stream) }
    }

    /// # Safety
    /// As for [`attention_in`](Self::attention_in).
    unsafe fn attend(
        &self,
        path: Path,
        call: &Attention,
        scratch: Option<Scratch>,
        stream: CUstream,
    ) -> Result<(), CudaError> {
        call.check()?;
        if !self.paths(call).contains(&path) {
            return Err(CudaError::Unsupported(format!("the {path:?} kernel does not take {call:?} on this device")));
        }
        if call.rows.total_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY (both): the caller's.
        if let Some(append) = call.appended().filter(|_| path != Path::Hopper) {
            // SAFETY: as above.
            unsafe { append::launch(self, &append, stream) }?;
        }
        // SAFETY: as above.
        unsafe { attention::launch(self, path, call, scratch, stream) }
    }

    /// Puts `PagedKvAppend` on a stream, in place on the pool.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention); nothing else touches the slots that are written.
    pub unsafe fn append(&self, call: &Append, stream: CUstream) -> Result<(), CudaError> {
        call.check()?;
        if call.rows.total_rows == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { append::launch(self, call, stream) }
    }

    /// Puts a lookup in an embedding table on a stream. It may run while rows are put into the table on other streams: what
    /// it finds is whole, as it was before or after.
    ///
    /// # Safety
    /// Every address of the call is one of this device, of memory as long as the call says and alive until the stream has
    /// done this; nothing but lookups and puts uses the table's meanwhile, and nothing else the rest of what is written.
    pub unsafe fn table_lookup(&self, call: &TableLookup, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { table::lookup(self, call, stream) }
    }

    /// As [`table_lookup`](Self::table_lookup), and combines the rows into a vector for each slot of keys, in one launch.
    ///
    /// # Safety
    /// As for [`table_lookup`](Self::table_lookup).
    pub unsafe fn table_bag(&self, call: &TableBag, stream: CUstream) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(asked("making the context current"))?;
        // SAFETY: the caller's.
        unsafe { bag::launch(self, call, stream) }
    }

    /// Puts on a stream that rows go into an embedding table, each in place of the least recently used one of its set if
    /// there is no room. It may run beside lookups and other puts.
    ///
    /// # Safety
    /// As for [`table_lookup`](Self::table_lookup).
    pub unsafe fn table_put(&self, call: &TablePut, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { table::put(self, call, stream) }
    }

    /// Puts on a stream that tokens of a user are packed, out of their pages.
    ///
    /// # Safety
    /// As for [`attention`](Self::attention).
    pub unsafe fn pack(&self, tokens: &Tokens, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { tokens::launch(self, "pack", tokens, stream) }
    }

    /// Puts on a stream that packed tokens of a user go into their pages.
    ///
    /// # Safety
    /// As for [`append`](Self::append).
    pub unsafe fn unpack(&self, tokens: &Tokens, stream: CUstream) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: the caller's.
        unsafe { tokens::launch(self, "unpack", tokens, stream) }
    }

    /// Puts a copy of `bytes` bytes on a stream: `PagedKvAppend` works on one pool, so whoever has two copies first.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "loads the driver's library")]
    fn a_machine_without_a_gpu_is_told_so() {
        match Gpu::open(0) {
            Ok(gpu) => assert!(gpu.context().name().is_ok()),
            Err(CudaError::NotBuilt) => assert!(!module::built()),
            Err(error) => assert!(error.to_string().contains("GPU") || error.to_string().contains("device"), "{error}"),
        }
    }
}
