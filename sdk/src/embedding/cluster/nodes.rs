//! All nodes of a cluster, and which of them has which slot.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::address::{Address, SLOTS};
use super::bell::Bell;
use super::link::{Link, Range};
use super::node::Node;
use super::options::RedisOptions;
use super::stats::{Counters, RedisStats};
use crate::error::{Error, Result, Status};
use crate::sync::{Mutex, RwLock};

/// Between one look at the slots and the next, so that a cluster in trouble is not asked all the time.
const LEAST_REST: Duration = Duration::from_millis(50);

/// A cluster: what all tables in it share.
pub(in crate::embedding) struct Nodes {
    shared: Arc<Shared>,
    scout: Option<JoinHandle<()>>,
}

struct Shared {
    options: RedisOptions,
    addresses: Vec<Address>,
    link: Arc<Link>,
    counters: Arc<Counters>,
    bell: Arc<Bell>,
    /// By its address, also one that a redirection has told of and the map does not know yet.
    nodes: Mutex<HashMap<Address, Arc<Node>>>,
    map: RwLock<Arc<Map>>,
}

/// Which node has which slots, in order.
#[derive(Default)]
pub(super) struct Map {
    ranges: Vec<(u16, u16, Arc<Node>)>,
}

impl Nodes {
    /// Finds the nodes. It is an error if none can be reached, unless the options are lazy.
    pub(in crate::embedding) fn open(options: RedisOptions) -> Result<Arc<Self>> {
        let addresses = options.check()?;
        let shared = Arc::new(Shared {
            link: Arc::new(Link::new(&options)?),
            options,
            addresses,
            counters: Arc::default(),
            bell: Arc::default(),
            nodes: Mutex::default(),
            map: RwLock::default(),
        });
        // From here on, what was started is ended by dropping it.
        let mut nodes = Self { shared, scout: None };
        if let Err(error) = nodes.shared.look() {
            if !nodes.shared.options.lazy {
                return Err(error);
            }
            log::warn!("{error}");
        }
        let shared = nodes.shared.clone();
        let scout = std::thread::Builder::new().name("pagoda-redis-map".into()).spawn(move || shared.scout());
        nodes.scout = Some(scout.map_err(|error| {
            let message = format!("no thread for Redis could be started: {error}. Check the limits of the user");
            Error::new(Status::Capacity, message)
        })?);
        Ok(Arc::new(nodes))
    }

    /// What was counted.
    pub(in crate::embedding) fn stats(&self) -> RedisStats {
        self.shared.counters.stats()
    }

    pub(super) fn options(&self) -> &RedisOptions {
        &self.shared.options
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub(super) fn map(&self) -> Arc<Map> {
        self.shared.map()
    }

    /// The node at an address, whether or not we knew of it.
    pub(super) fn at(&self, address: &Address) -> Result<Arc<Node>> {
        self.shared.at(address)
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        self.shared.bell.close();
        if let Some(scout) = self.scout.take() {
            let _ = scout.join();
        }
        // All before any: they end at the same time.
        let nodes = std::mem::take(&mut *self.shared.nodes.lock());
        nodes.values().for_each(|node| node.close());
        nodes.values().for_each(|node| node.join());
    }
}

impl Map {
    /// Who has a slot.
    pub(super) fn node(&self, slot: u16) -> Option<&Arc<Node>> {
        let after = self.ranges.partition_point(|(first, ..)| *first <= slot);
        let (_, last, node) = self.ranges.get(after.checked_sub(1)?)?;
        (slot <= *last).then_some(node)
    }

    fn is_whole(&self) -> bool {
        let covered: usize = self.ranges.iter().map(|(first, last, _)| usize::from(last - first) + 1).sum();
        covered == usize::from(SLOTS)
    }
}

impl Shared {
    fn map(&self) -> Arc<Map> {
        self.map.read().clone()
    }

    /// Looks at the slots again whenever a node seems not to have what the map says, and as long as the map has holes.
    fn scout(&self) {
        loop {
            let limit = (!self.map().is_whole()).then_some(self.options.breaker_pause);
            if !self.bell.wait(limit) {
                return;
            }
            if let Err(error) = self.look() {
                log::debug!("{error}");
            }
            if !self.bell.rest(LEAST_REST) {
                return;
            }
        }
    }

    /// Asks one node after the other which has which slots, until one answers.
    fn look(&self) -> Result<()> {
        let mut known: Vec<_> = self.nodes.lock().values().cloned().collect();
        known.sort_by_key(|node| !node.is_asked());
        let mut addresses: Vec<_> = known.iter().map(|node| node.address.clone()).collect();
        addresses
            .extend(self.addresses.iter().filter(|&address| !addresses.contains(address)).cloned().collect::<Vec<_>>());
        let mut reasons = Vec::new();
        for address in addresses {
            match self.link.ranges(&address) {
                Ok(ranges) if ranges.is_empty() => reasons.push(format!("{address}: it knows of no slots")),
                Ok(ranges) => return self.take(ranges),
                Err(error) => reasons.push(format!("{address}: {error}")),
            }
        }
        let message = format!(
            "no node of the Redis Cluster can be reached: {}. Check the addresses, the password and whether it runs",
            reasons.join("; ")
        );
        Err(Error::new(Status::Io, message).about("addresses"))
    }

    fn take(&self, ranges: Vec<Range>) -> Result<()> {
        let mut map = Map::default();
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
        let node = Node::start(address.clone(), &self.options, &self.link, &self.counters, &self.bell)?;
        nodes.insert(address.clone(), node.clone());
        Ok(node)
    }
}
