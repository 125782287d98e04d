//! Reading what is in the cache again, for rows that were changed by someone else.

use super::table::Table;
use super::walk::{Outcome, Walked};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How many keys are read at a time: updates wait that long at most.
pub(super) const STEP: usize = 4096;

/// How far the refresh of a table has come.
pub(super) struct Refreshed {
    /// In which cache the next step is: 0 for the one in host memory, from 1 on those on devices.
    cache: usize,
    /// Where in it the next step begins.
    at: usize,
    /// When the pass that is under way began.
    began: Instant,
    /// Whether every floor has answered in it.
    answered: bool,
    /// When the last whole one began in which they did: whatever is in the cache is at least as new as that.
    whole: Instant,
    /// How often that is done; `None`: never.
    pub(super) interval: Option<Duration>,
}

impl Refreshed {
    /// As if everything had been read just now.
    pub(super) fn now() -> Self {
        Self { cache: 0, at: 0, began: Instant::now(), answered: true, whole: Instant::now(), interval: None }
    }
}

impl Table {
    /// For how long a change by someone else may have been missed; `None` if that can be for ever.
    pub(super) fn stale(&self) -> Option<Duration> {
        // What is in a floor above the one that others change is only read again while it is in the cache.
        let hidden = self.floors.iter().position(|level| level.shared).is_some_and(|level| level > 0);
        let refreshed = self.refreshed.lock();
        match &self.cache {
            _ if hidden => None,
            None => Some(Duration::ZERO),
            Some(_) => refreshed.interval.map(|_| refreshed.whole.elapsed()),
        }
    }

    /// Says in the metrics how stale it may be, and how much of it is on devices.
    pub(super) fn tell_staleness(&self) {
        let stale = self.stale().map_or(-1, |stale| stale.as_secs() as i64);
        let rows = self.devices.live().iter().map(|device| device.len()).sum();
        self.counters.tell(stale, rows);
    }

    /// Reads the whole cache again, and those on devices.
    pub(super) fn refresh_all(&self) {
        {
            let mut refreshed = self.refreshed.lock();
            (refreshed.cache, refreshed.at) = (0, 0);
        }
        while !self.refresh_step(STEP).1 {}
    }

    /// Reads a share of the cache again, from where the last call stopped, until `stop` says so.
    pub(super) fn refresh(&self, share: f64, stop: impl Fn() -> bool) {
        let Some(cache) = &self.cache else { return };
        let rows = cache.len() + self.devices.live().iter().map(|device| device.len()).sum::<usize>();
        let mut left = (rows as f64 * share).ceil() as usize;
        while !stop() {
            let (read, whole) = self.refresh_step(STEP.min(left));
            left = left.saturating_sub(read);
            // The rest of a share that has come to the end would begin anew.
            if whole || left == 0 {
                break;
            }
        }
    }

    /// Reads up to about `most` rows of the cache again. Says how many, and whether that was the last of a pass.
    fn refresh_step(&self, most: usize) -> (usize, bool) {
        if self.cache.is_none() {
            return (0, true);
        }
        // One step at a time, so that no one else waits for a whole refresh.
        let mut refreshed = self.refreshed.lock();
        if (refreshed.cache, refreshed.at) == (0, 0) {
            (refreshed.began, refreshed.answered) = (Instant::now(), true);
        }
        let keys = self.next_keys(&mut refreshed, most);
        refreshed.answered &= self.refresh_keys(&keys);
        let whole = (refreshed.cache, refreshed.at) == (0, 0);
        if whole && refreshed.answered {
            refreshed.whole = refreshed.began;
        }
        (keys.len(), whole)
    }

    /// Up to about `most` keys of the caches, one cache after the other.
    fn next_keys(&self, refreshed: &mut Refreshed, most: usize) -> Vec<i64> {
        let mut keys = Vec::new();
        let (device, places) = self.devices.at(refreshed.cache.wrapping_sub(1));
        match (refreshed.cache, &self.cache, device) {
            (0, Some(cache), _) => cache.keys(&mut refreshed.at, most, &mut keys),
            (1.., _, Some(device)) => {
                if let Err(error) = device.keys(&mut refreshed.at, most, &mut keys) {
                    (refreshed.at, refreshed.answered) = (0, false);
                    self.complain("device", &error.to_string());
                }
            }
            _ => refreshed.at = 0,
        }
        if refreshed.at == 0 {
            refreshed.cache = if refreshed.cache < places { refreshed.cache + 1 } else { 0 };
        }
        keys
    }

    /// Brings every change that a disk of this process keeps back into the floors that others share, if one of them was seen
    /// to have lost some.
    pub(super) fn bring_back(&self, stop: impl Fn() -> bool) {
        if !self.lost.load(Ordering::Relaxed) {
            return;
        }
        // From that floor on: what those above have says nothing of it.
        let Some(shared) = self.floors.iter().position(|level| level.shared) else { return };
        let changed: Vec<i64> = self.floors.iter().flat_map(|level| level.floor.changed()).collect();
        log::warn!("table {}: changes were lost by a shared floor: {} are looked after", self.name, changed.len());
        for keys in changed.chunks(STEP) {
            if stop() {
                return;
            }
            // A change that comes meanwhile is not undone: put goes by the stamps of keys, and by versions.
            let walked = self.find(keys, shared..self.floors.len(), None, &mut |_| ());
            self.put_where_lost(keys, &walked);
        }
        // What was lost meanwhile is seen again by the next lookup.
        self.lost.store(false, Ordering::Relaxed);
    }

    /// Reads doubtful keys again.
    pub(super) fn settle_doubts(&self) {
        loop {
            let keys = self.doubtful.take(STEP);
            if keys.is_empty() || !self.refresh_keys(&keys) || keys.len() < STEP {
                return;
            }
        }
    }

    /// Reads keys again; says whether every floor has answered. Those of which one has not are doubtful.
    fn refresh_keys(&self, keys: &[i64]) -> bool {
        let Some(cache) = self.cache.as_ref().filter(|_| !keys.is_empty()) else { return true };
        // No update meanwhile: what is read here would undo it.
        let _one = self.updates.lock();
        let mut walked = self.find(keys, 0..self.floors.len(), None, &mut |_| ());
        if let Some(level) = self.floors.iter().position(|level| level.shared).filter(|&level| level > 0) {
            // Others change that floor, and those above it know nothing of it.
            self.take_newer(keys, level, &mut walked);
        }
        self.put_where_lost(keys, &walked);
        let mut answered = true;
        for (place, &key) in keys.iter().enumerate() {
            if walked.doubtful[place] {
                answered = false;
                self.doubtful.add(key);
            }
        }
        let known = walked.places(|place| walked.outcomes[place] != Outcome::Unknown && !walked.doubtful[place]);
        let mut found = walked.gather(keys, &known);
        for (version, _) in found.versions.iter_mut().zip(&found.deleted).filter(|&(_, &deleted)| deleted) {
            // What no floor holds any more leaves, whatever its version was.
            *version = u64::MAX;
        }
        if !known.is_empty() {
            cache.update(&found.rows());
            for device in self.devices.live() {
                if let Err(error) = device.update(&found.rows()) {
                    answered = false;
                    self.complain("device", &error.to_string());
                }
            }
        }
        answered && !walked.outcomes.contains(&Outcome::Unknown)
    }

    /// Reads keys again from one floor on; where that has another row, no older than the one found above, it replaces it
    /// there.
    fn take_newer(&self, keys: &[i64], level: usize, walked: &mut Walked) {
        let below = self.find(keys, level..self.floors.len(), None, &mut |_| ());
        let newer = walked.places(|place| {
            below.is_known(place)
                && !below.doubtful[place]
                && (!walked.is_known(place) || below.versions[place] >= walked.versions[place])
                && below.differs(place, walked)
        });
        for place in 0..keys.len() {
            walked.doubtful[place] |= below.doubtful[place];
        }
        for &place in &newer {
            walked.replace(place as usize, &below);
        }
        if newer.is_empty() {
            return;
        }
        let newer = walked.gather(keys, &newer);
        for above in &self.floors[..level] {
            if let Err(error) = above.floor.update(&newer.rows()) {
                log::debug!("table {}: the {} floor was not refreshed: {error}", self.name, above.floor.name());
            }
        }
    }
}
