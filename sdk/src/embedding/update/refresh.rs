//! Reads cached rows again, to see the updates of other processes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::refresh_progress::RefreshProgress;
use super::version::Version;
use crate::embedding::lookup::tier_result::{KeyState, TierResult};
use crate::embedding::table::{STEP_KEYS, Table};

impl Table {
    /// The longest time for which an update by another process may be unseen; `None` if there is no limit.
    pub(in crate::embedding) fn stale(&self) -> Option<Duration> {
        // Rows in a tier above the shared one are only refreshed while they are cached too.
        let hidden = self.tiers.iter().position(|tier| tier.shared).is_some_and(|level| level > 0);
        let progress = self.refresh.lock();
        match &self.cache {
            _ if hidden => None,
            None => Some(Duration::ZERO),
            Some(_) => progress.interval.map(|_| progress.complete.elapsed()),
        }
    }

    /// Publishes the staleness and the number of rows on GPUs in the metrics.
    pub(in crate::embedding) fn publish_metrics(&self) {
        let stale = self.stale().map_or(-1, |stale| stale.as_secs() as i64);
        let rows = self.devices.live().iter().map(|device| device.len()).sum();
        self.metrics.tell(stale, rows);
    }

    /// Reads all rows of the cache and of the caches on GPUs again.
    pub(in crate::embedding) fn refresh_all(&self) {
        {
            let mut progress = self.refresh.lock();
            (progress.cache, progress.at) = (0, 0);
        }
        while !self.refresh_step(STEP_KEYS).1 {}
    }

    /// Reads a share of the cached rows again, from where the last call ended. Ends early if `stop` returns true.
    pub(in crate::embedding) fn refresh_share(&self, share: f64, stop: impl Fn() -> bool) {
        let Some(cache) = &self.cache else { return };
        let rows = cache.len() + self.devices.live().iter().map(|device| device.len()).sum::<usize>();
        let mut left = (rows as f64 * share).ceil() as usize;
        while !stop() {
            let (read, complete) = self.refresh_step(STEP_KEYS.min(left));
            left = left.saturating_sub(read);
            // The next step would begin a new pass.
            if complete || left == 0 {
                break;
            }
        }
    }

    /// Reads about `most` cached rows again. Returns how many, and whether this step completed the pass.
    fn refresh_step(&self, most: usize) -> (usize, bool) {
        if self.cache.is_none() {
            return (0, true);
        }
        // Held for one step, so that other callers do not wait for a whole pass.
        let mut progress = self.refresh.lock();
        if progress.is_at_start() {
            (progress.began, progress.answered) = (Instant::now(), true);
        }
        let keys = self.next_keys(&mut progress, most);
        progress.answered &= self.refresh_keys(&keys);
        let complete = progress.is_at_start();
        if complete && progress.answered {
            progress.complete = progress.began;
        }
        (keys.len(), complete)
    }

    /// About `most` keys of the caches, one cache after the other.
    fn next_keys(&self, progress: &mut RefreshProgress, most: usize) -> Vec<i64> {
        let mut keys = Vec::new();
        let (device, devices) = self.devices.at(progress.cache.wrapping_sub(1));
        match (progress.cache, &self.cache, device) {
            (0, Some(cache), _) => cache.keys(&mut progress.at, most, &mut keys),
            (1.., _, Some(device)) => {
                if let Err(error) = device.keys(&mut progress.at, most, &mut keys) {
                    (progress.at, progress.answered) = (0, false);
                    self.report_error("device", &error.to_string());
                }
            }
            _ => progress.at = 0,
        }
        if progress.at == 0 {
            progress.cache = if progress.cache < devices { progress.cache + 1 } else { 0 };
        }
        keys
    }

    /// Writes all updates that the durable tier holds into the shared tiers again, if a lookup has found that one of
    /// them lost an update.
    pub(in crate::embedding) fn restore_lost_updates(&self, stop: impl Fn() -> bool) {
        if !self.lost_updates.load(Ordering::Relaxed) {
            return;
        }
        // The search begins at the shared tier: the tiers above do not tell what it holds.
        let Some(shared) = self.tiers.iter().position(|tier| tier.shared) else { return };
        let updated: Vec<i64> = self.tiers.iter().flat_map(|tier| tier.tier.updated_keys()).collect();
        log::warn!("table {}: a shared tier lost updates: {} updated keys are checked", self.name, updated.len());
        for keys in updated.chunks(STEP_KEYS) {
            if stop() {
                return;
            }
            // A concurrent update is not overwritten: `put` checks epochs and versions.
            let found = self.search_tiers(keys, shared..self.tiers.len(), None, &mut |_| ());
            self.restore_lost(keys, &found);
        }
        // The next lookup finds updates that were lost in the meantime.
        self.lost_updates.store(false, Ordering::Relaxed);
    }

    /// Reads unverified keys again.
    pub(in crate::embedding) fn verify_keys(&self) {
        loop {
            let keys = self.unverified.take(STEP_KEYS);
            if keys.is_empty() || !self.refresh_keys(&keys) || keys.len() < STEP_KEYS {
                return;
            }
        }
    }

    /// Reads keys again. Returns whether every tier answered. The keys that a tier did not answer for stay unverified.
    fn refresh_keys(&self, keys: &[i64]) -> bool {
        let Some(cache) = self.cache.as_ref().filter(|_| !keys.is_empty()) else { return true };
        // No update runs during this: the rows that are read here would overwrite it.
        let _updates = self.update_lock.lock();
        let mut found = self.search_tiers(keys, 0..self.tiers.len(), None, &mut |_| ());
        if let Some(level) = self.tiers.iter().position(|tier| tier.shared).filter(|&level| level > 0) {
            // Other processes update the shared tier, and the tiers above do not see it.
            self.take_newer(keys, level, &mut found);
        }
        self.restore_lost(keys, &found);
        let mut answered = true;
        for (index, &key) in keys.iter().enumerate() {
            if found.unverified[index] {
                answered = false;
                self.unverified.add(key);
            }
        }
        let known = found.indices(|index| found.states[index] != KeyState::Unknown && !found.unverified[index]);
        let mut rows = found.gather(keys, &known);
        for (version, _) in rows.versions.iter_mut().zip(&rows.deleted).filter(|&(_, &deleted)| deleted) {
            // A key that no tier holds leaves the cache, whatever its version there is.
            *version = Version::MAX;
        }
        if !known.is_empty() {
            cache.update(&rows.rows());
            for device in self.devices.live() {
                if let Err(error) = device.update(&rows.rows()) {
                    answered = false;
                    self.report_error("device", &error.to_string());
                }
            }
        }
        answered && !found.states.contains(&KeyState::Unknown)
    }

    /// Reads keys again from the tier `level` and those below. Rows that differ and are not older replace those in the
    /// tiers above.
    fn take_newer(&self, keys: &[i64], level: usize, found: &mut TierResult) {
        let below = self.search_tiers(keys, level..self.tiers.len(), None, &mut |_| ());
        let newer = found.indices(|index| {
            below.is_known(index)
                && !below.unverified[index]
                && (!found.is_known(index) || below.versions[index] >= found.versions[index])
                && below.differs(index, found)
        });
        for index in 0..keys.len() {
            found.unverified[index] |= below.unverified[index];
        }
        for &index in &newer {
            found.replace(index as usize, &below);
        }
        if newer.is_empty() {
            return;
        }
        let newer = found.gather(keys, &newer);
        for above in &self.tiers[..level] {
            if let Err(error) = above.tier.update(&newer.rows()) {
                log::debug!("table {}: the {} tier was not refreshed: {error}", self.name, above.tier.name());
            }
        }
    }
}
