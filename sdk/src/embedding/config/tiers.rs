//! Reads `volatile_db`, `persistent_db` and `update_source`.

use std::path::Path;
use std::time::Duration;

use super::address;
use super::hugectr_fields::{Batch, HugeCtrDisk, HugeCtrMemory};
use crate::embedding::eviction::Eviction;
use crate::embedding::options::{
    Address, DiskOptions, MemoryOptions, OverflowOptions, Preload, RedisOptions, Secret, TlsOptions,
};
use crate::error::Result;
use crate::json::{Field, Json, Keys, Object};

/// The most partitions. In Redis a lookup sends a command for each partition of its keys.
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

/// A tier in host memory.
type MemoryFields = (MemoryOptions, HugeCtrMemory);

/// A tier in Redis.
type RedisFields = (RedisOptions, Batch);

/// Reads `volatile_db`: one tier, or a list of two, with memory above Redis. Without it, as in HugeCTR, tables are in
/// host memory.
pub(super) fn volatile(
    field: Option<Field<'_>>,
    folder: Option<&Path>,
) -> Result<(Option<MemoryFields>, Option<RedisFields>)> {
    static NOTHING_SAID: Json = Json::Object(Vec::new());
    let field = field.unwrap_or_else(|| Field::new("volatile_db", &NOTHING_SAID));
    let tiers = field.maybe_list().unwrap_or_else(|| vec![field.clone()]);
    if tiers.is_empty() {
        return Err(field.error("is empty; for no tier say {\"type\": \"disabled\"}"));
    }
    let (mut memory, mut redis) = (None, None);
    for tier in &tiers {
        match volatile_tier(tier, folder)? {
            Volatile::Disabled => {}
            Volatile::Memory(_) if memory.is_some() || redis.is_some() => {
                return Err(tier.error("is a tier in memory; there can be one, above \"redis_cluster\""));
            }
            Volatile::Redis(_) if redis.is_some() => {
                return Err(
                    tier.error("is a second \"redis_cluster\"; there can be one, name all its nodes in `address`")
                );
            }
            Volatile::Memory(fields) => memory = Some(fields),
            Volatile::Redis(fields) => redis = Some(fields),
        }
    }
    Ok((memory, redis))
}

enum Volatile {
    Disabled,
    Memory(MemoryFields),
    Redis(RedisFields),
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

/// Reads every key whatever the type is: HugeCTR's examples have all of them.
fn volatile_tier(field: &Field<'_>, folder: Option<&Path>) -> Result<Volatile> {
    let tier = field.object(&VOLATILE)?;
    let memory = memory(&tier)?;
    let redis = redis(&tier, folder)?;
    update_filters(&tier)?;
    tier.whole("shared_memory_size", 0, 0..=u64::MAX)?;
    tier.get("shared_memory_name").map(|name| name.text()).transpose()?;
    tier.flag("shared_memory_auto_remove", true)?;
    let Some(kind) = tier.get("type") else { return Ok(Volatile::Memory(memory)) };
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

fn memory(tier: &Object<'_>) -> Result<MemoryFields> {
    let defaults = MemoryOptions::default();
    let options = MemoryOptions {
        partitions: tier.whole("num_partitions", defaults.partitions, 1..=MOST_PARTITIONS)?,
        overflow: overflow(tier)?,
        preload: preload(tier)?,
        stores_fetched: tier.flag("cache_missed_embeddings", true)?,
    };
    let allocation_bytes = tier.whole("allocation_rate", 256 << 20, 1..=u64::MAX)?;
    Ok((options, HugeCtrMemory { allocation_bytes, batch: batch(tier)? }))
}

fn redis(tier: &Object<'_>, folder: Option<&Path>) -> Result<RedisFields> {
    let nodes = tier.get("address").map(|address| address::read(&address)).transpose()?;
    let encrypted = tier.flag("enable_tls", false)?;
    let user = tier.get("user_name").map_or(Ok("default"), |user| user.text())?;
    let password = tier.get("password").map_or(Ok(""), |password| password.secret())?;
    let timeout =
        |key, default: Duration| tier.whole(key, default.as_millis() as u64, 1..=LONGEST_MS).map(Duration::from_millis);
    let defaults = RedisOptions::default();
    let options = RedisOptions {
        nodes: nodes.unwrap_or_else(|| vec![Address { host: "127.0.0.1".into(), port: 7000 }]),
        user: user.to_owned(),
        password: Secret::new(password),
        partitions: tier.whole("num_partitions", defaults.partitions, 1..=MOST_PARTITIONS)?,
        connections_per_node: tier.whole("num_node_connections", defaults.connections_per_node, 1..=64)?,
        tls: Some(tls(tier, folder)?).filter(|_| encrypted),
        overflow: overflow(tier)?,
        preload: preload(tier)?,
        stores_fetched: tier.flag("cache_missed_embeddings", true)?,
        timeout: timeout("timeout_ms", defaults.timeout)?,
        breaker_failures: tier.whole("breaker_failures", defaults.breaker_failures, 1..=u32::MAX)?,
        breaker_pause: timeout("breaker_open_ms", defaults.breaker_pause)?,
    };
    Ok((options, batch(tier)?))
}

fn tls(tier: &Object<'_>, folder: Option<&Path>) -> Result<TlsOptions> {
    let path = |key| tier.get(key).map(|field| field.path(folder)).transpose();
    let client = match (path("tls_client_certificate")?, path("tls_client_key")?) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (certificate, _) => {
            let (there, missing) = match certificate {
                Some(_) => ("tls_client_certificate", "tls_client_key"),
                None => ("tls_client_key", "tls_client_certificate"),
            };
            let there = tier.required(there, "")?;
            return Err(there.error(&format!("is of no use without `{missing}`; give both or none")));
        }
    };
    Ok(TlsOptions { authorities: path("tls_ca_certificate")?, client })
}

fn batch(tier: &Object<'_>) -> Result<Batch> {
    let both = tier.whole("max_batch_size", DEFAULT_BATCH, 1..=u32::MAX)?;
    Ok(Batch {
        get: tier.whole("max_get_batch_size", both, 1..=u32::MAX)?,
        set: tier.whole("max_set_batch_size", both, 1..=u32::MAX)?,
    })
}

fn overflow(tier: &Object<'_>) -> Result<OverflowOptions> {
    const POLICIES: [(&[&str], Eviction); 3] = [
        (&["evict_random", "random"], Eviction::Random),
        (&["evict_oldest", "oldest"], Eviction::Oldest),
        (&["evict_least_used", "least_used"], Eviction::LeastUsed),
    ];
    let rows = tier.whole("overflow_margin", u64::MAX, 1..=u64::MAX)?;
    let eviction = tier.get("overflow_policy").map(|policy| policy.choice(&POLICIES)).transpose()?;
    let keep = tier.real("overflow_resolution_target", 0.8, 0.0..=1.0)?;
    if let Some(target) = tier.get("overflow_resolution_target").filter(|_| keep == 0.0 || keep == 1.0) {
        return Err(target.expected("a number between 0 and 1, neither of them"));
    }
    Ok(OverflowOptions {
        max_rows: Some(rows).filter(|rows| *rows < u64::MAX),
        eviction: eviction.unwrap_or_default(),
        keep,
    })
}

fn preload(tier: &Object<'_>) -> Result<Preload> {
    let load = tier.flag("initialize_after_startup", true)?;
    Ok(Preload { load, share: tier.real("initial_cache_rate", 1.0, 0.0..=1.0)? })
}

/// Checks the filters. They select updates of an `update_source`, which is not supported, so they have no effect.
fn update_filters(tier: &Object<'_>) -> Result<()> {
    let Some(filters) = tier.get("update_filters") else { return Ok(()) };
    filters.list("texts")?.iter().try_for_each(|filter| filter.text().map(drop))
}

/// Reads `persistent_db`.
pub(super) fn persistent(field: &Field<'_>, folder: Option<&Path>) -> Result<Option<(DiskOptions, HugeCtrDisk)>> {
    const TYPES: [(&[&str], bool); 3] =
        [(&["rocksdb", "rocks_db", "rocks"], true), (&["disk"], true), (&["disabled", "disable", "none"], false)];
    let tier = field.object(&PERSISTENT)?;
    let path = tier.get("path").map(|path| path.path(folder)).transpose()?;
    let read_only = tier.flag("read_only", false)?;
    let threads = tier.whole("num_threads", 16, 1..=1024)?;
    let (batch, build) = (batch(&tier)?, tier.flag("initialize_after_startup", true)?);
    let drop_updates_on_source_change = tier.flag("drop_updates_on_source_change", false)?;
    update_filters(&tier)?;
    if !tier.required("type", "say \"rocksdb\", \"disk\" or \"disabled\"")?.choice(&TYPES)? {
        return Ok(None);
    }
    match path {
        Some(path) => {
            let options = DiskOptions { path, read_only, build, drop_updates_on_source_change };
            Ok(Some((options, HugeCtrDisk { threads, batch })))
        }
        None => Err(tier.required("path", "the folder of the tier on disk").err().expect("there is no path")),
    }
}

/// Refuses an update source, unless its type is `null`.
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
