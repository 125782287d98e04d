//! The options of embedding tables and their tiers. A program can build them directly, or read them from a
//! configuration file.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::eviction::Eviction;
use super::row::{Layout, RowType};
use crate::error::{Error, Result};

/// Options as errors name them. A reader of a configuration file translates them to its keys.
pub(super) const TIERS: &str = "EmbeddingOptions.tiers";
pub(super) const MEMORY: &str = "EmbeddingOptions.tiers.memory";
pub(super) const REDIS: &str = "EmbeddingOptions.tiers.redis";
pub(super) const DISK: &str = "EmbeddingOptions.tiers.disk";
pub(super) const CACHE_SIZE: &str = "EmbeddingOptions.models.cache.size";
pub(super) const DEVICES: &str = "EmbeddingOptions.models.devices";

/// Names the options in an error as the caller has written them: fields of [`EmbeddingOptions`], or keys of a file.
pub(super) type NameOptions = fn(Error) -> Error;

/// The most partitions of a table in Redis. A cluster has 16,384 slots, and a lookup sends a command for each partition
/// of its keys.
const MAX_REDIS_PARTITIONS: u32 = 4096;
/// The most connections to a node of Redis.
const MAX_CONNECTIONS: u32 = 64;
/// The valid time limits of Redis.
const TIMES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// The embedding tables of all models, and the tiers that they share.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct EmbeddingOptions {
    /// The models. Their names are unique. More can be added to open tables.
    pub models: Vec<ModelTables>,
    /// The tiers that hold the rows.
    pub tiers: TierOptions,
    /// Whether the keys in HugeCTR table folders have 64 bits. Otherwise they have 32. Other formats state it
    /// themselves.
    pub long_keys: bool,
}

impl Default for EmbeddingOptions {
    /// No models, all rows in host memory.
    fn default() -> Self {
        Self { models: Vec::new(), tiers: TierOptions::default(), long_keys: true }
    }
}

/// The tiers below the cache, from the fastest to the largest. There must be at least one.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct TierOptions {
    /// Host memory.
    pub memory: Option<MemoryOptions>,
    /// A Redis Cluster.
    pub redis: Option<RedisOptions>,
    /// Table files on disk.
    pub disk: Option<DiskOptions>,
}

impl Default for TierOptions {
    /// Host memory alone.
    fn default() -> Self {
        Self { memory: Some(MemoryOptions::default()), redis: None, disk: None }
    }
}

/// The tables of one model.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct ModelTables {
    /// The name of the model, without `/`: `model/table` names a table of a model.
    pub name: String,
    /// The tables. Their names are unique within the model.
    pub tables: Vec<TableSpec>,
    /// The cache of each table. `None`: every lookup reads the tiers.
    #[cfg_attr(feature = "serde", serde(default = "ModelTables::default_cache"))]
    pub cache: Option<CacheOptions>,
    /// The GPUs on which graphs may cache the tables. Empty: any.
    #[cfg_attr(feature = "serde", serde(default))]
    pub devices: Vec<u32>,
}

impl ModelTables {
    /// Tables with a default cache, on any GPU.
    pub fn new(name: impl Into<String>, tables: Vec<TableSpec>) -> Self {
        Self { name: name.into(), tables, cache: Self::default_cache(), devices: Vec::new() }
    }

    fn default_cache() -> Option<CacheOptions> {
        Some(CacheOptions::default())
    }

    /// Checks the values that do not depend on files.
    pub(super) fn check(&self) -> Result<()> {
        if self.name.is_empty() || self.name.contains('/') {
            let message = format!("{:?} can not name a model: use a name that is not empty, without /", self.name);
            return Err(Error::invalid("model", message));
        }
        for (index, table) in self.tables.iter().enumerate() {
            table.check()?;
            if self.tables[..index].iter().any(|before| before.name == table.name) {
                let message = format!("two tables of model {} have the name {:?}", self.name, table.name);
                return Err(Error::invalid("table", message));
            }
        }
        self.cache.as_ref().map_or(Ok(()), CacheOptions::check)
    }
}

/// A table: where its rows come from, and how they are stored.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(from = "super::table_data::TableData")
)]
pub struct TableSpec {
    /// The name of the table.
    pub name: String,
    /// The file or folder with the rows.
    pub path: PathBuf,
    /// The number of elements of a row.
    pub dim: u32,
    /// The row of keys that are not found, or not in time: `dim` numbers.
    pub default_row: Vec<f32>,
    /// The type of the stored rows. `None`: as in the file.
    pub row_type: Option<RowType>,
}

impl TableSpec {
    /// A table whose default row is zeros, with the row type of its file.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>, dim: u32) -> Self {
        let default_row = vec![0.0; dim as usize];
        Self { name: name.into(), path: path.into(), dim, default_row, row_type: None }
    }

    /// Whether two models mean the same table, and so share it: name, file, length and type of rows are equal. The
    /// default rows may differ.
    pub fn is_same_table(&self, other: &Self) -> bool {
        self.name == other.name && self.path == other.path && self.dim == other.dim && self.row_type == other.row_type
    }

    fn check(&self) -> Result<()> {
        Layout::new(self.dim, RowType::F32)?;
        if self.default_row.len() != self.dim as usize {
            let (name, length, dim) = (&self.name, self.default_row.len(), self.dim);
            let message = format!("the default row of table {name} has {length} numbers, and its rows have {dim}");
            return Err(Error::invalid("default_row", message));
        }
        Ok(())
    }
}

/// The cache of each table of a model.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct CacheOptions {
    /// The size.
    pub size: CacheSize,
    /// Below this hit rate a lookup waits for the missing rows. At or above it the lookup returns the default row for
    /// them, and fetches them in the background. 1 or more: lookups always wait.
    pub hit_rate_threshold: f64,
    /// The time from the start to the first refresh. Zero: as `refresh_interval`.
    pub refresh_delay: Duration,
    /// The time from one refresh to the next. Zero: the cache is not refreshed.
    pub refresh_interval: Duration,
    /// The share of the cache that one refresh reads, from 0 to 1. 0: all of it.
    pub refresh_share: f64,
    /// Whether the cache is filled with rows when the model is added.
    pub fill_at_start: bool,
    /// The number of threads for background fetches. `None`: half of the cores, at most 4.
    pub fetch_threads: Option<u32>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self {
            size: CacheSize::Share(0.2),
            hit_rate_threshold: 0.9,
            refresh_delay: Duration::ZERO,
            refresh_interval: Duration::ZERO,
            refresh_share: 0.0,
            fill_at_start: true,
            fetch_threads: None,
        }
    }
}

impl CacheOptions {
    fn check(&self) -> Result<()> {
        if let CacheSize::Share(share) = self.size
            && !(share > 0.0 && share <= 1.0)
        {
            return Err(Error::invalid("size", format!("a cache of {share} of the rows is not above 0 and at most 1")));
        }
        if !(0.0..=1.0).contains(&self.refresh_share) {
            return Err(Error::invalid("refresh_share", format!("{} is not between 0 and 1", self.refresh_share)));
        }
        Ok(())
    }
}

/// The size of the cache of one table.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum CacheSize {
    /// Room for a share of the rows of the table: above 0, at most 1.
    Share(f64),
    /// Room for a number of rows.
    Rows(u64),
    /// A number of bytes.
    Bytes(u64),
}

/// The tier in host memory.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct MemoryOptions {
    /// The number of partitions of each table. Each has a lock of its own.
    pub partitions: u32,
    /// The limit of rows.
    pub overflow: OverflowOptions,
    /// The rows that it starts with.
    pub preload: Preload,
    /// Whether it stores rows that a lookup finds in lower tiers.
    pub stores_fetched: bool,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        Self {
            partitions: cores.min(16),
            overflow: OverflowOptions::default(),
            preload: Preload::default(),
            stores_fetched: true,
        }
    }
}

/// The tier in a Redis Cluster (Redis 6.2 or later).
///
/// With `cluster-require-full-coverage no` in the settings of the nodes, the other nodes go on serving when one is
/// down. By the default of Redis none does.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct RedisOptions {
    /// At least one node. The others are found through it.
    pub nodes: Vec<Address>,
    /// The user. Empty: the default user of Redis.
    pub user: String,
    /// The password. Empty: none. serde reads it, and does not write it.
    #[cfg_attr(feature = "serde", serde(skip_serializing))]
    pub password: Secret,
    /// The number of partitions of each table. Each lies on one node, so there should be a few for each node. The same
    /// in all processes that share the tables.
    pub partitions: u32,
    /// The number of connections to each node, each with a thread.
    pub connections_per_node: u32,
    /// `None`: connections are not encrypted.
    pub tls: Option<TlsOptions>,
    /// The limit of rows.
    pub overflow: OverflowOptions,
    /// The rows that it starts with.
    pub preload: Preload,
    /// Whether it stores rows that a lookup finds in lower tiers.
    pub stores_fetched: bool,
    /// The time limit of a lookup, and of each answer to a write.
    pub timeout: Duration,
    /// The number of consecutive failures of a node that opens its circuit breaker.
    pub breaker_failures: u32,
    /// The time from the opening of a circuit breaker to the next trial.
    pub breaker_pause: Duration,
}

impl Default for RedisOptions {
    /// Without nodes.
    fn default() -> Self {
        Self {
            nodes: Vec::new(),
            user: "default".into(),
            password: Secret::default(),
            partitions: 8,
            connections_per_node: 5,
            tls: None,
            overflow: OverflowOptions::default(),
            preload: Preload::default(),
            stores_fetched: true,
            timeout: Duration::from_millis(100),
            breaker_failures: 5,
            breaker_pause: Duration::from_secs(1),
        }
    }
}

impl RedisOptions {
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |field: &str, message: String| Err(Error::invalid(format!("{REDIS}.{field}"), message));
        if self.nodes.is_empty() {
            return refuse("nodes", "there is none: give the address of at least one node".into());
        }
        if let Some(number) = self.nodes.iter().position(|node| node.host.is_empty() || node.port == 0) {
            let node = &self.nodes[number];
            return refuse(&format!("nodes[{number}]"), format!("{node} has no host or port 0: give both"));
        }
        if !(1..=MAX_REDIS_PARTITIONS).contains(&self.partitions) {
            let message = format!("{} is not between 1 and {MAX_REDIS_PARTITIONS}", self.partitions);
            return refuse("partitions", message);
        }
        if self.overflow.max_rows == Some(0) {
            return refuse("overflow.max_rows", "a partition of 0 rows can not keep any: give 1 or more".into());
        }
        if !(self.overflow.keep > 0.0 && self.overflow.keep <= 1.0) {
            return refuse("overflow.keep", format!("{} is not above 0 and at most 1", self.overflow.keep));
        }
        if self.breaker_failures == 0 {
            return refuse("breaker_failures", "after 0 failures no node would ever be used: give 1 or more".into());
        }
        for (field, time) in [("timeout", self.timeout), ("breaker_pause", self.breaker_pause)] {
            if !TIMES.contains(&time) {
                return refuse(field, format!("{time:?} is not between {:?} and {:?}", TIMES.start(), TIMES.end()));
            }
        }
        if !(1..=MAX_CONNECTIONS).contains(&self.connections_per_node) {
            let message = format!("{} is not between 1 and {MAX_CONNECTIONS}", self.connections_per_node);
            return refuse("connections_per_node", message);
        }
        Ok(())
    }
}

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Address {
    /// The name or the IP address of the host; an IPv6 address without brackets.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The files for encrypted connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct TlsOptions {
    /// A PEM file with the certificates of trusted authorities. `None`: those that this machine trusts.
    pub authorities: Option<PathBuf>,
    /// PEM files with the client certificate and its key, if the server requires them.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// The tier on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct DiskOptions {
    /// The folder of the table files.
    pub path: PathBuf,
    /// Whether nothing may be written.
    #[cfg_attr(feature = "serde", serde(default))]
    pub read_only: bool,
    /// Whether a table file is built if there is none, or if its source has changed. Otherwise it must exist.
    #[cfg_attr(feature = "serde", serde(default = "DiskOptions::default_build"))]
    pub build: bool,
    /// Whether a table is rebuilt without its updates when its source has changed. Otherwise opening it is an error.
    #[cfg_attr(feature = "serde", serde(default))]
    pub drop_updates_on_source_change: bool,
}

impl DiskOptions {
    /// A writable tier that builds its table files.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), read_only: false, build: Self::default_build(), drop_updates_on_source_change: false }
    }

    fn default_build() -> bool {
        true
    }
}

/// The limit of rows of a tier.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct OverflowOptions {
    /// The most rows of one partition. `None`: no limit.
    pub max_rows: Option<u64>,
    /// Which rows are evicted.
    pub eviction: Eviction,
    /// The share of `max_rows` at which eviction ends: above 0, below 1.
    pub keep: f64,
}

impl Default for OverflowOptions {
    fn default() -> Self {
        Self { max_rows: None, eviction: Eviction::default(), keep: 0.8 }
    }
}

/// The rows that a tier starts with.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Preload {
    /// Whether rows of the table files are loaded. Otherwise it starts with what it held before.
    pub load: bool,
    /// The share of the rows that is loaded, from 0 to 1.
    pub share: f64,
}

impl Default for Preload {
    fn default() -> Self {
        Self { load: true, share: 1.0 }
    }
}

impl Preload {
    /// How many of `rows` rows are loaded.
    pub(super) fn rows(&self, rows: u64) -> u64 {
        if self.load { (rows as f64 * self.share).ceil() as u64 } else { 0 }
    }
}

/// A text that is not shown in logs.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize))]
pub struct Secret(String);

impl Secret {
    /// Wraps a text.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "(none)" } else { "(not shown)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_can_not_be_used_are_named() {
        let good = ModelTables::new("m", vec![TableSpec::new("t", "rows.npy", 4), TableSpec::new("u", "rows.npy", 4)]);
        assert!(good.check().is_ok());
        type Spoil = fn(&mut ModelTables);
        let cases: [(&str, Spoil); 7] = [
            ("model", |model| model.name = "a/b".into()),
            ("model", |model| model.name.clear()),
            ("table", |model| model.tables[1].name = "t".into()),
            ("dim", |model| model.tables[0].dim = 0),
            ("default_row", |model| model.tables[1].default_row = vec![0.0; 3]),
            ("size", |model| model.cache.as_mut().unwrap().size = CacheSize::Share(f64::NAN)),
            ("refresh_share", |model| model.cache.as_mut().unwrap().refresh_share = 1.5),
        ];
        for (argument, spoil) in cases {
            let mut model = good.clone();
            spoil(&mut model);
            assert_eq!(model.check().unwrap_err().argument(), Some(argument));
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        let options = RedisOptions { password: Secret::new("hush"), user: "anna".into(), ..RedisOptions::default() };
        let shown = format!("{options:?}");
        assert!(shown.contains("anna") && shown.contains("(not shown)") && !shown.contains("hush"), "{shown}");
    }

    #[test]
    fn options_of_redis_that_can_not_be_used_are_named() {
        let good = RedisOptions { nodes: vec![Address { host: "a".into(), port: 1 }], ..RedisOptions::default() };
        assert_eq!(good.check(), Ok(()));
        type Spoil = fn(&mut RedisOptions);
        let cases: [(&str, Spoil); 10] = [
            ("nodes", |options| options.nodes.clear()),
            ("nodes[0]", |options| options.nodes[0].host.clear()),
            ("nodes[0]", |options| options.nodes[0].port = 0),
            ("partitions", |options| options.partitions = 0),
            ("overflow.max_rows", |options| options.overflow.max_rows = Some(0)),
            ("overflow.keep", |options| options.overflow.keep = f64::NAN),
            ("timeout", |options| options.timeout = Duration::ZERO),
            ("breaker_failures", |options| options.breaker_failures = 0),
            ("breaker_pause", |options| options.breaker_pause = Duration::MAX),
            ("connections_per_node", |options| options.connections_per_node = 0),
        ];
        for (field, spoil) in cases {
            let mut options = good.clone();
            spoil(&mut options);
            let argument = format!("EmbeddingOptions.tiers.redis.{field}");
            assert_eq!(options.check().unwrap_err().argument(), Some(argument.as_str()));
        }
    }
}
