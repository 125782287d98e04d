//! Changing and deleting rows, on every floor.

use super::distinct::Distinct;
use super::floor::Rows;
use super::refresh::STEP;
use super::table::Table;
use crate::error::{Error, Result, Status};

/// When a change is seen by lookups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// When the call returns.
    #[default]
    AtOnce,
    /// The floors below have it when the call returns; the cache when it is refreshed next.
    ByRefresh,
}

impl Table {
    /// Replaces rows, or adds them.
    pub(super) fn upsert(&self, version: u64, keys: &[i64], numbers: &[f32], reach: Reach) -> Result<()> {
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
        let distinct = Distinct::of(keys.iter().copied());
        let mut rows = vec![0; distinct.keys.len() * row_bytes];
        // Of a key that comes more than once the last row counts.
        for (&place, row) in distinct.places.iter().zip(encoded.chunks_exact(row_bytes)) {
            rows[place as usize * row_bytes..][..row_bytes].copy_from_slice(row);
        }
        self.change(&distinct.keys, version, &rows, false, reach)
    }

    /// Refuses numbers that rows of this type can not hold.
    fn check_numbers(&self, numbers: &[f32]) -> Result<()> {
        match self.layout.refuses(numbers) {
            Some(why) => Err(Error::invalid("numbers", format!("{why}, as table {} has them", self.name))),
            None => Ok(()),
        }
    }

    /// Deletes rows: from now on their keys are absent.
    pub(super) fn delete(&self, version: u64, keys: &[i64], reach: Reach) -> Result<()> {
        let distinct = Distinct::of(keys.iter().copied());
        let rows = vec![0; distinct.keys.len() * self.layout.row_bytes()];
        self.change(&distinct.keys, version, &rows, true, reach)
    }

    fn change(&self, keys: &[i64], version: u64, rows: &[u8], deleted: bool, reach: Reach) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        if !self.floors.iter().any(|level| level.writable) {
            let message = format!("table {} is read-only: open it with read_only = false on some floor", self.name);
            return Err(Error::new(Status::Unsupported, message));
        }
        let _one = self.updates.lock();
        let _updating = self.stamps.update(keys);
        // Whatever comes of it, no one is to think any more that they are nowhere.
        self.absent.remove(keys);
        let (keys, rows, silent) = self.not_older(version, keys, rows);
        if keys.is_empty() {
            return Ok(());
        }
        let (versions, deleted) = (vec![version; keys.len()], vec![deleted; keys.len()]);
        let change = Rows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted };
        // From below: if a floor fails, nothing above it says otherwise than before, and the caller can try again.
        for (at, level) in self.floors.iter().enumerate().rev().filter(|(_, level)| level.writable) {
            let failed = |status: Status, what: &str| {
                let name = level.floor.name();
                Error::new(status, format!("the {name} floor of table {}: {what}", self.name))
            };
            level.floor.update(&change).map_err(|error| failed(error.status(), error.message()))?;
            if let Some((_, reason)) = silent.as_ref().filter(|(silent, _)| *silent == at) {
                // It has kept what is newer by itself, but no one here knows of which keys.
                let what = "whether it holds newer rows could not be told, so no floor above it was changed";
                return Err(failed(Status::Io, &format!("{what}: {reason}. Repeat the call")));
            }
        }
        if let Some(acknowledged) = &self.acknowledged {
            let forgotten = acknowledged.add(&keys, version);
            if forgotten > 0 {
                log::warn!(
                    "table {}: too many keys were changed to know the versions of {forgotten} of them",
                    self.name
                );
            }
        }
        if reach == Reach::ByRefresh {
            return Ok(());
        }
        if let Some(cache) = &self.cache {
            cache.update(&change);
        }
        // Of all of them, also after an error.
        let updated: Vec<_> = self.devices.live().into_iter().map(|device| device.update(&change)).collect();
        updated.into_iter().collect()
    }

    /// Those keys, with their rows, of which no floor is known to have a higher version. Each floor would see to that by
    /// itself, but one that does not hold the key takes anything, and would hide what is below it. So the third is the lowest
    /// floor that did not say what it has of one of these keys, with the reason.
    fn not_older(&self, version: u64, keys: &[i64], rows: &[u8]) -> (Vec<i64>, Vec<u8>, Option<(usize, String)>) {
        let acknowledged = |&key: &i64| self.acknowledged.as_ref().map_or(0, |known| known.version(key));
        let mut newest: Vec<u64> = keys.iter().map(acknowledged).collect();
        let mut silent = vec![None; keys.len()];
        let mut reasons = vec![String::new(); self.floors.len()];
        for (at, level) in self.floors.iter().enumerate() {
            // Not all at once: a floor may have a time limit for each call.
            for start in (0..keys.len()).step_by(STEP) {
                let some = &keys[start..keys.len().min(start + STEP)];
                let mut told = vec![false; some.len()];
                let outcome = level.floor.fetch(some, None, &mut |index, held, _| {
                    newest[start + index] = held.max(newest[start + index]);
                    told[index] = true;
                });
                if let Err(error) = &outcome {
                    self.complain(level.floor.name(), &error.to_string());
                    reasons[at] = error.message().into();
                }
                for index in (0..some.len()).filter(|&index| !told[index]) {
                    // What a floor of this process alone can not read is damaged: it has nothing newer to say of it, and to wait
                    // for it would be to refuse the change for ever.
                    let unanswered = outcome.is_err() && level.shared;
                    let missed = level.floor.missed(some[index]).is_some_and(|later| later > version);
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
        (places.into_iter().map(|place| keys[place]).collect(), rows, silent)
    }
}
