//! Updates and deletions of rows in every tier.

pub(in crate::embedding) mod acknowledged_versions;
pub(in crate::embedding) mod refresh;
pub(in crate::embedding) mod refresh_progress;
pub(in crate::embedding) mod unverified_keys;
pub(in crate::embedding) mod update_epochs;
pub(in crate::embedding) mod version;

use crate::embedding::lookup::unique_keys::UniqueKeys;
use crate::embedding::options::DISK;
use crate::embedding::table::{STEP_KEYS, Table};
use crate::embedding::tiers::tier::Rows;
use crate::embedding::update::version::Version;
use crate::error::{Error, Result, Status};

/// When lookups see an update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// When the call returns.
    #[default]
    AtOnce,
    /// After the next refresh of the cache. The tiers below have it when the call returns.
    ByRefresh,
}

impl Table {
    /// Replaces rows or adds them.
    pub(in crate::embedding) fn upsert(
        &self,
        version: Version,
        keys: &[i64],
        numbers: &[f32],
        reach: Reach,
    ) -> Result<()> {
        let dim = self.layout.dim();
        if numbers.len() != keys.len() * dim {
            let (table, given, count) = (&self.name, numbers.len(), keys.len());
            let message = format!("{given} numbers are not {count} rows of {dim}, the size of table {table}'s rows");
            return Err(Error::invalid("numbers", message));
        }
        self.check_numbers(numbers)?;
        let row_bytes = self.layout.row_bytes();
        let mut encoded = vec![0; keys.len() * row_bytes];
        self.layout.encode(numbers, &mut encoded);
        let unique = UniqueKeys::of(keys.iter().copied());
        let mut rows = vec![0; unique.keys.len() * row_bytes];
        // The last row of a duplicate key counts.
        for (&index, row) in unique.indices.iter().zip(encoded.chunks_exact(row_bytes)) {
            rows[index as usize * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        self.apply(&unique.keys, version, &rows, false, reach)
    }

    /// Refuses numbers that the row type can not represent.
    fn check_numbers(&self, numbers: &[f32]) -> Result<()> {
        match self.layout.refuses(numbers) {
            Some(why) => Err(Error::invalid("numbers", format!("{why}, as table {} has them", self.name))),
            None => Ok(()),
        }
    }

    /// Deletes rows: every tier that takes updates stores a tombstone.
    pub(in crate::embedding) fn delete(&self, version: Version, keys: &[i64], reach: Reach) -> Result<()> {
        let unique = UniqueKeys::of(keys.iter().copied());
        let rows = vec![0; unique.keys.len() * self.layout.row_bytes()];
        self.apply(&unique.keys, version, &rows, true, reach)
    }

    fn apply(&self, keys: &[i64], version: Version, rows: &[u8], deleted: bool, reach: Reach) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        if !self.tiers.iter().any(|tier| tier.writable) {
            let message = format!("table {} is read-only: open it without {DISK}.read_only", self.name);
            return Err(Error::new(Status::Unsupported, message));
        }
        let _updates = self.update_lock.lock();
        let _updating = self.epochs.begin_update(keys);
        // First, because the keys may exist after this even if the update fails.
        self.negative_cache.remove(keys);
        let Accepted { keys, rows, silent } = self.accept(version, keys, rows);
        if keys.is_empty() {
            return Ok(());
        }
        let (versions, deleted) = (vec![version; keys.len()], vec![deleted; keys.len()]);
        let change = Rows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted };
        // From the lowest tier up: if a tier fails, the tiers above still hold the old rows, and the caller can retry.
        for (at, tier) in self.tiers.iter().enumerate().rev().filter(|(_, tier)| tier.writable) {
            let failed = |status: Status, what: &str| {
                let name = tier.tier.name();
                Error::new(status, format!("the {name} tier of table {}: {what}", self.name))
            };
            tier.tier.update(&change).map_err(|error| failed(error.status(), error.message()))?;
            if let Some((_, reason)) = silent.as_ref().filter(|(silent, _)| *silent == at) {
                // The tier has kept its newer rows, but for which keys is unknown here.
                let what = "whether it holds newer rows could not be told, so no tier above it was changed";
                return Err(failed(Status::Io, &format!("{what}: {reason}. Repeat the call")));
            }
        }
        if let Some(acknowledged) = &self.acknowledged {
            let dropped = acknowledged.add(&keys, version);
            if dropped > 0 {
                log::warn!("table {}: too many keys were updated to keep the versions of {dropped} of them", self.name);
            }
        }
        if reach == Reach::ByRefresh {
            return Ok(());
        }
        if let Some(cache) = &self.cache {
            cache.update(&change);
        }
        // All of them, also after an error.
        let updated: Vec<_> = self.devices.live().into_iter().map(|device| device.update(&change)).collect();
        updated.into_iter().collect()
    }

    /// Selects the keys of which no tier is known to hold a higher version. Each tier checks the versions of its own
    /// rows, but a tier that does not hold a key takes any version, and would hide a newer one in a tier below.
    fn accept(&self, version: Version, keys: &[i64], rows: &[u8]) -> Accepted {
        let acknowledged = |&key: &i64| self.acknowledged.as_ref().map_or(Version::LOADED, |known| known.version(key));
        let mut newest: Vec<Version> = keys.iter().map(acknowledged).collect();
        let mut silent = vec![None; keys.len()];
        let mut reasons = vec![String::new(); self.tiers.len()];
        for (at, tier) in self.tiers.iter().enumerate() {
            // In steps: a tier may have a time limit for each call.
            for start in (0..keys.len()).step_by(STEP_KEYS) {
                let some = &keys[start..keys.len().min(start + STEP_KEYS)];
                let mut told = vec![false; some.len()];
                let outcome = tier.tier.fetch(some, None, &mut |index, held, _| {
                    newest[start + index] = held.max(newest[start + index]);
                    told[index] = true;
                });
                if let Err(error) = &outcome {
                    self.report_error(tier.tier.name(), &error.to_string());
                    reasons[at] = error.message().into();
                }
                for index in (0..some.len()).filter(|&index| !told[index]) {
                    // A row that a tier of this process can not read is damaged. It holds no newer version, and waiting
                    // for it would refuse the update for ever.
                    let unanswered = outcome.is_err() && tier.shared;
                    let missed = tier.tier.unsynced_version(some[index]).is_some_and(|later| later > version);
                    if missed && !unanswered {
                        reasons[at] = "a later change of a key has not reached it: repeat that one first".into();
                    }
                    if unanswered || missed {
                        silent[start + index] = Some(at);
                    }
                }
            }
        }
        let row_bytes = self.layout.row_bytes();
        let places: Vec<usize> = (0..keys.len()).filter(|&place| newest[place] <= version).collect();
        let rows = places.iter().flat_map(|&place| &rows[place * row_bytes..][..row_bytes]).copied().collect();
        let silent = places.iter().filter_map(|&place| silent[place]).max();
        let silent = silent.map(|at| (at, std::mem::take(&mut reasons[at])));
        Accepted { keys: places.into_iter().map(|place| keys[place]).collect(), rows, silent }
    }
}

/// The part of an update that is not older than what the tiers hold.
struct Accepted {
    keys: Vec<i64>,
    rows: Vec<u8>,
    /// The lowest tier that did not tell its version of one of these keys, and the reason.
    silent: Option<(usize, String)>,
}
