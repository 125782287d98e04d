//! One table: its cache, its floors, and what is known of its keys.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::absent::Absent;
use super::acknowledged::Acknowledged;
use super::cache::Cache;
use super::device::Devices;
use super::doubtful::{Complaints, Doubtful};
use super::floor::Floor;
use super::refresh::Refreshed;
use super::row::Layout;
use super::stamps::Stamps;
use crate::metrics::TableMetrics;
use crate::sync::Mutex;

/// How long a key counts as absent after no floor had it.
const ABSENT: Duration = Duration::from_secs(30);

/// A table that is being served.
pub(super) struct Table {
    pub(super) name: String,
    pub(super) layout: Layout,
    pub(super) cache: Option<Cache>,
    /// Beside it, where graphs run on GPUs: what is put there is put here too.
    pub(super) devices: Devices,
    /// From the fastest to the largest.
    pub(super) floors: Vec<Level>,
    pub(super) stamps: Stamps,
    pub(super) absent: Absent,
    /// Unless a disk of this process keeps every change, or there is one floor alone.
    pub(super) acknowledged: Option<Acknowledged>,
    /// Whether a floor that others share was seen to have lost a change.
    pub(super) lost: AtomicBool,
    pub(super) doubtful: Doubtful,
    pub(super) complaints: Complaints,
    /// Held by whoever changes rows: one after the other.
    pub(super) updates: Mutex<()>,
    pub(super) refreshed: Mutex<Refreshed>,
    pub(super) counters: TableMetrics,
}

/// A floor and what it is for.
pub(super) struct Level {
    pub(super) floor: Box<dyn Floor>,
    /// Whether it takes what is found below.
    pub(super) keeps: bool,
    /// Whether it takes changes.
    pub(super) writable: bool,
    /// Whether other processes change it too, and it is reached over a network.
    pub(super) shared: bool,
    /// Whether it is in the memory of this process.
    pub(super) near: bool,
    /// Whether it is this process's own and keeps what it acknowledged.
    pub(super) durable: bool,
}

impl Table {
    pub(super) fn new(name: String, layout: Layout, cache: Option<Cache>, floors: Vec<Level>) -> Self {
        let counters = TableMetrics::new(&name);
        let shared = floors.iter().any(|level| level.shared);
        let keeps_all = floors.last().is_some_and(|lowest| lowest.writable && lowest.durable);
        let acknowledged = !keeps_all && (shared || floors.len() > 1);
        Self {
            name,
            layout,
            cache,
            devices: Devices::default(),
            floors,
            stamps: Stamps::new(),
            absent: Absent::new(ABSENT),
            acknowledged: acknowledged.then(Acknowledged::new),
            lost: AtomicBool::new(false),
            doubtful: Doubtful::default(),
            complaints: Complaints::default(),
            updates: Mutex::new(()),
            refreshed: Mutex::new(Refreshed::now()),
            counters,
        }
    }

    /// Bytes of memory that it takes, about.
    pub(super) fn memory(&self) -> u64 {
        let floors: u64 = self.floors.iter().map(|level| level.floor.memory()).sum();
        let versions = self.acknowledged.as_ref().map_or(0, Acknowledged::memory);
        floors + versions + self.cache.as_ref().map_or(0, Cache::memory)
    }
}
