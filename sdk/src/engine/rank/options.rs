//! What can be chosen when an engine is opened.

use std::time::Duration;

use super::super::stores::EngineStore;
use crate::embedding::{CacheSize, TierOptions};
use crate::kv::{KvFormat, KvSize, Offload};
use crate::runtime::ModelOptions;

/// How to open an engine.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct EngineOptions {
    /// Where the model runs, and on how many threads. `tables` must be `None`: an engine opens the tables of its model
    /// folder.
    pub model: ModelOptions,
    /// The size of the pool of keys and values. `None`, or a size of 0: nothing is cached, and every request computes
    /// its whole history. A model that does not support the cache (`kv.cache` in pagoda.json) runs without it in any
    /// case.
    pub kv_size: Option<KvSize>,
    /// How pages hold keys and values, in memory and in the store; `None`: as the model was exported.
    #[cfg_attr(feature = "serde", serde(with = "crate::folder::kv_format_word"))]
    pub kv_format: Option<KvFormat>,
    /// Bytes of host memory for keys and values that were evicted from the pool; 0: none. The memory is allocated when
    /// the engine is opened, and is pinned if the model can run on a GPU. Loading from it is faster than loading from a
    /// store.
    pub host_bytes: u64,
    /// The store on disk for keys and values that were evicted from memory. They survive a restart. `None`: no store.
    pub store: Option<EngineStore>,
    /// When keys and values are written to the store.
    pub offload: Offload,
    /// As [`KvOptions::ahead_percent`](crate::KvOptions::ahead_percent).
    pub ahead_percent: u32,
    /// The cache and the tiers of the embedding tables.
    pub tables: TableOptions,
    /// How many batches run at the same time; 1 to 256. They share the weights, the tables and the caches.
    pub instances: u32,
    /// The maximum number of requests in a batch; 1 or more.
    pub max_batch: u32,
    /// The maximum number of rows in a batch: new events and candidates. A request with more rows runs alone.
    pub max_batch_rows: u32,
    /// On a GPU: the batch shapes that are captured into CUDA graphs. A graph is captured when its shape is first used,
    /// and replayed after that, which saves the launch of every kernel. A batch uses the shape with the fewest rows
    /// that it fits into, and is padded to it. A batch that fits into no shape runs without a graph, and is counted.
    /// Empty: no graphs.
    pub cuda_graphs: Vec<GraphShape>,
    /// The coalescing window: how long a request waits for other requests, to run in one batch with them. 0: it does
    /// not wait; a batch then has the requests that arrived while all instances were busy.
    pub max_delay: Duration,
    /// The maximum number of queued requests. A request beyond it is rejected with CAPACITY.
    pub queue: u32,
    /// Bytes for the event log: the events of users as they were sent, a few numbers each. With it, a request that
    /// sends only new events is served even if the keys and values of the earlier events are gone, after an eviction or
    /// a swap. The least recently used users are removed first. 0: no event log.
    pub remember_bytes: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            model: ModelOptions::default(),
            kv_size: Some(KvSize::Bytes(1 << 30)),
            kv_format: None,
            host_bytes: 0,
            store: None,
            offload: Offload::default(),
            ahead_percent: 12,
            tables: TableOptions::default(),
            instances: 1,
            max_batch: 64,
            max_batch_rows: 8192,
            cuda_graphs: Vec::new(),
            max_delay: Duration::ZERO,
            queue: 4096,
            remember_bytes: 64 << 20,
        }
    }
}

/// The largest batch that a CUDA graph has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct GraphShape {
    /// The maximum number of users; 1 or more.
    pub users: u32,
    /// The maximum number of rows of all users together: new events and candidates; 1 or more.
    pub rows: u32,
    /// The maximum number of candidates of all users together; 0: as many as `rows`.
    #[cfg_attr(feature = "serde", serde(default))]
    pub candidates: u32,
    /// The maximum number of pages of all users together; 0: enough for the longest history of each user, but no more
    /// than the pool has.
    #[cfg_attr(feature = "serde", serde(default))]
    pub pages: u32,
}

/// How the embedding tables of a model folder are kept. They have no effect on tables that are part of the graph.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct TableOptions {
    /// The size of the cache of each table. `None`: a table of up to 256 MiB is cached as a whole, a larger one with
    /// 256 MiB.
    pub cache: Option<CacheSize>,
    /// The backing tiers under the caches. `None`: host memory, with all rows.
    pub tiers: Option<TierOptions>,
}
