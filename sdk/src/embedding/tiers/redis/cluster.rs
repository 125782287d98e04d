//! All nodes of a cluster, and the slot map.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::address::SLOTS;
use super::connector::{Connector, Range};
use super::counters::Counters;
use super::node::Node;
use super::stats::RedisStats;
use super::wakeup::Wakeup;
use crate::embedding::options::{Address, REDIS, RedisOptions};
use crate::error::{Error, Result, Status};
use crate::sync::{Mutex, RwLock, Worker};

/// The least time between two refreshes of the slot map, so that a failing cluster is not flooded with requests.
const REFRESH_PAUSE: Duration = Duration::from_millis(50);

/// A cluster, which all its tables share.
pub(in crate::embedding) struct Cluster {
    shared: Arc<Shared>,
    /// Refreshes the slot map. Dropped after `shared.wakeup` is closed.
    map_refresher: Option<Worker>,
}

struct Shared {
    options: RedisOptions,
    /// Whether it opens while no node can be reached.
    lazy: bool,
    connector: Arc<Connector>,
    counters: Arc<Counters>,
    wakeup: Arc<Wakeup>,
    /// By address. A redirection may name a node that is not in the slot map yet.
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    map: RwLock<Arc<SlotMap>>,
}

/// The slot ranges with their nodes, in order.
#[derive(Default)]
pub(super) struct SlotMap {
    ranges: Vec<(u16, u16, Arc<Node>)>,
}

impl Cluster {
    /// Finds the nodes. An error if none can be reached.
    pub(in crate::embedding) fn open(options: RedisOptions) -> Result<Arc<Self>> {
        Self::start(options, false)
    }

    /// As [`Self::open`], even while no node can be reached. Lookups fail at once until one is.
    pub(in crate::embedding) fn open_lazy(options: RedisOptions) -> Result<Arc<Self>> {
        Self::start(options, true)
    }

    fn start(options: RedisOptions, lazy: bool) -> Result<Arc<Self>> {
        options.check()?;
        let shared = Arc::new(Shared {
            connector: Arc::new(Connector::new(&options)?),
            options,
            lazy,
            counters: Arc::default(),
            wakeup: Arc::default(),
            nodes: Mutex::default(),
            map: RwLock::default(),
        });
        // From here on, dropping it ends the threads that were started.
        let mut cluster = Self { shared, map_refresher: None };
        if let Err(error) = cluster.shared.refresh_map() {
            if !lazy {
                return Err(error);
            }
            log::warn!("{error}");
        }
        let shared = cluster.shared.clone();
        let refresher = Worker::spawn("pagoda-redis-map", "refresh the slot map of Redis with", move || shared.run())?;
        cluster.map_refresher = Some(refresher);
        Ok(Arc::new(cluster))
    }

    /// The counts of all tables.
    pub(in crate::embedding) fn stats(&self) -> RedisStats {
        self.shared.counters.stats()
    }

    pub(super) fn options(&self) -> &RedisOptions {
        &self.shared.options
    }

    pub(super) fn is_lazy(&self) -> bool {
        self.shared.lazy
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub(super) fn map(&self) -> Arc<SlotMap> {
        self.shared.map()
    }

    /// The node at an address. Starts it if it is new.
    pub(super) fn at(&self, address: &Address) -> Result<Arc<Node>> {
        self.shared.at(address)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.shared.wakeup.close();
        self.map_refresher = None;
        // All are closed before the first is joined, so that they end at the same time.
        let nodes = std::mem::take(&mut *self.shared.nodes.lock());
        nodes.values().for_each(|node| node.close());
        nodes.values().for_each(|node| node.join());
    }
}

impl SlotMap {
    /// The node that has a slot.
    pub(super) fn node(&self, slot: u16) -> Option<&Arc<Node>> {
        let after = self.ranges.partition_point(|(first, ..)| *first <= slot);
        let (_, last, node) = self.ranges.get(after.checked_sub(1)?)?;
        (slot <= *last).then_some(node)
    }

    fn is_complete(&self) -> bool {
        let covered: usize = self.ranges.iter().map(|(first, last, _)| usize::from(last - first) + 1).sum();
        covered == usize::from(SLOTS)
    }
}

impl Shared {
    fn map(&self) -> Arc<SlotMap> {
        self.map.read().clone()
    }

    /// The loop of the map refresher. It refreshes the slot map when it is woken, and periodically while the map has
    /// gaps.
    fn run(&self) {
        loop {
            let limit = (!self.map().is_complete()).then_some(self.options.breaker_pause);
            if !self.wakeup.wait(limit) {
                return;
            }
            if let Err(error) = self.refresh_map() {
                log::debug!("{error}");
            }
            if !self.wakeup.sleep(REFRESH_PAUSE) {
                return;
            }
        }
    }

    /// Asks one node after the other for the slots, until one answers.
    fn refresh_map(&self) -> Result<()> {
        let mut known: Vec<_> = self.nodes.lock().values().cloned().collect();
        known.sort_by_key(|node| !node.is_available());
        let mut addresses: Vec<_> = known.iter().map(|node| node.address.clone()).collect();
        let more: Vec<_> = self.options.nodes.iter().filter(|&node| !addresses.contains(node)).cloned().collect();
        addresses.extend(more);
        let mut reasons = Vec::new();
        for address in addresses {
            match self.connector.ranges(&address) {
                Ok(ranges) if ranges.is_empty() => reasons.push(format!("{address}: it knows of no slots")),
                Ok(ranges) => return self.replace_map(ranges),
                Err(error) => reasons.push(format!("{address}: {error}")),
            }
        }
        let message = format!(
            "no node of the Redis Cluster can be reached: {}. Check the addresses, the password and whether it runs",
            reasons.join("; ")
        );
        Err(Error::new(Status::Io, message).about(format!("{REDIS}.nodes")))
    }

    fn replace_map(&self, ranges: Vec<Range>) -> Result<()> {
        let mut map = SlotMap::default();
        for Range { first, last, address } in ranges {
            map.ranges.push((first, last, self.at(&address)?));
        }
        let gone: Vec<_> = {
            let mut nodes = self.nodes.lock();
            let gone = nodes.extract_if(|_, node| !map.ranges.iter().any(|(.., other)| Arc::ptr_eq(node, other)));
            gone.map(|(_, node)| node).collect()
        };
        *self.map.write() = Arc::new(map);
        gone.iter().for_each(|node| node.close());
        Ok(())
    }

    fn at(&self, address: &Address) -> Result<Arc<Node>> {
        let mut nodes = self.nodes.lock();
        if let Some(node) = nodes.get(address) {
            return Ok(node.clone());
        }
        let node = Node::start(address.clone(), &self.options, &self.connector, &self.counters, &self.wakeup)?;
        nodes.insert(address.clone(), node.clone());
        Ok(node)
    }
}
