//! The values of a ps.json that only HugeCTR uses. They are checked, and kept so that a program can show them.

use std::path::PathBuf;

/// The values of the whole file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HugeCtrFields {
    /// One for each model, in the order of the file.
    pub models: Vec<HugeCtrModel>,
    /// The values of the tier in host memory, if there is one.
    pub memory: Option<HugeCtrMemory>,
    /// The batch sizes of the tier in Redis, if there is one.
    pub redis: Option<Batch>,
    /// The values of the tier on disk, if there is one.
    pub disk: Option<HugeCtrDisk>,
}

/// The values of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct HugeCtrModel {
    /// The most samples of one request (`max_batch_size`).
    pub max_batch: Option<u64>,
    /// The dense model (`dense_file`).
    pub dense_file: Option<PathBuf>,
    /// HugeCTR's description of the dense model (`network_file`). It is not read.
    pub network_file: Option<PathBuf>,
    /// The most dense features of a sample (`maxnum_des_feature_per_sample`).
    pub max_dense_features: u64,
    /// The number of elements of a prediction (`label_dim`).
    pub labels: u64,
    /// The number of slots of a sample (`slot_num`).
    pub slots: u64,
    /// For each table the most keys of one sample (`maxnum_catfeature_query_per_table_per_sample`).
    pub max_keys_per_sample: Option<Vec<u64>>,
    /// The options of HugeCTR's GPU cache.
    pub gpu: HugeCtrGpuCache,
}

/// The options of HugeCTR's GPU cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugeCtrGpuCache {
    /// Buffers for lookups (`num_of_worker_buffer_in_pool`).
    pub worker_buffers: u32,
    /// Buffers for refreshes (`num_of_refresher_buffer_in_pool`).
    pub refresh_buffers: u32,
    /// Whether lookups use the stream of the framework around them (`use_context_stream`).
    pub context_stream: bool,
    /// Whether host memory is page-locked (`enable_pagelock`).
    pub page_locked: bool,
    /// Which of two implementations of the cache is used (`use_hctr_cache_implementation`).
    pub own_implementation: bool,
}

/// The values of the tier in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugeCtrMemory {
    /// The number of bytes that are allocated at a time (`allocation_rate`).
    pub allocation_bytes: u64,
    /// The batch sizes.
    pub batch: Batch,
}

/// The values of the tier on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugeCtrDisk {
    /// The number of threads that read and write (`num_threads`).
    pub threads: u32,
    /// The batch sizes.
    pub batch: Batch,
}

/// The batch sizes of a tier (`max_batch_size`, or `max_get_batch_size` and `max_set_batch_size`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The most keys of one read.
    pub get: u32,
    /// The most keys of one write.
    pub set: u32,
}
