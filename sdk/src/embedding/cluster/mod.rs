//! A Redis Cluster as a floor, shared by any number of processes.
//!
//! A table is cut into partitions by a hash of the key. Each is a hash in Redis, in a slot of its own and so on one node:
//! `pagoda:{<table>/<partition>}:rows`, from the 8 bytes of a key to the 8 bytes of a version and the row, or nothing
//! after the version for a key that was deleted. Beside the rows it has a field `layout`, so that nobody takes the rows
//! of one layout for those of another.

mod address;
mod behind;
mod bell;
mod breaker;
mod exchange;
mod link;
mod node;
mod nodes;
mod options;
mod script;
mod stats;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use redis::Value;
use twox_hash::XxHash3_64;

use self::behind::Behind;
use self::exchange::{Failures, Limit, exchange, tell};
use self::node::Request;
pub(super) use self::nodes::Nodes;
pub(super) use self::options::{RedisOptions, Tls};
use self::script::{Mode, Partition, Terms};
pub use self::stats::RedisStats;
use super::floor::{Floor, Rows, Sink};
use super::overflow::Overflow;
use super::row::{Layout, RowType};
use crate::error::{Error, Result, Status};
use crate::sync::RwLock;

/// The most keys that are read with one command, and rows that are written with one: a node does nothing else meanwhile.
const MAX_READ: usize = 1024;
const MAX_WRITE: usize = 256;
/// About the most bytes of one command and its answer.
const CHUNK_BYTES: usize = 1 << 18;
/// So many rows are on their way at the same time when many are written.
const WINDOW: usize = 8192;

/// Whether anybody still waits for an answer.
type Wanted = Arc<AtomicBool>;

/// One table in a cluster.
pub(super) struct Cluster {
    nodes: Arc<Nodes>,
    table: String,
    layout: Layout,
    /// The layout as it is written into the cluster.
    record: String,
    partitions: Vec<Partition>,
    behind: Behind,
    /// Held by every `put` for reading and by an update for writing, so that nothing that was found before an update is
    /// put after it.
    order: RwLock<()>,
}

impl Cluster {
    /// Opens a table, which need not be there yet. It is an error if it is there with another layout, and, unless the
    /// options are lazy, if no node that has some of it answers.
    pub(super) fn open(nodes: Arc<Nodes>, table: &str, layout: Layout) -> Result<Self> {
        if table.is_empty() || table.len() > 255 || table.contains(['{', '}']) {
            let message = format!("{table:?} can not name a table in Redis; use 1 to 255 bytes without braces");
            return Err(Error::invalid("table", message));
        }
        let count = nodes.options().partitions;
        let cluster = Self {
            table: table.into(),
            layout,
            record: record(layout, count),
            partitions: (0..count).map(|number| Partition::new(table, number)).collect(),
            behind: Behind::default(),
            order: RwLock::default(),
            nodes,
        };
        cluster.check()?;
        Ok(cluster)
    }

    /// What was counted, all tables of the cluster together.
    #[cfg(test)]
    pub(super) fn stats(&self) -> RedisStats {
        self.nodes.stats()
    }

    /// Compares the layout with what every partition has, and writes it where there is none.
    fn check(&self) -> Result<()> {
        let write = |(id, partition): (usize, &Partition)| {
            let command = partition.write(&self.terms(), Mode::Put, &[]);
            Request { id, slot: partition.slot, bytes: command.len(), command, asking: false }
        };
        let requests: Vec<_> = self.partitions.iter().enumerate().map(write).collect();
        let mut other = None;
        let failures = exchange(&self.nodes, requests, self.limit_each(), &mut |_, value| {
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
        if failures.requests.len() == self.partitions.len() && !self.nodes.options().lazy {
            return Err(error);
        }
        // They are compared again with every lookup and write.
        log::warn!("{error}");
        Ok(())
    }

    fn terms(&self) -> Terms<'_> {
        let options = self.nodes.options();
        // The margin may be "as many as you like", which no number of rows reaches.
        let target = (options.margin as f64 * options.target) as usize;
        Terms { layout: self.record.as_bytes(), policy: options.policy, margin: options.margin, target }
    }

    fn limit_each(&self) -> Limit {
        Limit::Each(self.nodes.options().timeout)
    }

    fn another_layout(&self, other: &str) -> String {
        format!(
            "table {:?} is in the cluster as {other}, not as {}. Use the same in every process, or another name",
            self.table, self.record
        )
    }

    fn failed(&self, some: usize, all: usize, what: &str, done: &str, failures: &Failures) -> Error {
        self.nodes.counters().errors.fetch_add(1, Relaxed);
        let message =
            format!("table {:?}: {some} of {all} {what} could not be {done} in Redis: {}", self.table, failures.reason);
        Error::new(Status::Io, message)
    }

    /// The places of keys by partition, in pieces of at most so many.
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

    /// The partition of a key. Other processes, and this one after an update, must come to the same.
    fn partition(&self, key: i64) -> usize {
        (XxHash3_64::oneshot(&key.to_le_bytes()) % self.partitions.len() as u64) as usize
    }

    /// How many rows go into one command.
    fn rows_at_once(&self, most: usize) -> usize {
        (CHUNK_BYTES / (self.layout.row_bytes() + 32)).clamp(1, most)
    }

    /// Reads one answer, whose first value is the layout.
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
            && layout != self.record.as_bytes()
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
            let version = u64::from_be_bytes(*version);
            if !self.behind.is_stale(key, version) {
                sink(place, version, (!row.is_empty()).then_some(row));
                found.push(key);
            }
        }
        Ok(())
    }

    /// Notes what was looked up, if that decides which rows leave. Nobody waits for it.
    fn touch(&self, found: &[(usize, Vec<i64>)]) {
        let policy = self.nodes.options().policy;
        if policy == Overflow::Random {
            return;
        }
        let found = found.iter().filter(|(_, keys)| !keys.is_empty()).map(|(partition, keys)| {
            let partition = &self.partitions[*partition];
            let command = partition.touch(policy, keys);
            Request { id: 0, slot: partition.slot, bytes: command.len(), command, asking: false }
        });
        tell(&self.nodes, found.collect());
    }

    /// Writes the rows for which there is a mode. Gives the places of those that could not be written, and why.
    fn write(&self, rows: &Rows<'_>, mode: impl Fn(usize) -> Option<Mode>) -> (Vec<usize>, Failures) {
        let mut lost = Vec::new();
        let mut first = Failures::default();
        for start in (0..rows.len()).step_by(WINDOW) {
            let window = start..(start + WINDOW).min(rows.len());
            let modes: Vec<_> = window.clone().map(&mode).collect();
            let mut chunks = Vec::new();
            for mode in [Mode::Put, Mode::Update] {
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

    fn write_chunks(&self, rows: &Rows<'_>, chunks: &[(usize, Mode, Vec<usize>)]) -> Failures {
        let request = |(id, (partition, mode, places)): (usize, &(usize, Mode, Vec<usize>))| {
            let row = |&place: &usize| (rows.keys[place], rows.versions[place], rows.row(place).unwrap_or(&[]));
            let partition = &self.partitions[*partition];
            let command = partition.write(&self.terms(), *mode, &places.iter().map(row).collect::<Vec<_>>());
            Request { id, slot: partition.slot, bytes: command.len(), command, asking: false }
        };
        let requests = chunks.iter().enumerate().map(request).collect();
        exchange(&self.nodes, requests, self.limit_each(), &mut |id, value| match value {
            Value::Int(evicted) => {
                self.nodes.counters().evicted.fetch_add(evicted.max(0).cast_unsigned(), Relaxed);
                for &place in &chunks[id].2 {
                    // What it has now is this version or a later one, except for what was there and was only put.
                    if chunks[id].1 == Mode::Update {
                        self.behind.written(rows.keys[place], rows.versions[place]);
                    }
                }
                Ok(())
            }
            Value::BulkString(layout) => Err(self.another_layout(&String::from_utf8_lossy(&layout))),
            other => Err(format!("an answer that is no number: {other:?}")),
        })
    }
}

impl Floor for Cluster {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()> {
        let limit = Instant::now() + self.nodes.options().timeout;
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
        let failures = exchange(&self.nodes, requests, Limit::Until(limit), &mut |id, value| {
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
        // While an update is under way nothing is put: whoever looks for it next can do it.
        let Some(_order) = self.order.try_read() else { return Ok(()) };
        // What is there but behind is no reason to keep it.
        let mode = |place: usize| {
            let behind = self.behind.version(found.keys[place]).is_some();
            current(place).then_some(if behind { Mode::Update } else { Mode::Put })
        };
        let (lost, failures) = self.write(found, mode);
        if lost.is_empty() {
            return Ok(());
        }
        Err(self.failed(lost.len(), found.len(), "rows", "put", &failures))
    }

    /// After an error this process does not believe what the cluster has for the rows that it has not heard of; others
    /// do. Doing the same update again sets it right.
    fn update(&self, change: &Rows<'_>) -> Result<()> {
        let order = self.order.write();
        let (lost, failures) = self.write(change, |_| Some(Mode::Update));
        if lost.is_empty() {
            return Ok(());
        }
        let forgotten = lost.iter().filter(|&&place| !self.behind.note(change.keys[place], change.versions[place]));
        let forgotten = forgotten.count();
        drop(order);
        if forgotten > 0 {
            log::error!("table {:?}: of {forgotten} keys that Redis did not get, old rows may be served", self.table);
        }
        Err(self.failed(lost.len(), change.len(), "rows", "updated", &failures))
    }

    fn missed(&self, key: i64) -> Option<u64> {
        self.behind.version(key)
    }

    fn lost(&self, key: i64, version: u64) {
        // Without room for it, it is found out again with the next lookup.
        self.behind.note(key, version);
    }

    fn memory(&self) -> u64 {
        self.behind.memory()
    }
}

fn record(layout: Layout, partitions: usize) -> String {
    let row_type = match layout.row_type() {
        RowType::F32 => "f32",
        RowType::F16 => "f16",
        RowType::I8 => "i8",
    };
    format!("{} x {row_type} in {partitions} partitions", layout.dim())
}
