//! The options of a cluster.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::address::Address;
use crate::embedding::eviction::Eviction;
use crate::error::{Error, Result};

/// The most partitions of a table. A cluster has 16,384 slots, and a lookup sends a command for each partition of its
/// keys.
const MAX_PARTITIONS: usize = 4096;

/// The valid time limits.
const TIMES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// How to use a Redis Cluster (Redis 6.2 or later) as a tier.
///
/// With `cluster-require-full-coverage no` in the settings of the nodes, the other nodes go on serving when one is
/// down. By the default of Redis none does.
#[derive(Clone)]
pub(in crate::embedding) struct ClusterOptions {
    /// Some of the nodes, as `host:port`. The others are found through them.
    pub(in crate::embedding) addresses: Vec<String>,
    /// The user; `None`: the user `default` of Redis.
    pub(in crate::embedding) user: Option<String>,
    /// The password, if the cluster requires one.
    pub(in crate::embedding) password: Option<String>,
    /// The files for TLS; `None`: connections are not encrypted.
    pub(in crate::embedding) tls: Option<TlsFiles>,
    /// The number of partitions of a table. Each lies on one node, so there should be a few for each node. All
    /// processes that share a table use the same number.
    pub(in crate::embedding) partitions: usize,
    /// The most rows of a partition. Above it every write evicts some rows.
    pub(in crate::embedding) max_rows: usize,
    /// Which rows are evicted.
    pub(in crate::embedding) eviction: Eviction,
    /// The share of `max_rows` at which eviction ends, above 0 and at most 1.
    pub(in crate::embedding) keep: f64,
    /// The time limit of a lookup, and of each answer to a write.
    pub(in crate::embedding) timeout: Duration,
    /// The number of consecutive failures of a node that opens its circuit breaker.
    pub(in crate::embedding) breaker_failures: u32,
    /// The time from the opening of a circuit breaker to the next trial.
    pub(in crate::embedding) breaker_pause: Duration,
    /// The number of connections to each node, each with a thread.
    pub(in crate::embedding) connections: usize,
    /// Whether it can be opened while no node is reachable. Lookups fail at once until one is.
    pub(in crate::embedding) lazy: bool,
}

impl Default for ClusterOptions {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            user: None,
            password: None,
            tls: None,
            partitions: 8,
            max_rows: usize::MAX,
            eviction: Eviction::Random,
            keep: 0.8,
            timeout: Duration::from_millis(100),
            breaker_failures: 3,
            breaker_pause: Duration::from_secs(1),
            connections: 2,
            lazy: false,
        }
    }
}

impl ClusterOptions {
    /// Checks the values, and returns the parsed addresses.
    pub(super) fn check(&self) -> Result<Vec<Address>> {
        let refuse = |argument: &str, message: String| Err(Error::invalid(argument, message));
        if self.addresses.is_empty() {
            return refuse("addresses", "there is none; give at least one node as host:port".into());
        }
        if self.partitions == 0 || self.partitions > MAX_PARTITIONS {
            return refuse("partitions", format!("{} is not between 1 and {MAX_PARTITIONS}", self.partitions));
        }
        if self.max_rows == 0 {
            return refuse("max_rows", "a partition of 0 rows can not keep any; give 1 or more".into());
        }
        if !(self.keep > 0.0 && self.keep <= 1.0) {
            return refuse("keep", format!("{} is not above 0 and at most 1", self.keep));
        }
        if self.breaker_failures == 0 {
            return refuse("breaker_failures", "after 0 failures no node would ever be used; give 1 or more".into());
        }
        for (argument, time) in [("timeout", self.timeout), ("breaker_pause", self.breaker_pause)] {
            if !TIMES.contains(&time) {
                return refuse(argument, format!("{time:?} is not between {:?} and {:?}", TIMES.start(), TIMES.end()));
            }
        }
        if self.connections == 0 || self.connections > 64 {
            return refuse("connections", format!("{} is not between 1 and 64", self.connections));
        }
        let parse = |(number, text): (usize, &String)| {
            Address::parse(text).ok_or_else(|| {
                Error::invalid(format!("addresses[{number}]"), format!("{text:?} is not of the form host:port"))
            })
        };
        self.addresses.iter().enumerate().map(parse).collect()
    }
}

/// Without the password.
impl fmt::Debug for ClusterOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            addresses,
            user,
            password,
            tls,
            partitions,
            max_rows,
            eviction,
            keep,
            timeout,
            breaker_failures,
            breaker_pause,
            connections,
            lazy,
        } = self;
        f.debug_struct("ClusterOptions")
            .field("addresses", addresses)
            .field("user", user)
            .field("password", &password.as_ref().map(|_| "(not shown)"))
            .field("tls", tls)
            .field("partitions", partitions)
            .field("max_rows", max_rows)
            .field("eviction", eviction)
            .field("keep", keep)
            .field("timeout", timeout)
            .field("breaker_failures", breaker_failures)
            .field("breaker_pause", breaker_pause)
            .field("connections", connections)
            .field("lazy", lazy)
            .finish()
    }
}

/// The files for TLS. Every node must have a certificate for the name or the address by which the cluster announces it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::embedding) struct TlsFiles {
    /// A PEM file with the trusted certificates; `None`: those of the system.
    pub(in crate::embedding) ca: Option<PathBuf>,
    /// PEM files with the client certificate and its key, if the cluster requires one.
    pub(in crate::embedding) client: Option<(PathBuf, PathBuf)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_not_shown() {
        let options = ClusterOptions { password: Some("hush".into()), user: Some("anna".into()), ..Default::default() };
        let shown = format!("{options:?}");
        assert!(shown.contains("anna") && shown.contains("(not shown)") && !shown.contains("hush"), "{shown}");
    }

    #[test]
    fn values_that_can_not_be_used_are_named() {
        let good = ClusterOptions { addresses: vec!["a:1".into()], ..Default::default() };
        assert_eq!(good.check().unwrap(), [Address { host: "a".into(), port: 1 }]);
        type Spoil = fn(&mut ClusterOptions);
        let cases: [(&str, Spoil); 9] = [
            ("addresses", |options| options.addresses.clear()),
            ("addresses[0]", |options| options.addresses[0] = "no-port".into()),
            ("partitions", |options| options.partitions = 0),
            ("max_rows", |options| options.max_rows = 0),
            ("keep", |options| options.keep = f64::NAN),
            ("timeout", |options| options.timeout = Duration::ZERO),
            ("breaker_failures", |options| options.breaker_failures = 0),
            ("breaker_pause", |options| options.breaker_pause = Duration::MAX),
            ("connections", |options| options.connections = 0),
        ];
        for (argument, spoil) in cases {
            let mut options = good.clone();
            spoil(&mut options);
            assert_eq!(options.check().unwrap_err().argument(), Some(argument));
        }
    }
}
