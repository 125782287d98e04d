//! How to open a model.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use pagoda_custom_ops::side_channel::tables::Tables;

/// Where a model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Provider {
    /// On a GPU if ONNX Runtime can use one, else on the CPU, with a warning in the log. [`Model::provider`] says which it
    /// is, [`Model::provider_reason`] why.
    ///
    /// [`Model::provider`]: crate::Model::provider
    /// [`Model::provider_reason`]: crate::Model::provider_reason
    #[default]
    Auto,
    /// On the CPU.
    Cpu,
    /// On an NVIDIA GPU; an error if there is none.
    Cuda,
}

/// How much ONNX Runtime rewrites the graph when a model is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Optimization {
    /// All optimisations.
    #[default]
    All,
    /// Nothing.
    None,
    /// Those that keep the graph standard ONNX: constant folding, removal of redundant nodes.
    Basic,
    /// Fusions of nodes too, but no changes of memory layouts.
    Extended,
}

/// How to open a model.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct ModelOptions {
    /// Where it runs.
    pub provider: Provider,
    /// Which GPU.
    pub device_id: u32,
    /// Threads that work on one run; 0 = one for each core.
    pub intra_op_threads: u32,
    /// Whether those threads, and the workers of an engine, sleep as soon as there is no work. Otherwise they spin for
    /// a while after each run: the next run begins sooner, but the cores are taken from the rest of the process, other
    /// models too.
    pub sleep_when_idle: bool,
    /// How much the graph is rewritten.
    pub optimization: Optimization,
    /// Whether the ai.pagoda operators stay on the CPU even if the model runs on a GPU. Then pools of keys and values
    /// in host memory are used in place. Otherwise ONNX Runtime copies every such pool to the GPU and back in each run,
    /// and the run needs exclusive access to it.
    pub host_pools: bool,
    /// On a GPU: whether f32 matrix products may use TF32, with 10 bits of mantissa, which is several times as fast.
    /// Otherwise they have full precision, except in nodes that ask for TF32 themselves (`HstuLinear`, in exported
    /// models that compute in bf16 or f16).
    pub tf32: bool,
    /// The ONNX Runtime library. `None`: the environment variable `PAGODA_ONNXRUNTIME`, then the folder `pagoda` beside
    /// libpagoda.so (or the program), then the folder of libpagoda.so itself, then the system's loader. A process uses
    /// one library; the first model that is opened decides which.
    pub onnxruntime_path: Option<PathBuf>,
    /// Where to write a profile of every run, in Chrome's trace format, when the model is closed.
    pub profile_path: Option<PathBuf>,
    /// The tables for the EmbeddingBag nodes of its graph. The model keeps them open.
    #[cfg_attr(feature = "serde", serde(skip))]
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
