//! What a caller can choose.

use std::path::PathBuf;

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Provider {
    /// On a GPU where ONNX Runtime has one, else on the CPU: [`Model::provider`](crate::Model::provider) says which
    /// it is, [`Model::provider_reason`](crate::Model::provider_reason) why, and a warning is logged.
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On an NVIDIA GPU, or not at all.
    Cuda,
}

/// How much ONNX Runtime rewrites the graph when a model is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Optimization {
    /// Everything it can do.
    #[default]
    All,
    /// Nothing.
    None,
    /// What keeps the graph standard ONNX: constant folding, removal of what is redundant.
    Basic,
    /// Fusions of nodes too, but not of memory layouts.
    Extended,
}

/// How to open a model.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// Where it runs.
    pub provider: Provider,
    /// Which GPU.
    pub device_id: u32,
    /// Threads that work on one run; 0 = one for each core.
    pub intra_op_threads: u32,
    /// Whether those threads sleep while there is nothing to do. Otherwise they look out for work for a while after each
    /// run, which wakes them sooner and takes cores from everything else in the process, other models too.
    pub sleep_when_idle: bool,
    /// How much the graph is rewritten.
    pub optimization: Optimization,
    /// The ONNX Runtime library. `None`: the environment variable `PAGODA_ONNXRUNTIME`, then beside libpagoda.so (or
    /// the program), then the system's loader. A process uses one; the first model that is opened decides.
    pub onnxruntime_path: Option<PathBuf>,
    /// Where to write a profile of every run, in Chrome's trace format, when the model is closed.
    pub profile_path: Option<PathBuf>,
}
