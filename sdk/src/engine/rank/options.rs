//! The options of an engine.

use std::path::PathBuf;
use std::time::Duration;

use crate::config::{ModelOptions, Offload, Pages, StoreOptions};
use crate::embedding::{CacheSize, EmbeddingConfig};
use crate::error::{Error, Result};

/// How to open an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Where the model runs, and on how many threads. Leave `tables` unset: the model folder has them.
    pub model: ModelOptions,
    /// The size of the KV cache in memory. `None` or 0: every request computes its whole history. Models without a cache
    /// (`kv.cache` in pagoda.json) ignore this.
    pub kv: Option<Pages>,
    /// Bytes of host memory for keys and values that were evicted from the pool. It is pinned if the model can run on a
    /// GPU. Reading back from it is much faster than from a store. Allocated when the engine is opened. 0: none.
    pub host_bytes: u64,
    /// The store for keys and values that were evicted from memory. It survives restarts. `None`: no store.
    pub store: Option<EngineStore>,
    /// When they are written there.
    pub offload: Offload,
    /// As [`KvOptions::ahead_percent`](crate::KvOptions::ahead_percent).
    pub ahead_percent: u32,
    /// How embedding tables are cached.
    pub tables: TableOptions,
    /// The number of batches that run at the same time; 1 to 256. They share weights, tables and caches.
    pub instances: u32,
    /// Maximum number of requests in a batch; 1 or more.
    pub max_batch: u32,
    /// Maximum number of rows in a batch: new events and candidates. A single request with more rows runs alone.
    pub max_batch_rows: u32,
    /// On a GPU: the batch shapes that run as CUDA graphs, which saves the launch time of each kernel. A shape is captured
    /// at its first batch and replayed from then on. A batch is padded to the first shape that it fits into, in the order of
    /// their rows. A batch that fits into none runs without a graph, and is counted. Empty: no CUDA graphs.
    pub graphs: Vec<GraphShape>,
    /// The coalescing window: how long a request waits for others to share its batch. 0: it does not wait; then a batch has
    /// the requests that arrived while all instances were busy.
    pub max_delay: Duration,
    /// Maximum number of waiting requests. Further ones are rejected with CAPACITY.
    pub queue: u32,
    /// Bytes for the events of users as they were sent. With them, requests that bring only new events still work after an
    /// eviction or a swap has dropped the keys and values of the earlier ones. The least recently used users are forgotten
    /// first. 0: no events are remembered.
    pub remember_events: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            model: ModelOptions::default(),
            kv: Some(Pages::Bytes(1 << 30)),
            host_bytes: 0,
            store: None,
            offload: Offload::default(),
            ahead_percent: 12,
            tables: TableOptions::default(),
            instances: 1,
            max_batch: 64,
            max_batch_rows: 8192,
            graphs: Vec::new(),
            max_delay: Duration::ZERO,
            queue: 4096,
            remember_events: 64 << 20,
        }
    }
}

/// The shape of batches that share a CUDA graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GraphShape {
    /// Maximum number of users.
    pub users: u32,
    /// Maximum number of rows of all users: new events and candidates.
    pub rows: u32,
    /// Maximum number of candidates of all users; 0: as many as rows.
    pub candidates: u32,
    /// Maximum number of pages of all users; 0: enough for the longest history of each, limited by the size of the pool.
    pub pages: u32,
}

impl GraphShape {
    /// Parses shapes separated by commas. Each is users x rows, users x rows x candidates, or users x rows x candidates x
    /// pages: `1x384, 8x3072x2048`.
    pub fn parse(text: &str) -> Result<Vec<Self>> {
        text.split(',').map(str::trim).filter(|shape| !shape.is_empty()).map(Self::parse_one).collect()
    }

    fn parse_one(text: &str) -> Result<Self> {
        let numbers: Vec<Option<u32>> = text.split('x').map(|number| number.trim().parse().ok()).collect();
        let shape = |users, rows, candidates, pages| Self { users, rows, candidates, pages };
        match numbers[..] {
            [Some(users), Some(rows)] => Ok(shape(users, rows, 0, 0)),
            [Some(users), Some(rows), Some(candidates)] => Ok(shape(users, rows, candidates, 0)),
            [Some(users), Some(rows), Some(candidates), Some(pages)] => Ok(shape(users, rows, candidates, pages)),
            _ => {
                let message = format!(
                    "{text:?} is not a shape: expected users x rows or users x rows x candidates, for example 8x3072x2048"
                );
                Err(Error::invalid("graphs", message))
            }
        }
    }
}

/// The store under the KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStore {
    /// Its folder. Only one process can have it open.
    pub path: PathBuf,
    /// Its options.
    pub options: StoreOptions,
}

impl EngineStore {
    /// A store in a folder, with default options.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), options: StoreOptions::default() }
    }
}

/// How the embedding tables of a model folder are cached. Tables that are part of the graph ignore this.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableOptions {
    /// The cache size of each table. `None`: the whole table, at most 256 MiB of it.
    pub cache: Option<CacheSize>,
    /// The tiers below the caches, as in `EmbeddingConfig`; its models are ignored. `None`: host memory with all rows.
    pub floors: Option<EmbeddingConfig>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read() {
        let shape = |users, rows, candidates, pages| GraphShape { users, rows, candidates, pages };
        assert_eq!(GraphShape::parse("").unwrap(), []);
        assert_eq!(
            GraphShape::parse("1x2, 3 x 4x5,6x7x8x9,").unwrap(),
            [shape(1, 2, 0, 0), shape(3, 4, 5, 0), shape(6, 7, 8, 9)]
        );
        for bad in ["1", "1x", "axb", "1x-2", "1x2x3x4x5", "1x2;3x4", "1x99999999999"] {
            let error = GraphShape::parse(bad).unwrap_err();
            assert_eq!(error.argument(), Some("graphs"), "{bad}");
        }
    }
}
