//! Embedding tables: a cache over tiers that are larger and slower, down to a table file on disk.
//!
//! `sdk/docs/embedding.md` states what lookups and updates guarantee, `embedding-config.md` describes the configuration
//! file, and `embedding-table.md` the format of table files.

mod config;
mod eviction;
mod hash;
mod log_throttle;
mod lookup;
mod options;
mod panic_guard;
mod row;
mod source;
mod table;
#[cfg(feature = "serde")]
mod table_data;
mod tiers;
mod update;

pub use config::{Batch, HugeCtrDisk, HugeCtrFields, HugeCtrGpuCache, HugeCtrMemory, HugeCtrModel, PsJson};
pub use eviction::Eviction;
pub use lookup::Miss;
pub use lookup::pooling::Combiner;
pub use options::{
    Address, CacheOptions, CacheSize, DiskOptions, EmbeddingOptions, MemoryOptions, ModelTables, OverflowOptions,
    Preload, RedisOptions, Secret, TableSpec, TierOptions, TlsOptions,
};
pub use row::{Layout, RowType};
pub use source::{Chunk, Source, SourceOptions};
pub use table::open_table::Estimate;
pub use table::registry::Embeddings;
pub use table::stats::{LookupStats, TableStats};
pub use table::table_handle::EmbeddingTable;
pub use tiers::disk::{Built, build};
pub use tiers::redis::RedisStats;
pub use update::Reach;
