//! What an embedding configuration says: HugeCTR's ps.json, and words of our own beside it.
//!
//! `sdk/docs/embedding-config.md` describes every key.

mod address;
mod floors;
mod models;
mod reader;
mod tables;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::row::RowType;
use crate::error::{Error, Result, Status};
use crate::json::Json;
use reader::{Field, Keys, Object};

pub use address::Address;

/// Models with their tables, and the floors that all of them share.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingConfig {
    /// Whether keys in HugeCTR's table files have 64 bits; otherwise they have 32 (`supportlonglong`).
    pub long_keys: bool,
    /// The models, each under a name of its own.
    pub models: Vec<ModelConfig>,
    /// The floor in host memory (`volatile_db`).
    pub memory: Option<MemoryConfig>,
    /// The floor in a Redis Cluster (`volatile_db`).
    pub redis: Option<RedisConfig>,
    /// The floor on disk (`persistent_db`).
    pub disk: Option<DiskConfig>,
}

impl EmbeddingConfig {
    /// Reads a configuration. Relative paths in it are relative to `folder`, if there is one.
    ///
    /// # Errors
    /// Anything that is not understood, is of the wrong type or out of range, or that there is none of here; the error's
    /// argument names the place, e.g. `models[0].sparse_files[1]`.
    pub fn from_json(text: &str, folder: Option<&Path>) -> Result<Self> {
        let json = Json::parse(text)?;
        let top = Object::top(&json, &KEYS)?;
        if let Some(fused) = top.get("fuse_embedding_table")
            && fused.flag()?
        {
            return Err(
                fused.unsupported("true is not supported: tables are not fused, each has keys of its own; say false")
            );
        }
        if let Some(source) = top.get("update_source") {
            floors::refuse_update_source(&source)?;
        }
        let (memory, redis) = floors::volatile(top.get("volatile_db"), folder)?;
        let disk = top.get("persistent_db").map(|disk| floors::persistent(&disk, folder)).transpose()?;
        Ok(Self {
            long_keys: top.flag("supportlonglong", true)?,
            models: models::read(&top.required("models", "the models, a list")?, folder)?,
            memory,
            redis,
            disk: disk.flatten(),
        })
    }

    /// Reads a configuration file. Relative paths in it are relative to its folder.
    ///
    /// # Errors
    /// As [`Self::from_json`], with the file named before the place; and if the file can not be read.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let status = if error.kind() == ErrorKind::NotFound { Status::NotFound } else { Status::Io };
            Error::new(status, format!("can not be read: {error}")).about(name.to_string())
        })?;
        Self::from_json(&text, path.parent()).map_err(|error| {
            let place = error.argument().unwrap_or("configuration");
            Error::new(error.status(), error.message()).about(format!("{name}: {place}"))
        })
    }
}

const KEYS: Keys = Keys {
    known: &["supportlonglong", "fuse_embedding_table", "models", "volatile_db", "persistent_db", "update_source"],
    refused: &[("i64_input_key", "it is Python's name; in JSON it is `supportlonglong`")],
};

/// A model: which tables it looks keys up in, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Its name (`model`). There is no `/` in it, so `model/table` names one table of one model.
    pub name: String,
    /// Its tables, at least one, each under a name of its own.
    pub tables: Vec<TableConfig>,
    /// The cache above the floors, one for each table. `None`: every lookup goes to the floors (`gpucache`).
    pub cache: Option<CacheConfig>,
    /// The most samples of one request (`max_batch_size`). `None`: not said.
    pub max_batch: Option<u64>,
    /// On which GPUs graphs may have its tables in a cache (`deployed_device_list`); none: on any.
    pub devices: Vec<u32>,
    /// The dense model (`dense_file`).
    pub dense_file: Option<PathBuf>,
    /// HugeCTR's description of the dense model (`network_file`). It is not read.
    pub network_file: Option<PathBuf>,
    /// The most dense features of a sample (`maxnum_des_feature_per_sample`).
    pub max_dense_features: u64,
    /// How many numbers a prediction has (`label_dim`).
    pub labels: u64,
    /// How many slots a sample has (`slot_num`).
    pub slots: u64,
    /// What HugeCTR's GPU cache was told.
    pub gpu: GpuConfig,
}

impl ModelConfig {
    /// Reads one model, an element of a configuration's `models`. Relative paths in it are relative to `folder`, if there
    /// is one.
    ///
    /// # Errors
    /// As [`EmbeddingConfig::from_json`], about `model` and places in it.
    pub fn from_json(text: &str, folder: Option<&Path>) -> Result<Self> {
        let json = Json::parse(text).map_err(|error| error.about("model"))?;
        models::read_model(&Field::new("model", &json), folder)
    }
}

/// A table of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct TableConfig {
    /// Its name (`embedding_table_names`).
    pub name: String,
    /// The file or folder with its rows (`sparse_files`).
    pub path: PathBuf,
    /// How many numbers a row has (`embedding_vecsize_per_table`).
    pub dim: u32,
    /// What a key gets that was not found, or not soon enough: `dim` numbers (`default_value_for_each_table`).
    pub default: Vec<f32>,
    /// The most keys of one sample (`maxnum_catfeature_query_per_table_per_sample`). `None`: not said.
    pub max_keys_per_sample: Option<u64>,
    /// How its rows are kept (`row_type_per_table`). `None`: as in its file.
    pub row_type: Option<RowType>,
}

impl TableConfig {
    /// Whether two models mean the same table, and so share it: the same name, file, length and type of rows. What a key
    /// gets that was not found may differ.
    pub fn is_same_table(&self, other: &Self) -> bool {
        self.name == other.name && self.path == other.path && self.dim == other.dim && self.row_type == other.row_type
    }
}

/// The cache of each table of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheConfig {
    /// How large it is.
    pub size: CacheSize,
    /// With a lower hit rate than this the missing rows are waited for; otherwise the default is returned for them and
    /// they are fetched in the background (`hit_rate_threshold`). 1 and more: they are always waited for.
    pub hit_rate_threshold: f64,
    /// Seconds from the start to the first refresh (`refresh_delay`).
    pub refresh_delay: f64,
    /// Seconds from one refresh to the next (`refresh_interval`); 0 = none is made.
    pub refresh_interval: f64,
    /// Which part of the cache one step of a refresh reads again (`cache_refresh_percentage_per_iteration`); 0 = not said.
    pub refresh_share: f64,
    /// Whether it is filled with rows when the model is opened (`init_ec`).
    pub fill_at_start: bool,
    /// How many threads insert in the background (`thread_pool_size`). `None`: not said.
    pub insert_threads: Option<u32>,
}

/// The size of the cache of one table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CacheSize {
    /// Room for this part of the table's rows: more than 0, at most 1 (`gpucacheper`).
    Share(f64),
    /// Room for so many rows (`cache_rows`).
    Rows(u64),
    /// So many bytes (`cache_bytes`).
    Bytes(u64),
}

/// What only HugeCTR's cache on a GPU has a use for. It is kept so that it can be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuConfig {
    /// Buffers for lookups (`num_of_worker_buffer_in_pool`).
    pub worker_buffers: u32,
    /// Buffers for refreshes (`num_of_refresher_buffer_in_pool`).
    pub refresh_buffers: u32,
    /// Whether lookups use the stream of the framework around them (`use_context_stream`).
    pub context_stream: bool,
    /// Whether host memory is locked (`enable_pagelock`).
    pub page_locked: bool,
    /// Which of two implementations the cache is (`use_hctr_cache_implementation`).
    pub own_implementation: bool,
}

/// The floor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryConfig {
    /// In how many partitions each table is kept (`num_partitions`).
    pub partitions: u32,
    /// How many bytes are allocated at a time (`allocation_rate`).
    pub allocation_bytes: u64,
    /// The most keys that are looked up or put at a time (`max_batch_size` or `max_get_batch_size`, `max_set_batch_size`).
    pub batch: Batch,
    /// How many rows it holds.
    pub overflow: OverflowConfig,
    /// What it holds at the start.
    pub start: Start,
    /// Whether it takes what a lookup finds below it (`cache_missed_embeddings`).
    pub takes_missed: bool,
}

/// The floor in a Redis Cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct RedisConfig {
    /// Nodes to ask for all others, at least one (`address`).
    pub nodes: Vec<Address>,
    /// Who logs in (`user_name`).
    pub user: String,
    /// With which password; empty = none (`password`).
    pub password: Secret,
    /// In how many partitions each table is kept (`num_partitions`).
    pub partitions: u32,
    /// How many connections each node gets (`num_node_connections`).
    pub connections_per_node: u32,
    /// The most keys that are looked up or put at a time (`max_batch_size` or `max_get_batch_size`, `max_set_batch_size`).
    pub batch: Batch,
    /// `None`: not encrypted (`enable_tls`).
    pub tls: Option<TlsConfig>,
    /// How many rows it holds.
    pub overflow: OverflowConfig,
    /// What it holds at the start.
    pub start: Start,
    /// Whether it takes what a lookup finds below it (`cache_missed_embeddings`).
    pub takes_missed: bool,
    /// How long a lookup may take (`timeout_ms`).
    pub timeout: Duration,
    /// After how many failures one after the other it is left alone for a while (`breaker_failures`).
    pub breaker_failures: u32,
    /// How long it is left alone then (`breaker_open_ms`).
    pub breaker_open: Duration,
}

/// How connections are encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    /// A file with the certificates of who may vouch for a server, in PEM (`tls_ca_certificate`). `None`: those that
    /// this machine trusts.
    pub authorities: Option<PathBuf>,
    /// Our own certificate and its key, if the server wants to see one (`tls_client_certificate`, `tls_client_key`).
    pub client: Option<(PathBuf, PathBuf)>,
}

/// The floor on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Its folder (`path`).
    pub path: PathBuf,
    /// Whether nothing may be written to it (`read_only`).
    pub read_only: bool,
    /// How many threads read and write (`num_threads`).
    pub threads: u32,
    /// The most keys that are looked up or put at a time (`max_batch_size` or `max_get_batch_size`, `max_set_batch_size`).
    pub batch: Batch,
    /// Whether the table files are put into it at the start (`initialize_after_startup`). Otherwise it has them already.
    pub load: bool,
    /// Whether a table is built anew without its updates when its source has changed (`drop_updates_on_source_change`, an
    /// option of Pagoda's own). Otherwise such a table is not opened.
    pub drop_updates_on_source_change: bool,
}

/// How many keys a floor takes at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The most that are looked up.
    pub get: u32,
    /// The most that are put.
    pub set: u32,
}

/// What happens when there are too many rows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OverflowConfig {
    /// The most rows of one partition (`overflow_margin`). `None`: there is no limit.
    pub rows: Option<u64>,
    /// Which leave (`overflow_policy`).
    pub eviction: Eviction,
    /// Which part of `rows` is left then: more than 0, less than 1 (`overflow_resolution_target`).
    pub keep: f64,
}

/// Which rows leave when there are too many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Eviction {
    /// Any (`evict_random`).
    #[default]
    Random,
    /// Those that were not used for longest (`evict_oldest`).
    Oldest,
    /// Those that were used least often (`evict_least_used`).
    LeastUsed,
}

/// What a floor holds at the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Start {
    /// Whether rows of the table files are put into it (`initialize_after_startup`). Otherwise it has what it had before.
    pub load: bool,
    /// Which part of them, from 0 to 1 (`initial_cache_rate`).
    pub share: f64,
}

/// A text that is not shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text itself.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "(none)" } else { "(not shown)" })
    }
}
