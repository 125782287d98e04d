//! One table: its cache, its tiers, and what is known of its keys.

pub(in crate::embedding) mod open_table;
pub(in crate::embedding) mod registry;
mod source_note;
pub(in crate::embedding) mod stats;
mod table_files;
pub(in crate::embedding) mod table_handle;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::embedding::log_throttle::LogThrottle;
use crate::embedding::lookup::negative_cache::NegativeCache;
use crate::embedding::row::Layout;
use crate::embedding::tiers::cache::Cache;
use crate::embedding::tiers::gpu::device_cache::DeviceCaches;
use crate::embedding::tiers::tier::Tier;
use crate::embedding::update::acknowledged_versions::AcknowledgedVersions;
use crate::embedding::update::refresh_progress::RefreshProgress;
use crate::embedding::update::unverified_keys::UnverifiedKeys;
use crate::embedding::update::update_epochs::UpdateEpochs;
use crate::metrics::TableMetrics;
use crate::sync::Mutex;

/// How long the negative cache holds a key.
const NEGATIVE_TTL: Duration = Duration::from_secs(30);
/// How many keys a refresh or an update reads from a tier at a time. An update waits for one such step at most.
pub(in crate::embedding) const STEP_KEYS: usize = 4096;

/// An open table.
pub(in crate::embedding) struct Table {
    pub(in crate::embedding) name: String,
    pub(in crate::embedding) layout: Layout,
    pub(in crate::embedding) cache: Option<Cache>,
    /// The caches on GPUs, for graphs that run there. They receive the same rows as `cache`.
    pub(in crate::embedding) devices: DeviceCaches,
    /// From the fastest to the largest.
    pub(in crate::embedding) tiers: Vec<TableTier>,
    pub(in crate::embedding) epochs: UpdateEpochs,
    pub(in crate::embedding) negative_cache: NegativeCache,
    /// `None` if an acknowledged update can not be lost: the lowest tier is durable and writable, or it is the only
    /// one.
    pub(in crate::embedding) acknowledged: Option<AcknowledgedVersions>,
    /// Whether a lookup has found that a shared tier lost an update.
    pub(in crate::embedding) lost_updates: AtomicBool,
    pub(in crate::embedding) unverified: UnverifiedKeys,
    pub(in crate::embedding) warnings: LogThrottle,
    /// Held by an update: updates of a table run one after the other.
    pub(in crate::embedding) update_lock: Mutex<()>,
    pub(in crate::embedding) refresh: Mutex<RefreshProgress>,
    pub(in crate::embedding) metrics: TableMetrics,
}

/// A tier of a table and its role.
pub(in crate::embedding) struct TableTier {
    pub(in crate::embedding) tier: Box<dyn Tier>,
    /// Whether it stores rows that were found in lower tiers.
    pub(in crate::embedding) stores_fetched: bool,
    /// Whether it takes updates.
    pub(in crate::embedding) writable: bool,
    /// Whether other processes update it too. It is reached over a network.
    pub(in crate::embedding) shared: bool,
    /// Whether it is in the memory of this process.
    pub(in crate::embedding) in_memory: bool,
    /// Whether it belongs to this process alone and keeps acknowledged updates over a restart.
    pub(in crate::embedding) durable: bool,
}

impl Table {
    pub(in crate::embedding) fn new(name: String, layout: Layout, cache: Option<Cache>, tiers: Vec<TableTier>) -> Self {
        let metrics = TableMetrics::new(&name);
        let shared = tiers.iter().any(|tier| tier.shared);
        let keeps_all = tiers.last().is_some_and(|lowest| lowest.writable && lowest.durable);
        let acknowledged = !keeps_all && (shared || tiers.len() > 1);
        Self {
            name,
            layout,
            cache,
            devices: DeviceCaches::default(),
            tiers,
            epochs: UpdateEpochs::new(),
            negative_cache: NegativeCache::new(NEGATIVE_TTL),
            acknowledged: acknowledged.then(AcknowledgedVersions::new),
            lost_updates: AtomicBool::new(false),
            unverified: UnverifiedKeys::default(),
            warnings: LogThrottle::default(),
            update_lock: Mutex::new(()),
            refresh: Mutex::new(RefreshProgress::now()),
            metrics,
        }
    }

    /// The approximate number of bytes that it takes in memory.
    pub(in crate::embedding) fn memory(&self) -> u64 {
        let tiers: u64 = self.tiers.iter().map(|tier| tier.tier.memory()).sum();
        let versions = self.acknowledged.as_ref().map_or(0, AcknowledgedVersions::memory);
        tiers + versions + self.cache.as_ref().map_or(0, Cache::memory)
    }
}
