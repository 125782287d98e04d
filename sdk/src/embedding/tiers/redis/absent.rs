//! What stands for the tier in a Redis Cluster in a library that was built without it (feature `redis`).

mod stats;

use std::sync::Arc;

pub use self::stats::RedisStats;
use crate::embedding::options::{REDIS, RedisOptions};
use crate::embedding::row::Layout;
use crate::embedding::tiers::tier::Tier;
use crate::error::{Error, Result, Status};

/// A cluster. There is none.
pub(in crate::embedding) enum Cluster {}

impl Cluster {
    /// An error that says how to get this tier.
    pub(in crate::embedding) fn open(options: RedisOptions) -> Result<Arc<Self>> {
        options.check()?;
        let message = "this library was built without the tier in a Redis Cluster: build it with the feature `redis`, \
            as `make build` does";
        Err(Error::new(Status::Unsupported, message).about(REDIS))
    }

    /// The same error: it does not pass by itself, as a cluster that is down does.
    pub(in crate::embedding) fn open_lazy(options: RedisOptions) -> Result<Arc<Self>> {
        Self::open(options)
    }

    /// Never called.
    pub(in crate::embedding) fn stats(&self) -> RedisStats {
        match *self {}
    }
}

/// Never called.
pub(in crate::embedding) fn open(cluster: Arc<Cluster>, _: &str, _: Layout) -> Result<Box<dyn Tier>> {
    match *cluster {}
}
