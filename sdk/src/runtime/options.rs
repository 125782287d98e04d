//! How to open a model.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use pagoda_custom_ops::tables::Tables;

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
    /// run, which wakes them sooner and takes cores from everything else in the process, other models too. So do the threads of
    /// an engine.
    pub sleep_when_idle: bool,
    /// How much the graph is rewritten.
    pub optimization: Optimization,
    /// Whether the ai.pagoda operators stay on the CPU, in a model on a GPU too. Pools of keys and values that lie in host
    /// memory are then used as they are; otherwise ONNX Runtime copies every pool to the GPU and back in each run, for which
    /// the run has to have it to itself.
    pub host_pools: bool,
    /// On a GPU: whether runs can be captured into CUDA graphs, as those of an engine are. Every node of the model has to be
    /// there then. Without effect on the CPU.
    pub cuda_graphs: bool,
    /// On a GPU: whether products of f32 may be computed of 10 bits of their factors' fractions (TF32), which is several times
    /// as fast. Otherwise they are computed as on the CPU, but for nodes that ask for it themselves (`HstuLinear`, in exported
    /// models that compute in bf16 or f16).
    pub tf32: bool,
    /// The ONNX Runtime library. `None`: the environment variable `PAGODA_ONNXRUNTIME`, then the folder `pagoda`
    /// beside libpagoda.so (or the program), then right beside it, then the system's loader. A process uses one; the first model that is opened decides.
    pub onnxruntime_path: Option<PathBuf>,
    /// Where to write a profile of every run, in Chrome's trace format, when the model is closed.
    pub profile_path: Option<PathBuf>,
    /// The tables that EmbeddingBag nodes of its graph name. It keeps them open.
    pub tables: Option<GraphTables>,
}

/// Embedding tables, for a graph that looks keys up: made from `Arc<Embeddings>`.
#[derive(Clone)]
pub struct GraphTables(pub(crate) Arc<dyn Tables>);

impl fmt::Debug for GraphTables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GraphTables")
    }
}
