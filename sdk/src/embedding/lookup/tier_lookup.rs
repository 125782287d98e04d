//! Searches the tiers for keys, from the fastest to the largest, and stores what it finds in the tiers above.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::tier_result::{KeyState, TierResult};
use crate::embedding::table::{Table, TableTier};
use crate::embedding::update::version::Version;
use crate::metrics;

impl Table {
    /// Searches all tiers for unique keys. Stores the rows that it finds in the tiers above and in the cache. Calls
    /// `arrived` after each tier with the result so far, and `store_shared` to store rows in the tiers that other
    /// processes share.
    pub(in crate::embedding) fn fetch_rows(
        &self,
        keys: &[i64],
        deadline: Option<Instant>,
        arrived: &mut dyn FnMut(&TierResult),
        store_shared: impl FnOnce(&TierResult),
    ) -> TierResult {
        let found = self.search_tiers(keys, 0..self.tiers.len(), deadline, arrived);
        self.store_above(keys, &found, |tier| !tier.shared);
        store_shared(&found);
        self.cache_rows(keys, &found);
        for (index, &key) in keys.iter().enumerate() {
            if matches!(found.states[index], KeyState::Absent | KeyState::Deleted) && !found.unverified[index] {
                self.negative_cache.add(key, || self.epochs.is_current(key, found.epoch(index)));
            }
        }
        found
    }

    /// As [`Self::fetch_rows`], from the tier in host memory alone, if there is one. It does not block.
    pub(in crate::embedding) fn fetch_from_memory(&self, keys: &[i64]) -> Option<TierResult> {
        self.tiers.first().filter(|tier| tier.in_memory)?;
        let mut found = self.search_tiers(keys, 0..1, None, &mut |_| ());
        for state in found.states.iter_mut().filter(|state| **state == KeyState::Absent) {
            *state = if self.tiers.len() == 1 { KeyState::Absent } else { KeyState::Unknown };
        }
        self.cache_rows(keys, &found);
        Some(found)
    }

    /// Copies rows from the tiers that hold them into the tiers that `into` selects, and into the cache.
    pub(in crate::embedding) fn promote(&self, keys: &[i64], into: &[bool], cached: bool) {
        let found = self.search_tiers(keys, 0..self.tiers.len(), None, &mut |_| ());
        for (tier, _) in into.iter().enumerate().filter(|&(_, &into)| into) {
            self.store_into(tier, keys, &found);
        }
        if cached {
            self.cache_rows(keys, &found);
        }
    }

    /// Searches some of the tiers, one after the other. Stores nothing.
    pub(in crate::embedding) fn search_tiers(
        &self,
        keys: &[i64],
        tiers: Range<usize>,
        deadline: Option<Instant>,
        arrived: &mut dyn FnMut(&TierResult),
    ) -> TierResult {
        let epochs = keys.iter().map(|&key| self.epochs.read(key)).collect();
        let mut found = TierResult::new(self.layout.row_bytes(), epochs);
        // Read before the first tier is asked: an update that is acknowledged later may not be in the result.
        let acknowledged = |&key: &i64| self.acknowledged.as_ref().map_or(Version::LOADED, |known| known.version(key));
        let acknowledged: Vec<Version> = keys.iter().map(acknowledged).collect();
        let mut left: Vec<u32> = (0..keys.len() as u32).collect();
        let (mut silent, mut missed) = (false, Vec::new());
        for level in tiers {
            if left.is_empty() {
                break;
            }
            let TableTier { tier, shared, .. } = &self.tiers[level];
            let wanted: Vec<i64> = left.iter().map(|&index| keys[index as usize]).collect();
            if *shared {
                // Read before the tier is asked: it may learn of an update after it answered.
                let versions =
                    left.iter().zip(&wanted).map(|(&index, &key)| (index as usize, tier.unsynced_version(key)));
                missed.extend(versions.filter_map(|(index, version)| Some((index, version?))));
            }
            let outcome = tier.fetch(&wanted, deadline, &mut |place, version, row| {
                let index = left[place] as usize;
                if version < acknowledged[index] {
                    // The tier has lost the acknowledged version.
                    missed.push((index, acknowledged[index]));
                } else {
                    found.set(index, level, version, row);
                }
            });
            if *shared {
                let known: Vec<u32> = left.iter().copied().filter(|&index| found.is_known(index as usize)).collect();
                self.take_newer_below(keys, level, &known, &mut found);
            }
            left.retain(|&index| !found.is_known(index as usize));
            if let Err(error) = outcome {
                silent = true;
                self.report_error(tier.name(), &error.to_string());
                for &index in left.iter().filter(|_| *shared) {
                    found.unverified[index as usize] = true;
                }
            }
            arrived(&found);
        }
        for &index in &left {
            // A key that has an acknowledged update and is in no tier was lost.
            let unknown = silent || acknowledged[index as usize] > Version::LOADED;
            found.states[index as usize] = if unknown { KeyState::Unknown } else { KeyState::Absent };
        }
        for (index, version) in missed {
            if !found.is_known(index) {
                found.states[index] = KeyState::Unknown;
            } else if found.versions[index] < version {
                found.unverified[index] = true;
            }
        }
        found
    }

    /// Takes newer versions from the tiers below `level`, which is shared. A shared tier can return to an older state,
    /// or receive an older row from another process. If a lower tier of this process holds a later version, that
    /// version counts, and the shared tier is marked out of sync.
    fn take_newer_below(&self, keys: &[i64], level: usize, indices: &[u32], found: &mut TierResult) {
        let asked: Vec<i64> = indices.iter().map(|&index| keys[index as usize]).collect();
        for (at, below) in self.tiers.iter().enumerate().skip(level + 1).filter(|(_, below)| !below.shared) {
            let versions: Vec<Version> = indices.iter().map(|&index| found.versions[index as usize]).collect();
            let unread = below.tier.newer_than(&asked, &versions, &mut |place, version, row| {
                let index = indices[place] as usize;
                found.set(index, at, version, row);
                // An update in progress has reached the lower tier and not yet the shared one: nothing is lost.
                if self.epochs.is_current(asked[place], found.epoch(index)) {
                    self.tiers[level].tier.mark_unsynced(asked[place], version);
                    self.lost_updates.store(true, Ordering::Relaxed);
                }
            });
            for (place, error) in unread {
                found.states[indices[place] as usize] = KeyState::Unknown;
                self.report_error(below.tier.name(), &error.to_string());
            }
        }
    }

    /// Stores rows in those tiers above the one that holds them that store fetched rows and that `which` selects.
    pub(in crate::embedding) fn store_above(
        &self,
        keys: &[i64],
        found: &TierResult,
        which: impl Fn(&TableTier) -> bool,
    ) {
        for level in (0..self.tiers.len()).rev() {
            if self.tiers[level].stores_fetched && which(&self.tiers[level]) {
                self.store_into(level, keys, found);
            }
        }
    }

    /// Stores rows in the shared tiers above that have lost them.
    pub(in crate::embedding) fn restore_lost(&self, keys: &[i64], found: &TierResult) {
        for (at, tier) in self.tiers.iter().enumerate().filter(|(_, tier)| tier.shared && tier.stores_fetched) {
            // An update writes every tier. A row with a version that only a lower tier holds was lost or evicted above.
            let lost = |&index: &u32| {
                found.versions[index as usize] > Version::LOADED
                    || tier.tier.unsynced_version(keys[index as usize]).is_some()
            };
            self.store_rows(at, keys, found, &found.found_below(at).into_iter().filter(lost).collect::<Vec<_>>());
        }
    }

    /// Stores the rows that were found below one tier in that tier.
    fn store_into(&self, level: usize, keys: &[i64], found: &TierResult) {
        self.store_rows(level, keys, found, &found.found_below(level));
    }

    fn store_rows(&self, level: usize, keys: &[i64], found: &TierResult, indices: &[u32]) {
        if indices.is_empty() {
            return;
        }
        let tier = &*self.tiers[level].tier;
        let rows = found.gather(keys, indices);
        if let Err(error) = tier.put(&rows.rows(), &self.still_current(keys, found, indices)) {
            self.report_error(tier.name(), &error.to_string());
        }
    }

    /// Stores rows in the cache and in the caches on GPUs. Keys of unverified rows are queued to be read again.
    fn cache_rows(&self, keys: &[i64], found: &TierResult) {
        let devices = self.devices.live();
        if self.cache.is_none() && devices.is_empty() {
            return;
        }
        let indices = found.indices(|index| {
            found.states[index] == KeyState::Found && (!found.unverified[index] || self.unverified.add(keys[index]))
        });
        if indices.is_empty() {
            return;
        }
        let (rows, current) = (found.gather(keys, &indices), self.still_current(keys, found, &indices));
        if let Some(cache) = &self.cache {
            cache.insert(&rows.rows(), &current);
        }
        for device in devices {
            if let Err(error) = device.insert(&rows.rows(), &current) {
                self.report_error("device", &error.to_string());
            }
        }
    }

    /// A function that tells whether the row of one of the keys at `indices` is still current.
    fn still_current<'a>(
        &'a self,
        keys: &'a [i64],
        found: &'a TierResult,
        indices: &'a [u32],
    ) -> impl Fn(usize) -> bool + 'a {
        move |place| {
            let index = indices[place] as usize;
            self.epochs.is_current(keys[index], found.epoch(index))
        }
    }

    /// Counts the failure of a tier and logs it, at most once in a while.
    pub(in crate::embedding) fn report_error(&self, tier: &'static str, error: &str) {
        metrics::embedding_error(tier);
        if self.warnings.is_due() {
            log::warn!("table {}: the {tier} tier: {error}", self.name);
        }
    }
}
