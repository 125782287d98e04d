//! The tier in a Redis Cluster, which any number of processes share.
//!
//! A table is split into partitions by a hash of the key. Each partition is a Redis hash in a slot of its own, and so
//! on one node: `pagoda:{<table>/<partition>}:rows`. It maps the 8 bytes of a key to the 8 bytes of a version followed
//! by the row; a tombstone has the version only. The field `layout` names the layout of the rows: processes with
//! another layout do not use them.

mod address;
mod circuit_breaker;
mod cluster;
mod commands;
mod connector;
mod counters;
mod exchange;
mod node;
mod stats;
#[cfg(test)]
mod tests;
mod unsynced_updates;
mod wakeup;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use redis::Value;

pub(in crate::embedding) use self::cluster::Cluster;
use self::commands::{Partition, WriteLimits, WriteMode};
use self::exchange::{Failures, Limit, exchange, send_only};
use self::node::Request;
pub use self::stats::RedisStats;
use self::unsynced_updates::UnsyncedUpdates;
use crate::checksum::xxh3;
use crate::embedding::eviction::Eviction;
use crate::embedding::options::OverflowOptions;
use crate::embedding::row::{Layout, RowType};
use crate::embedding::tiers::tier::{Rows, Sink, Tier};
use crate::embedding::update::version::Version;
use crate::error::{Error, Result, Status};
use crate::sync::RwLock;

/// The most keys of one read command, and the most rows of one write command: they block the node.
const MAX_READ: usize = 1024;
const MAX_WRITE: usize = 256;
/// The approximate most bytes of one command and its answer.
const CHUNK_BYTES: usize = 1 << 18;
/// The most rows of a large write that are in flight at the same time.
const WINDOW: usize = 8192;

/// Opens a table, as [`RedisTier::open`] does.
pub(in crate::embedding) fn open(cluster: Arc<Cluster>, table: &str, layout: Layout) -> Result<Box<dyn Tier>> {
    Ok(Box::new(RedisTier::open(cluster, table, layout)?))
}

/// One table in a Redis Cluster.
pub(in crate::embedding) struct RedisTier {
    cluster: Arc<Cluster>,
    table: String,
    layout: Layout,
    /// The value of the field `layout`.
    layout_field: String,
    partitions: Vec<Partition>,
    unsynced: UnsyncedUpdates,
    /// A `put` takes the read lock, an update the write lock: rows that were read before an update are not put after
    /// it.
    update_lock: RwLock<()>,
}

impl RedisTier {
    /// Opens a table, which need not exist yet. An error if it exists with another layout, and, unless the cluster
    /// was opened lazily, if no node that has a part of it answers.
    pub(in crate::embedding) fn open(cluster: Arc<Cluster>, table: &str, layout: Layout) -> Result<Self> {
        if table.is_empty() || table.len() > 255 || table.contains(['{', '}']) {
            let message = format!("{table:?} can not name a table in Redis; use 1 to 255 bytes without braces");
            return Err(Error::invalid("table", message));
        }
        let count = cluster.options().partitions as usize;
        let tier = Self {
            table: table.into(),
            layout,
            layout_field: layout_field(layout, count),
            partitions: (0..count).map(|number| Partition::new(table, number)).collect(),
            unsynced: UnsyncedUpdates::default(),
            update_lock: RwLock::default(),
            cluster,
        };
        tier.check()?;
        Ok(tier)
    }

    /// The counts of all tables of the cluster.
    #[cfg(test)]
    pub(in crate::embedding) fn stats(&self) -> RedisStats {
        self.cluster.stats()
    }

    /// Compares the layout of every partition, and writes it where there is none.
    fn check(&self) -> Result<()> {
        let write = |(id, partition): (usize, &Partition)| {
            let command = partition.write(&self.terms(), WriteMode::Put, &[]);
            Request { id, slot: partition.slot, bytes: command.len(), command, asking: false }
        };
        let requests: Vec<_> = self.partitions.iter().enumerate().map(write).collect();
        let mut other = None;
        let failures = exchange(&self.cluster, requests, self.limit_each(), &mut |_, value| {
            if let Value::BulkString(text) = value {
                other = Some(String::from_utf8_lossy(&text).into_owned());
            }
            Ok(())
        });
        if let Some(other) = other {
            return Err(Error::invalid("table", self.another_layout(&other)));
        }
        if failures.requests.is_empty() {
            return Ok(());
        }
        let error = self.failed(failures.requests.len(), self.partitions.len(), "partitions", "reached", &failures);
        if failures.requests.len() == self.partitions.len() && !self.cluster.is_lazy() {
            return Err(error);
        }
        // Every lookup and write compares them again.
        log::warn!("{error}");
        Ok(())
    }

    fn terms(&self) -> WriteLimits<'_> {
        let OverflowOptions { max_rows, eviction, keep } = self.cluster.options().overflow;
        // Without a limit it is the largest number, which no partition reaches.
        let max_rows = max_rows.map_or(usize::MAX, |rows| rows as usize);
        let target = (max_rows as f64 * keep) as usize;
        WriteLimits { layout: self.layout_field.as_bytes(), eviction, max_rows, target }
    }

    fn limit_each(&self) -> Limit {
        Limit::Each(self.cluster.options().timeout)
    }

    fn another_layout(&self, other: &str) -> String {
        format!(
            "table {:?} is in the cluster as {other}, not as {}. Use the same in every process, or another name",
            self.table, self.layout_field
        )
    }

    fn failed(&self, some: usize, all: usize, what: &str, done: &str, failures: &Failures) -> Error {
        self.cluster.counters().errors.fetch_add(1, Relaxed);
        let message =
            format!("table {:?}: {some} of {all} {what} could not be {done} in Redis: {}", self.table, failures.reason);
        Error::new(Status::Io, message)
    }

    /// The places of keys, grouped by partition, in chunks of at most `most`.
    fn chunks(&self, keys: &[i64], most: usize, of: impl Iterator<Item = usize>) -> Vec<(usize, Vec<usize>)> {
        let mut groups = vec![Vec::new(); self.partitions.len()];
        for place in of {
            groups[self.partition(keys[place])].push(place);
        }
        let cut = |(partition, group): (usize, Vec<usize>)| {
            group.chunks(most).map(|chunk| (partition, chunk.to_vec())).collect::<Vec<_>>()
        };
        groups.into_iter().enumerate().flat_map(cut).collect()
    }

    /// The partition of a key. It must be the same in all processes and versions.
    fn partition(&self, key: i64) -> usize {
        (xxh3(&key.to_le_bytes()) % self.partitions.len() as u64) as usize
    }

    /// The number of rows of one command.
    fn rows_at_once(&self, most: usize) -> usize {
        (CHUNK_BYTES / (self.layout.row_bytes() + 32)).clamp(1, most)
    }

    /// Reads one answer. Its first value is the layout.
    fn read(
        &self,
        keys: &[i64],
        places: &[usize],
        value: Value,
        sink: &mut Sink<'_>,
        found: &mut Vec<i64>,
    ) -> Result<(), String> {
        let Value::Array(values) = value else { return Err("an answer that is no list".into()) };
        let (first, values) = values.split_first().ok_or("an answer without a layout")?;
        if let Value::BulkString(layout) = first
            && layout != self.layout_field.as_bytes()
        {
            return Err(self.another_layout(&String::from_utf8_lossy(layout)));
        }
        if values.len() != places.len() {
            return Err(format!("an answer with {} rows instead of {}", values.len(), places.len()));
        }
        for (&place, value) in places.iter().zip(values) {
            let Value::BulkString(bytes) = value else { continue };
            let key = keys[place];
            let (version, row) = bytes
                .split_first_chunk()
                .filter(|(_, row)| row.is_empty() || row.len() == self.layout.row_bytes())
                .ok_or_else(|| format!("what it has for key {key} is no row: it has {} bytes", bytes.len()))?;
            let version = Version(u64::from_be_bytes(*version));
            if !self.unsynced.is_stale(key, version) {
                sink(place, version, (!row.is_empty()).then_some(row));
                found.push(key);
            }
        }
        Ok(())
    }

    /// Records the use of rows, if the eviction policy needs it. Does not wait for answers.
    fn touch(&self, found: &[(usize, Vec<i64>)]) {
        let eviction = self.cluster.options().overflow.eviction;
        if eviction == Eviction::Random {
            return;
        }
        let found = found.iter().filter(|(_, keys)| !keys.is_empty()).map(|(partition, keys)| {
            let partition = &self.partitions[*partition];
            let command = partition.touch(eviction, keys);
            Request { id: 0, slot: partition.slot, bytes: command.len(), command, asking: false }
        });
        send_only(&self.cluster, found.collect());
    }

    /// Writes the rows for which `mode` returns a mode. Returns the places of the rows that could not be written, and
    /// why.
    fn write(&self, rows: &Rows<'_>, mode: impl Fn(usize) -> Option<WriteMode>) -> (Vec<usize>, Failures) {
        let mut lost = Vec::new();
        let mut first = Failures::default();
        for start in (0..rows.len()).step_by(WINDOW) {
            let window = start..(start + WINDOW).min(rows.len());
            let modes: Vec<_> = window.clone().map(&mode).collect();
            let mut chunks = Vec::new();
            for mode in [WriteMode::Put, WriteMode::Update] {
                let of = window.clone().filter(|place| modes[place - start] == Some(mode));
                let some = self.chunks(rows.keys, self.rows_at_once(MAX_WRITE), of);
                chunks.extend(some.into_iter().map(|(partition, places)| (partition, mode, places)));
            }
            let failures = self.write_chunks(rows, &chunks);
            lost.extend(failures.requests.iter().flat_map(|&id| &chunks[id].2));
            if first.requests.is_empty() {
                first = failures;
            }
        }
        (lost, first)
    }

    fn write_chunks(&self, rows: &Rows<'_>, chunks: &[(usize, WriteMode, Vec<usize>)]) -> Failures {
        let request = |(id, (partition, mode, places)): (usize, &(usize, WriteMode, Vec<usize>))| {
            let row = |&place: &usize| (rows.keys[place], rows.versions[place], rows.row(place).unwrap_or(&[]));
            let partition = &self.partitions[*partition];
            let command = partition.write(&self.terms(), *mode, &places.iter().map(row).collect::<Vec<_>>());
            Request { id, slot: partition.slot, bytes: command.len(), command, asking: false }
        };
        let requests = chunks.iter().enumerate().map(request).collect();
        exchange(&self.cluster, requests, self.limit_each(), &mut |id, value| match value {
            Value::Int(evicted) => {
                self.cluster.counters().evicted.fetch_add(evicted.max(0).cast_unsigned(), Relaxed);
                for &place in &chunks[id].2 {
                    // After an update the cluster holds this version or a later one. After a put it may hold an older
                    // one.
                    if chunks[id].1 == WriteMode::Update {
                        self.unsynced.written(rows.keys[place], rows.versions[place]);
                    }
                }
                Ok(())
            }
            Value::BulkString(layout) => Err(self.another_layout(&String::from_utf8_lossy(&layout))),
            other => Err(format!("an answer that is no number: {other:?}")),
        })
    }
}

impl Tier for RedisTier {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()> {
        let limit = Instant::now() + self.cluster.options().timeout;
        let limit = deadline.map_or(limit, |deadline| deadline.min(limit));
        let chunks = self.chunks(keys, self.rows_at_once(MAX_READ), 0..keys.len());
        let request = |(id, (partition, places)): (usize, &(usize, Vec<usize>))| {
            let partition = &self.partitions[*partition];
            let command = partition.fetch(places.iter().map(|&place| keys[place]));
            let bytes = places.len() * self.layout.row_bytes() + command.len();
            Request { id, slot: partition.slot, command, bytes, asking: false }
        };
        let requests = chunks.iter().enumerate().map(request).collect();
        let mut found: Vec<_> = chunks.iter().map(|(partition, _)| (*partition, Vec::new())).collect();
        let failures = exchange(&self.cluster, requests, Limit::Until(limit), &mut |id, value| {
            self.read(keys, &chunks[id].1, value, sink, &mut found[id].1)
        });
        self.touch(&found);
        if failures.requests.is_empty() {
            return Ok(());
        }
        let some = failures.requests.iter().map(|&id| chunks[id].1.len()).sum();
        Err(self.failed(some, keys.len(), "keys", "looked up", &failures))
    }

    fn put(&self, found: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()> {
        // During an update nothing is put. The next lookup of these keys can put them.
        let Some(_guard) = self.update_lock.try_read() else { return Ok(()) };
        // A row that is out of sync is replaced.
        let mode = |place: usize| {
            let unsynced = self.unsynced.version(found.keys[place]).is_some();
            current(place).then_some(if unsynced { WriteMode::Update } else { WriteMode::Put })
        };
        let (lost, failures) = self.write(found, mode);
        if lost.is_empty() {
            return Ok(());
        }
        Err(self.failed(lost.len(), found.len(), "rows", "put", &failures))
    }

    /// After an error this process ignores the rows in the cluster that the update did not reach. Other processes still
    /// use them. Repeating the update repairs them.
    fn update(&self, change: &Rows<'_>) -> Result<()> {
        let guard = self.update_lock.write();
        let (lost, failures) = self.write(change, |_| Some(WriteMode::Update));
        if lost.is_empty() {
            return Ok(());
        }
        let forgotten = lost.iter().filter(|&&place| !self.unsynced.add(change.keys[place], change.versions[place]));
        let forgotten = forgotten.count();
        drop(guard);
        if forgotten > 0 {
            log::error!("table {:?}: of {forgotten} keys that Redis did not get, old rows may be served", self.table);
        }
        Err(self.failed(lost.len(), change.len(), "rows", "updated", &failures))
    }

    fn unsynced_version(&self, key: i64) -> Option<Version> {
        self.unsynced.version(key)
    }

    fn mark_unsynced(&self, key: i64, version: Version) {
        // If there is no room, the next lookup detects it again.
        self.unsynced.add(key, version);
    }

    fn memory(&self) -> u64 {
        self.unsynced.memory()
    }
}

fn layout_field(layout: Layout, partitions: usize) -> String {
    let row_type = match layout.row_type() {
        RowType::F32 => "f32",
        RowType::F16 => "f16",
        RowType::I8 => "i8",
    };
    format!("{} x {row_type} in {partitions} partitions", layout.dim())
}
