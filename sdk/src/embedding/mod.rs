//! Embedding rows: a cache over floors that are larger and slower, down to a table file on disk.
//!
//! `sdk/docs/embedding.md` says what lookups and changes promise, `embedding-config.md` what a configuration says, and
//! `embedding-table.md` what is in a table file.

mod absent;
mod acknowledged;
mod cache;
mod cluster;
mod config;
mod device;
mod disk;
mod distinct;
mod doubtful;
mod floor;
mod later;
mod lookup;
mod memory;
mod mix;
mod open;
mod origin;
mod overflow;
mod pool;
mod refresh;
mod row;
mod server;
mod source;
mod stamps;
mod stats;
mod table;
mod table_files;
mod update;
mod view;
mod walk;

pub use cluster::RedisStats;
pub use config::{
    Address, Batch, CacheConfig, CacheSize, DiskConfig, EmbeddingConfig, Eviction, GpuConfig, MemoryConfig,
    ModelConfig, OverflowConfig, RedisConfig, Secret, Start, TableConfig, TlsConfig,
};
pub use disk::{Built, build};
pub use lookup::{Looked, Miss};
pub use open::Estimate;
pub use pool::Combiner;
pub use row::{Layout, RowType};
pub use server::Embeddings;
pub use source::{Chunk, Source, SourceOptions};
pub use stats::TableStats;
pub use update::Reach;
pub use view::EmbeddingTable;
