//! What every floor below the cache can do.

use std::time::Instant;

use crate::error::{Error, Result};

/// One floor of one table: host memory, a cluster, disk. Any number of threads may call at the same time, but updates of
/// one table come one after the other.
///
/// A floor holds for a key nothing, or a row, or the fact that the key was deleted; the last two with a version. Version 0
/// is what the table was loaded with.
pub(super) trait Floor: Send + Sync {
    /// What it is called in logs and metrics: `memory`, `redis`, `disk`.
    fn name(&self) -> &'static str;

    /// Looks keys up. `sink` gets the place in `keys`, the version, and the row, or `None` for a key that was deleted;
    /// once for each key that this floor knows something of, in any order.
    ///
    /// An error says that of the keys that `sink` did not get nothing is known: past the deadline, or out of order.
    fn fetch(&self, keys: &[i64], deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()>;

    /// Takes what was found below. Whatever is there already stays. Nothing is put for a key of which `current` says no:
    /// it was updated since. `current` is asked while nobody else can change the key in this floor, as far as the floor
    /// can know.
    fn put(&self, found: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()>;

    /// Changes rows and deletes them. What is there with a higher version stays; the same version is replaced.
    fn update(&self, change: &Rows<'_>) -> Result<()>;

    /// The version of a key that an update could not bring to this floor, while nothing later is there. Until then `fetch`
    /// does not give the key, which is not to say that it is nowhere, and what is found further down may be older.
    fn missed(&self, _key: i64) -> Option<u64> {
        None
    }

    /// Tells of those keys of which this floor has a later version than the one given for each; as a rule without reading
    /// rows of others. Only a floor that is this process's own, and that keeps changes, has any. Gives the places of keys of
    /// which that can not be told, with the reason.
    fn later(&self, _keys: &[i64], _versions: &[u64], _sink: &mut Sink<'_>) -> Vec<(usize, Error)> {
        Vec::new()
    }

    /// The keys that were changed, where this floor keeps changes for good.
    fn changed(&self) -> Vec<i64> {
        Vec::new()
    }

    /// Hears that it should have this version of a key and does not: it has lost it. From then on it counts as missed.
    fn lost(&self, _key: i64, _version: u64) {}

    /// Bytes of memory that it takes in this process, about.
    fn memory(&self) -> u64;
}

/// Takes what a floor has found: place, version, row.
pub(super) type Sink<'a> = dyn FnMut(usize, u64, Option<&[u8]>) + 'a;

/// Keys with a version and a row each, or deleted.
pub(super) struct Rows<'a> {
    /// Different from one another.
    pub(super) keys: &'a [i64],
    /// One for each key.
    pub(super) versions: &'a [u64],
    /// One for each key, one after the other; what is here for deleted keys does not matter.
    pub(super) rows: &'a [u8],
    /// One for each key.
    pub(super) deleted: &'a [bool],
}

impl<'a> Rows<'a> {
    /// How many keys there are.
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    /// The row of one key, or `None` if it is deleted.
    pub(super) fn row(&self, index: usize) -> Option<&'a [u8]> {
        let bytes = self.rows.len() / self.len();
        (!self.deleted[index]).then(|| &self.rows[index * bytes..][..bytes])
    }
}
