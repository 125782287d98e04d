//! The interface of the tiers below the cache.

use std::time::Instant;

use crate::embedding::update::version::Version;
use crate::error::{Error, Result};

/// One tier of one table: host memory, Redis, disk. Any number of threads call it at the same time, but updates of one
/// table run one after the other.
///
/// For each key a tier holds nothing, or a row, or a tombstone that records the deletion of the key. Rows and
/// tombstones have a version.
pub(in crate::embedding) trait Tier: Send + Sync {
    /// The name in logs and metrics: `memory`, `redis`, `disk`.
    fn name(&self) -> &'static str;

    /// Looks up keys. Calls `sink` once for each key of which this tier holds a row or a tombstone, in any order, with
    /// the index of the key, the version, and the row, or `None` for a tombstone.
    ///
    /// After an error the state of the keys that `sink` did not receive is unknown: the deadline passed, or the tier
    /// failed.
    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()>;

    /// Stores rows that were found in a lower tier. Rows and tombstones that this tier holds already stay. A row is not
    /// stored if `current` returns false for its index: the key was updated since the row was read. `current` is called
    /// while no other thread can change the key in this tier, as far as the tier can prevent it.
    fn put(&self, found: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()>;

    /// Updates and deletes rows. Rows with a higher version stay; rows with the same version are replaced.
    fn update(&self, change: &Rows<'_>) -> Result<()>;

    /// The version of the newest update of a key that did not reach this tier. `None` if the tier is in sync. While a
    /// key is out of sync, `fetch` does not return it. The key may exist nevertheless, and lower tiers may hold older
    /// versions.
    fn unsynced_version(&self, _key: i64) -> Option<Version> {
        None
    }

    /// Calls `sink` for the keys of which this tier holds a higher version than the given one. As a rule it reads no
    /// other rows. Only a durable tier of this process holds any. Returns the indices of the keys that could not be
    /// read, with the error.
    fn newer_than(&self, _keys: &[i64], _versions: &[Version], _sink: &mut Sink<'_>) -> Vec<(usize, Error)> {
        Vec::new()
    }

    /// The keys of all updates, if this tier is durable.
    fn updated_keys(&self) -> Vec<i64> {
        Vec::new()
    }

    /// Records that this tier has lost a version of a key. From now on the key is out of sync.
    fn mark_unsynced(&self, _key: i64, _version: Version) {}

    /// The approximate number of bytes that it takes in the memory of this process.
    fn memory(&self) -> u64;
}

/// Receives the rows of a lookup: index, version, row.
pub(in crate::embedding) type Sink<'a> = dyn FnMut(usize, Version, Option<&[u8]>) + 'a;

/// Rows and tombstones with their keys and versions.
pub(in crate::embedding) struct Rows<'a> {
    /// Unique keys.
    pub(in crate::embedding) keys: &'a [i64],
    /// One for each key.
    pub(in crate::embedding) versions: &'a [Version],
    /// One row for each key, contiguous. The bytes of tombstones are ignored.
    pub(in crate::embedding) rows: &'a [u8],
    /// Whether each key is a tombstone.
    pub(in crate::embedding) deleted: &'a [bool],
}

impl<'a> Rows<'a> {
    /// The number of keys.
    pub(in crate::embedding) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The row of one key, or `None` for a tombstone.
    pub(in crate::embedding) fn row(&self, index: usize) -> Option<&'a [u8]> {
        let bytes = self.rows.len() / self.len();
        (!self.deleted[index]).then(|| &self.rows[index * bytes..][..bytes])
    }
}
