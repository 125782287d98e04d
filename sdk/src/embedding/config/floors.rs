//! Reads `volatile_db`, `persistent_db` and `update_source`.

use std::path::Path;
use std::thread;
use std::time::Duration;

use super::address::{self, Address};
use super::reader::{Field, Keys, Object};
use super::{Batch, DiskConfig, Eviction, MemoryConfig, OverflowConfig, RedisConfig, Secret, Start, TlsConfig};
use crate::error::Result;
use crate::json::Json;

/// The most partitions: in Redis a lookup sends a command for each that it touches.
const MOST_PARTITIONS: u32 = 4096;
const DEFAULT_BATCH: u32 = 65_536;
const LONGEST_MS: u64 = 3_600_000;

pub(super) const VOLATILE: Keys = Keys {
    known: &[
        "type",
        "num_partitions",
        "allocation_rate",
        "max_batch_size",
        "max_get_batch_size",
        "max_set_batch_size",
        "overflow_margin",
        "overflow_policy",
        "overflow_resolution_target",
        "initialize_after_startup",
        "initial_cache_rate",
        "cache_missed_embeddings",
        "update_filters",
        "address",
        "user_name",
        "password",
        "num_node_connections",
        "enable_tls",
        "tls_ca_certificate",
        "tls_client_certificate",
        "tls_client_key",
        "timeout_ms",
        "breaker_failures",
        "breaker_open_ms",
        "shared_memory_size",
        "shared_memory_name",
        "shared_memory_auto_remove",
    ],
    refused: &[
        (
            "tls_server_name_identification",
            "each node needs a certificate for the address under which the cluster tells of it; leave it out",
        ),
        ("algorithm", "HugeCTR has dropped it, there is one kind of map; leave it out"),
        ("refresh_time_after_fetch", "HugeCTR has dropped it, \"evict_oldest\" goes by the last use; leave it out"),
    ],
};

pub(super) const PERSISTENT: Keys = Keys {
    known: &[
        "type",
        "path",
        "read_only",
        "num_threads",
        "max_batch_size",
        "max_get_batch_size",
        "max_set_batch_size",
        "initialize_after_startup",
        "update_filters",
        "drop_updates_on_source_change",
    ],
    refused: &[],
};

pub(super) const UPDATE_SOURCE: Keys = Keys {
    known: &[
        "type",
        "brokers",
        "metadata_refresh_interval_ms",
        "receive_buffer_size",
        "max_receive_buffer_size",
        "poll_timeout_ms",
        "max_batch_size",
        "failure_backoff_ms",
        "max_commit_interval",
    ],
    refused: &[],
};

/// What `volatile_db` says: one floor, or a list of two with memory above Redis. As in HugeCTR tables are kept in memory
/// if nothing is said.
pub(super) fn volatile(
    field: Option<Field<'_>>,
    folder: Option<&Path>,
) -> Result<(Option<MemoryConfig>, Option<RedisConfig>)> {
    static NOTHING_SAID: Json = Json::Object(Vec::new());
    let field = field.unwrap_or_else(|| Field::new("volatile_db", &NOTHING_SAID));
    let floors = field.maybe_list().unwrap_or_else(|| vec![field.clone()]);
    if floors.is_empty() {
        return Err(field.error("is empty; for no floor say {\"type\": \"disabled\"}"));
    }
    let (mut memory, mut redis) = (None, None);
    for floor in &floors {
        match volatile_floor(floor, folder)? {
            Volatile::Disabled => {}
            Volatile::Memory(_) if memory.is_some() || redis.is_some() => {
                return Err(floor.error("is a floor in memory; there can be one, above \"redis_cluster\""));
            }
            Volatile::Redis(_) if redis.is_some() => {
                return Err(
                    floor.error("is a second \"redis_cluster\"; there can be one, name all its nodes in `address`")
                );
            }
            Volatile::Memory(config) => memory = Some(config),
            Volatile::Redis(config) => redis = Some(config),
        }
    }
    Ok((memory, redis))
}

enum Volatile {
    Disabled,
    Memory(MemoryConfig),
    Redis(RedisConfig),
}

#[derive(Clone, Copy)]
enum Kind {
    Disabled,
    Memory,
    SharedMemory,
    Redis,
}

const VOLATILE_TYPES: [(&[&str], Kind); 5] = [
    (&["hash_map", "hashmap", "hash", "map"], Kind::Memory),
    (&["parallel_hash_map", "parallel_hashmap", "parallel_hash", "parallel_map"], Kind::Memory),
    (&["redis_cluster", "redis"], Kind::Redis),
    (&["disabled", "disable", "none"], Kind::Disabled),
    (
        &["multi_process_hash_map", "multi_process_hashmap", "multi_process_hash", "multi_process_map"],
        Kind::SharedMemory,
    ),
];

/// Reads every key whatever the type is: HugeCTR's examples give them all.
fn volatile_floor(field: &Field<'_>, folder: Option<&Path>) -> Result<Volatile> {
    let floor = field.object(&VOLATILE)?;
    let memory = memory(&floor)?;
    let redis = redis(&floor, folder)?;
    update_filters(&floor)?;
    floor.whole("shared_memory_size", 0, 0..=u64::MAX)?;
    floor.get("shared_memory_name").map(|name| name.text()).transpose()?;
    floor.flag("shared_memory_auto_remove", true)?;
    let Some(kind) = floor.get("type") else { return Ok(Volatile::Memory(memory)) };
    Ok(match kind.choice(&VOLATILE_TYPES)? {
        Kind::Disabled => Volatile::Disabled,
        Kind::Memory => Volatile::Memory(memory),
        Kind::Redis => Volatile::Redis(redis),
        Kind::SharedMemory => {
            let reason =
                "memory is not shared between processes; use \"parallel_hash_map\" in each, or \"redis_cluster\"";
            return Err(kind.unsupported(&format!("\"multi_process_hash_map\" is not supported: {reason}")));
        }
    })
}

fn memory(floor: &Object<'_>) -> Result<MemoryConfig> {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    Ok(MemoryConfig {
        partitions: floor.whole("num_partitions", cores.min(16), 1..=MOST_PARTITIONS)?,
        allocation_bytes: floor.whole("allocation_rate", 256 << 20, 1..=u64::MAX)?,
        batch: batch(floor)?,
        overflow: overflow(floor)?,
        start: start(floor)?,
        takes_missed: floor.flag("cache_missed_embeddings", true)?,
    })
}

fn redis(floor: &Object<'_>, folder: Option<&Path>) -> Result<RedisConfig> {
    let nodes = floor.get("address").map(|address| address::read(&address)).transpose()?;
    let encrypted = floor.flag("enable_tls", false)?;
    let user = floor.get("user_name").map_or(Ok("default"), |user| user.text())?;
    let password = floor.get("password").map_or(Ok(""), |password| password.secret())?;
    let timeout = |key, default| floor.whole(key, default, 1..=LONGEST_MS).map(Duration::from_millis);
    Ok(RedisConfig {
        nodes: nodes.unwrap_or_else(|| vec![Address { host: "127.0.0.1".into(), port: 7000 }]),
        user: user.to_owned(),
        password: Secret(password.to_owned()),
        partitions: floor.whole("num_partitions", 8, 1..=MOST_PARTITIONS)?,
        connections_per_node: floor.whole("num_node_connections", 5, 1..=64)?,
        batch: batch(floor)?,
        tls: Some(tls(floor, folder)?).filter(|_| encrypted),
        overflow: overflow(floor)?,
        start: start(floor)?,
        takes_missed: floor.flag("cache_missed_embeddings", true)?,
        timeout: timeout("timeout_ms", 100)?,
        breaker_failures: floor.whole("breaker_failures", 5, 1..=u32::MAX)?,
        breaker_open: timeout("breaker_open_ms", 1000)?,
    })
}

fn tls(floor: &Object<'_>, folder: Option<&Path>) -> Result<TlsConfig> {
    let path = |key| floor.get(key).map(|field| field.path(folder)).transpose();
    let client = match (path("tls_client_certificate")?, path("tls_client_key")?) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (certificate, _) => {
            let (there, missing) = match certificate {
                Some(_) => ("tls_client_certificate", "tls_client_key"),
                None => ("tls_client_key", "tls_client_certificate"),
            };
            let there = floor.required(there, "")?;
            return Err(there.error(&format!("is of no use without `{missing}`; give both or none")));
        }
    };
    Ok(TlsConfig { authorities: path("tls_ca_certificate")?, client })
}

fn batch(floor: &Object<'_>) -> Result<Batch> {
    let both = floor.whole("max_batch_size", DEFAULT_BATCH, 1..=u32::MAX)?;
    Ok(Batch {
        get: floor.whole("max_get_batch_size", both, 1..=u32::MAX)?,
        set: floor.whole("max_set_batch_size", both, 1..=u32::MAX)?,
    })
}

fn overflow(floor: &Object<'_>) -> Result<OverflowConfig> {
    const POLICIES: [(&[&str], Eviction); 3] = [
        (&["evict_random", "random"], Eviction::Random),
        (&["evict_oldest", "oldest"], Eviction::Oldest),
        (&["evict_least_used", "least_used"], Eviction::LeastUsed),
    ];
    let rows = floor.whole("overflow_margin", u64::MAX, 1..=u64::MAX)?;
    let eviction = floor.get("overflow_policy").map(|policy| policy.choice(&POLICIES)).transpose()?;
    let keep = floor.real("overflow_resolution_target", 0.8, 0.0..=1.0)?;
    if let Some(target) = floor.get("overflow_resolution_target").filter(|_| keep == 0.0 || keep == 1.0) {
        return Err(target.expected("a number between 0 and 1, neither of them"));
    }
    Ok(OverflowConfig {
        rows: Some(rows).filter(|rows| *rows < u64::MAX),
        eviction: eviction.unwrap_or_default(),
        keep,
    })
}

fn start(floor: &Object<'_>) -> Result<Start> {
    let load = floor.flag("initialize_after_startup", true)?;
    Ok(Start { load, share: floor.real("initial_cache_rate", 1.0, 0.0..=1.0)? })
}

/// They choose between the updates of an `update_source`, and there is none; so they are checked and not kept.
fn update_filters(floor: &Object<'_>) -> Result<()> {
    let Some(filters) = floor.get("update_filters") else { return Ok(()) };
    filters.list("texts")?.iter().try_for_each(|filter| filter.text().map(drop))
}

/// What `persistent_db` says.
pub(super) fn persistent(field: &Field<'_>, folder: Option<&Path>) -> Result<Option<DiskConfig>> {
    const TYPES: [(&[&str], bool); 3] =
        [(&["rocksdb", "rocks_db", "rocks"], true), (&["disk"], true), (&["disabled", "disable", "none"], false)];
    let floor = field.object(&PERSISTENT)?;
    let path = floor.get("path").map(|path| path.path(folder)).transpose()?;
    let read_only = floor.flag("read_only", false)?;
    let threads = floor.whole("num_threads", 16, 1..=1024)?;
    let (batch, load) = (batch(&floor)?, floor.flag("initialize_after_startup", true)?);
    let drop_updates_on_source_change = floor.flag("drop_updates_on_source_change", false)?;
    update_filters(&floor)?;
    if !floor.required("type", "say \"rocksdb\", \"disk\" or \"disabled\"")?.choice(&TYPES)? {
        return Ok(None);
    }
    match path {
        Some(path) => Ok(Some(DiskConfig { path, read_only, threads, batch, load, drop_updates_on_source_change })),
        None => Err(floor.required("path", "the folder of the floor on disk").err().expect("there is no path")),
    }
}

/// An update source of which nothing comes is fine, any other is not.
pub(super) fn refuse_update_source(field: &Field<'_>) -> Result<()> {
    let source = field.object(&UPDATE_SOURCE)?;
    source.get("brokers").map(|brokers| brokers.text()).transpose()?;
    for key in UPDATE_SOURCE.known.iter().filter(|key| !["type", "brokers"].contains(key)) {
        source.whole(key, 0, 0..=u64::MAX)?;
    }
    const TYPES: [(&[&str], bool); 2] =
        [(&["null", "none"], false), (&["kafka_message_queue", "kafka_mq", "kafka"], true)];
    match source.get("type") {
        Some(kind) if kind.choice(&TYPES)? => Err(kind.unsupported(
            "Kafka is not read: call upsert and delete with what your own consumer receives, and leave `update_source` out",
        )),
        _ => Ok(()),
    }
}
