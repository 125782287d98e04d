//! What can be chosen when an engine is opened.

use std::path::PathBuf;
use std::time::Duration;

use crate::embedding::{CacheSize, TierOptions};
use crate::error::{Error, Result};
use crate::kv::{Offload, Pages};
use crate::runtime::ModelOptions;
use crate::store::StoreOptions;

/// How to open an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Where the model runs, and on how many threads. Its `tables` are those of the model folder.
    pub model: ModelOptions,
    /// How much of users' keys and values is kept in memory. `None`, or nothing: every request computes its whole
    /// history. Models that can not keep them (`kv.cache` in pagoda.json) go without in any case.
    pub kv: Option<Pages>,
    /// Bytes of host memory for keys and values that have left the pool, pinned if the model can be on a GPU: from there
    /// they come back much sooner than from a store. Taken when the engine is opened. 0: none.
    pub host_bytes: u64,
    /// Where keys and values go that memory has no room for, and where they are found after a restart. `None`: nowhere.
    pub store: Option<EngineStore>,
    /// When they go there.
    pub offload: Offload,
    /// As [`KvOptions::ahead_percent`](crate::KvOptions::ahead_percent).
    pub ahead_percent: u32,
    /// How embedding tables are kept.
    pub tables: TableOptions,
    /// How many batches run at the same time, on one set of weights, tables and caches; 1 to 256.
    pub instances: u32,
    /// The most requests of one batch; 1 or more.
    pub max_batch: u32,
    /// The most rows of one batch: new events, and candidates. A request that alone has more runs alone.
    pub max_batch_rows: u32,
    /// On a GPU: shapes of batches that are captured into CUDA graphs, each when it is first used, and replayed from then on,
    /// which spares the time that launching every kernel takes. A batch takes the first that it fits into, in the order
    /// of their rows, and is filled up to it; one that fits into none runs without a graph, and is counted. Empty: none.
    pub graphs: Vec<GraphShape>,
    /// How long a request waits for others to run with. 0: not at all; then requests run together that came while all
    /// instances were busy.
    pub max_delay: Duration,
    /// The most requests that wait; more are refused with CAPACITY.
    pub queue: u32,
    /// Bytes for the events of users as they were sent, a few numbers each, so that requests which bring only new
    /// events are served also when the keys and values of the earlier ones are gone: after an eviction, or a swap. The
    /// users who were not seen for longest are forgotten first. 0: none are remembered.
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
    /// The most users.
    pub users: u32,
    /// The most rows of all of them: new events, and candidates.
    pub rows: u32,
    /// The most candidates of all of them; 0: as many as rows.
    pub candidates: u32,
    /// The most pages of all of them; 0: as many as each user's longest history takes, and no more than there are.
    pub pages: u32,
}

impl GraphShape {
    /// Reads shapes, separated by commas, each as users x rows, or users x rows x candidates, or all four:
    /// `1x384, 8x3072x2048`.
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
                let message =
                    format!("{text:?} is no shape: users x rows, or users x rows x candidates, as 8x3072x2048");
                Err(Error::invalid("graphs", message))
            }
        }
    }
}

/// A store under the cache of keys and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineStore {
    /// Its folder, which one process has open at a time.
    pub path: PathBuf,
    /// How it behaves.
    pub options: StoreOptions,
}

impl EngineStore {
    /// A store in a folder, with the options that stores have if nothing is said.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), options: StoreOptions::default() }
    }
}

/// How the embedding tables of a model folder are kept. Tables that are in the graph have no choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableOptions {
    /// The size of the cache of each table. `None`: all of a table of up to 256 MiB, and that much of a larger one.
    pub cache: Option<CacheSize>,
    /// The tiers below the caches. `None`: host memory, with all rows.
    pub tiers: Option<TierOptions>,
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
