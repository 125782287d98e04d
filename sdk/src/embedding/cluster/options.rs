//! What can be chosen about a cluster.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::address::Address;
use crate::embedding::overflow::Overflow;
use crate::error::{Error, Result};

/// The most partitions of a table: there are 16,384 slots, and a lookup sends a command for each partition it touches.
const MAX_PARTITIONS: usize = 4096;

/// What can be waited for: something, and nothing that is as good as for ever.
const TIMES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(3600);

/// How to use a Redis Cluster (Redis 6.2 or later) as a floor.
///
/// With `cluster-require-full-coverage no` in the settings of the nodes, those that are left go on serving when one is
/// down; Redis' own default is that none does.
#[derive(Clone)]
pub struct RedisOptions {
    /// Some of the nodes, as `host:port`. The others are found through them.
    pub addresses: Vec<String>,
    /// Who to log in as; `None`: Redis' user `default`.
    pub user: Option<String>,
    /// The password, if the cluster wants one.
    pub password: Option<String>,
    /// How to encrypt what is sent; `None`: not at all.
    pub tls: Option<Tls>,
    /// In how many pieces a table is cut. Each lies on one node, so there should be a few for each node. All processes
    /// that share a table use the same number.
    pub partitions: usize,
    /// How many rows a partition may have. When it has more, rows leave it, some with every write.
    pub margin: usize,
    /// Which rows leave.
    pub policy: Overflow,
    /// Rows leave until this part of `margin` is left, above 0 and at most 1.
    pub target: f64,
    /// The longest that a lookup waits, and a write waits for each answer.
    pub timeout: Duration,
    /// After how many failures in a row a node is left alone.
    pub breaker_failures: u32,
    /// How long it is left alone before it is tried again.
    pub breaker_pause: Duration,
    /// Connections to each node, with a thread for each.
    pub connections: usize,
    /// Whether it can be opened while no node can be reached. Lookups then fail at once until one can.
    pub lazy: bool,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            addresses: Vec::new(),
            user: None,
            password: None,
            tls: None,
            partitions: 8,
            margin: usize::MAX,
            policy: Overflow::Random,
            target: 0.8,
            timeout: Duration::from_millis(100),
            breaker_failures: 3,
            breaker_pause: Duration::from_secs(1),
            connections: 2,
            lazy: false,
        }
    }
}

impl RedisOptions {
    /// Checks what can be checked without a cluster; gives the addresses.
    pub(super) fn check(&self) -> Result<Vec<Address>> {
        let refuse = |argument: &str, message: String| Err(Error::invalid(argument, message));
        if self.addresses.is_empty() {
            return refuse("addresses", "there is none; give at least one node as host:port".into());
        }
        if self.partitions == 0 || self.partitions > MAX_PARTITIONS {
            return refuse("partitions", format!("{} is not between 1 and {MAX_PARTITIONS}", self.partitions));
        }
        if self.margin == 0 {
            return refuse("margin", "a partition of 0 rows can not keep any; give 1 or more".into());
        }
        if !(self.target > 0.0 && self.target <= 1.0) {
            return refuse("target", format!("{} is not above 0 and at most 1", self.target));
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
impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            addresses,
            user,
            password,
            tls,
            partitions,
            margin,
            policy,
            target,
            timeout,
            breaker_failures,
            breaker_pause,
            connections,
            lazy,
        } = self;
        f.debug_struct("RedisOptions")
            .field("addresses", addresses)
            .field("user", user)
            .field("password", &password.as_ref().map(|_| "(not shown)"))
            .field("tls", tls)
            .field("partitions", partitions)
            .field("margin", margin)
            .field("policy", policy)
            .field("target", target)
            .field("timeout", timeout)
            .field("breaker_failures", breaker_failures)
            .field("breaker_pause", breaker_pause)
            .field("connections", connections)
            .field("lazy", lazy)
            .finish()
    }
}

/// How to encrypt what is sent. Every node must have a certificate for the name or number under which the cluster tells
/// others of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// A file with the certificates that are trusted, in PEM; `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// Files with a certificate of our own and its key, in PEM, if the cluster wants one.
    pub client: Option<(PathBuf, PathBuf)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_not_shown() {
        let options = RedisOptions { password: Some("hush".into()), user: Some("anna".into()), ..Default::default() };
        let shown = format!("{options:?}");
        assert!(shown.contains("anna") && shown.contains("(not shown)") && !shown.contains("hush"), "{shown}");
    }

    #[test]
    fn values_that_can_not_be_used_are_named() {
        let good = RedisOptions { addresses: vec!["a:1".into()], ..Default::default() };
        assert_eq!(good.check().unwrap(), [Address { host: "a".into(), port: 1 }]);
        type Spoil = fn(&mut RedisOptions);
        let cases: [(&str, Spoil); 9] = [
            ("addresses", |options| options.addresses.clear()),
            ("addresses[0]", |options| options.addresses[0] = "no-port".into()),
            ("partitions", |options| options.partitions = 0),
            ("margin", |options| options.margin = 0),
            ("target", |options| options.target = f64::NAN),
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
