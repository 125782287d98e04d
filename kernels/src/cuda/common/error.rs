//! Errors.

use std::fmt;

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

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

/// Turns the driver's error into ours, with what was asked of it.
pub fn asked(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { what, error: error.0 }
}
