//! Down the floors: what one does not have the next one may, and what is found below is put above.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::floor::Rows;
use super::later::Later;
use super::table::{Level, Table};
use crate::metrics;

/// What is known of a key after a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Its row is there.
    Found,
    /// A floor knows that it was deleted.
    Deleted,
    /// No floor holds it.
    Absent,
    /// A floor that may hold it did not answer, was not asked, or has missed an update of it.
    Unknown,
}

/// What a walk found, one for each key.
#[derive(Clone)]
pub(super) struct Walked {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) versions: Vec<u64>,
    /// Whether a floor that others change too, and that stands above the one that knew of the key, did not answer, or has
    /// missed an update to a later version.
    pub(super) doubtful: Vec<bool>,
    /// On which floor it was found.
    levels: Vec<usize>,
    /// Where nothing was found, anything.
    rows: Vec<u8>,
    row_bytes: usize,
    /// The stamps of the keys before.
    seen: Vec<u64>,
}

impl Walked {
    /// The row of one key, if it was found.
    pub(super) fn row(&self, place: usize) -> Option<&[u8]> {
        (self.outcomes[place] == Outcome::Found).then(|| self.bytes(place))
    }

    /// Whether a floor knows of a key that it is there, or that it was deleted.
    pub(super) fn is_known(&self, place: usize) -> bool {
        matches!(self.outcomes[place], Outcome::Found | Outcome::Deleted)
    }

    /// Notes what a floor knows of a key.
    fn set(&mut self, place: usize, level: usize, version: u64, row: Option<&[u8]>) {
        (self.versions[place], self.levels[place]) = (version, level);
        self.outcomes[place] = match row {
            Some(row) => {
                self.rows[place * self.row_bytes..][..self.row_bytes].copy_from_slice(row);
                Outcome::Found
            }
            None => Outcome::Deleted,
        };
    }

    /// Takes over what another walk found of a key.
    pub(super) fn replace(&mut self, place: usize, other: &Self) {
        (self.outcomes[place], self.versions[place]) = (other.outcomes[place], other.versions[place]);
        self.rows[place * self.row_bytes..][..self.row_bytes].copy_from_slice(other.bytes(place));
    }

    /// Whether two walks found different rows of a key.
    pub(super) fn differs(&self, place: usize, other: &Self) -> bool {
        self.outcomes[place] != other.outcomes[place] || self.row(place) != other.row(place)
    }

    /// What is known of the keys at `places`.
    pub(super) fn gather(&self, keys: &[i64], places: &[u32]) -> Gathered {
        let at = || places.iter().map(|&place| place as usize);
        let mut rows = Vec::with_capacity(places.len() * self.row_bytes);
        for place in at() {
            rows.extend_from_slice(self.bytes(place));
        }
        Gathered {
            keys: at().map(|place| keys[place]).collect(),
            versions: at().map(|place| self.versions[place]).collect(),
            rows,
            deleted: at().map(|place| self.outcomes[place] != Outcome::Found).collect(),
        }
    }

    /// The places of what was found below one floor and may be put into it: nothing that a floor in between may know better.
    pub(super) fn below(&self, level: usize) -> Vec<u32> {
        self.places(|place| self.is_known(place) && self.levels[place] > level && !self.doubtful[place])
    }

    /// What it says of the keys at `places` alone.
    pub(super) fn part(&self, places: &[u32]) -> Self {
        let at = || places.iter().map(|&place| place as usize);
        Self {
            outcomes: at().map(|place| self.outcomes[place]).collect(),
            versions: at().map(|place| self.versions[place]).collect(),
            doubtful: at().map(|place| self.doubtful[place]).collect(),
            levels: at().map(|place| self.levels[place]).collect(),
            rows: at().flat_map(|place| self.bytes(place)).copied().collect(),
            row_bytes: self.row_bytes,
            seen: at().map(|place| self.seen[place]).collect(),
        }
    }

    /// The places of which something holds.
    pub(super) fn places(&self, holds: impl Fn(usize) -> bool) -> Vec<u32> {
        (0..self.outcomes.len() as u32).filter(|&place| holds(place as usize)).collect()
    }

    /// Bytes of its rows, found or not.
    #[cfg(test)]
    pub(super) fn row_bytes(&self) -> usize {
        self.rows.len()
    }

    fn bytes(&self, place: usize) -> &[u8] {
        &self.rows[place * self.row_bytes..][..self.row_bytes]
    }
}

/// Keys and what is known of them.
pub(super) struct Gathered {
    keys: Vec<i64>,
    pub(super) versions: Vec<u64>,
    rows: Vec<u8>,
    pub(super) deleted: Vec<bool>,
}

impl Gathered {
    pub(super) fn rows(&self) -> Rows<'_> {
        Rows { keys: &self.keys, versions: &self.versions, rows: &self.rows, deleted: &self.deleted }
    }
}

impl Table {
    /// Looks for keys, all different, on every floor and puts what it finds into those above and into the cache. `arrived`
    /// hears after each floor what is known by then. What goes over a network is put by `later`, if there is one.
    pub(super) fn walk(
        self: &Arc<Self>,
        keys: &[i64],
        deadline: Option<Instant>,
        later: Option<&Later>,
        arrived: &mut dyn FnMut(&Walked),
    ) -> Walked {
        let walked = self.find(keys, 0..self.floors.len(), deadline, arrived);
        self.put_above(keys, &walked, |level| !level.shared);
        match later {
            Some(later) => later.put(self, keys, &walked),
            None => self.put_above(keys, &walked, |level| level.shared),
        }
        self.cache_found(keys, &walked);
        for (place, &key) in keys.iter().enumerate() {
            if matches!(walked.outcomes[place], Outcome::Absent | Outcome::Deleted) && !walked.doubtful[place] {
                self.absent.add(key, || self.stamps.current(key, walked.seen[place]));
            }
        }
        walked
    }

    /// As [`Self::walk`], on the floor in host memory alone, if there is one: that takes no time to speak of.
    pub(super) fn walk_near(&self, keys: &[i64]) -> Option<Walked> {
        self.floors.first().filter(|level| level.near)?;
        let mut walked = self.find(keys, 0..1, None, &mut |_| ());
        for outcome in walked.outcomes.iter_mut().filter(|outcome| **outcome == Outcome::Absent) {
            *outcome = if self.floors.len() == 1 { Outcome::Absent } else { Outcome::Unknown };
        }
        self.cache_found(keys, &walked);
        Some(walked)
    }

    /// Puts rows from wherever they are into the floors that `into` says, and into the cache.
    pub(super) fn raise(&self, keys: &[i64], into: &[bool], cached: bool) {
        let walked = self.find(keys, 0..self.floors.len(), None, &mut |_| ());
        for (level, _) in into.iter().enumerate().filter(|&(_, &into)| into) {
            self.put_into(level, keys, &walked);
        }
        if cached {
            self.cache_found(keys, &walked);
        }
    }

    /// Looks for keys on some of the floors, one after the other; changes nothing.
    pub(super) fn find(
        &self,
        keys: &[i64],
        levels: Range<usize>,
        deadline: Option<Instant>,
        arrived: &mut dyn FnMut(&Walked),
    ) -> Walked {
        let row_bytes = self.layout.row_bytes();
        let mut walked = Walked {
            outcomes: vec![Outcome::Unknown; keys.len()],
            versions: vec![0; keys.len()],
            doubtful: vec![false; keys.len()],
            levels: vec![0; keys.len()],
            rows: vec![0; keys.len() * row_bytes],
            row_bytes,
            seen: keys.iter().map(|&key| self.stamps.read(key)).collect(),
        };
        // Before anything is asked: a change that is acknowledged meanwhile may come after what is found.
        let acknowledged = |&key: &i64| self.acknowledged.as_ref().map_or(0, |known| known.version(key));
        let acknowledged: Vec<u64> = keys.iter().map(acknowledged).collect();
        let mut left: Vec<u32> = (0..keys.len() as u32).collect();
        let (mut silent, mut missed) = (false, Vec::new());
        for level in levels {
            if left.is_empty() {
                break;
            }
            let Level { floor, shared, .. } = &self.floors[level];
            let wanted: Vec<i64> = left.iter().map(|&place| keys[place as usize]).collect();
            if *shared {
                // Before it is asked: what it gets to know meanwhile it may not have given.
                let versions = left.iter().zip(&wanted).map(|(&place, &key)| (place as usize, floor.missed(key)));
                missed.extend(versions.filter_map(|(place, version)| Some((place, version?))));
            }
            let outcome = floor.fetch(&wanted, deadline, &mut |index, version, row| {
                let place = left[index] as usize;
                if version < acknowledged[place] {
                    // A later one was there, and is lost.
                    missed.push((place, acknowledged[place]));
                } else {
                    walked.set(place, level, version, row);
                }
            });
            if *shared {
                let known: Vec<u32> = left.iter().copied().filter(|&place| walked.is_known(place as usize)).collect();
                self.take_later(keys, level, &known, &mut walked);
            }
            left.retain(|&place| !walked.is_known(place as usize));
            if let Err(error) = outcome {
                silent = true;
                self.complain(floor.name(), &error.to_string());
                for &place in left.iter().filter(|_| *shared) {
                    walked.doubtful[place as usize] = true;
                }
            }
            arrived(&walked);
        }
        for &place in &left {
            // A key that was changed here and is nowhere was lost.
            let unknown = silent || acknowledged[place as usize] > 0;
            walked.outcomes[place as usize] = if unknown { Outcome::Unknown } else { Outcome::Absent };
        }
        for (place, version) in missed {
            if !walked.is_known(place) {
                walked.outcomes[place] = Outcome::Unknown;
            } else if walked.versions[place] < version {
                walked.doubtful[place] = true;
            }
        }
        walked
    }

    /// What others share can go back to an older state, or get an older row from another process. Where a floor of this
    /// process's own below has a later version of what the floor `level` gave, that counts, and the floor hears of it.
    fn take_later(&self, keys: &[i64], level: usize, places: &[u32], walked: &mut Walked) {
        let asked: Vec<i64> = places.iter().map(|&place| keys[place as usize]).collect();
        for (at, below) in self.floors.iter().enumerate().skip(level + 1).filter(|(_, below)| !below.shared) {
            let versions: Vec<u64> = places.iter().map(|&place| walked.versions[place as usize]).collect();
            let unread = below.floor.later(&asked, &versions, &mut |index, version, row| {
                let place = places[index] as usize;
                walked.set(place, at, version, row);
                // A change that is under way has reached the lower floor and not the upper one.
                if self.stamps.current(asked[index], walked.seen[place]) {
                    self.floors[level].floor.lost(asked[index], version);
                    self.lost.store(true, Ordering::Relaxed);
                }
            });
            for (index, error) in unread {
                walked.outcomes[places[index] as usize] = Outcome::Unknown;
                self.complain(below.floor.name(), &error.to_string());
            }
        }
    }

    /// Puts what was found into the floors above that take it and of which `which` says yes.
    pub(super) fn put_above(&self, keys: &[i64], walked: &Walked, which: impl Fn(&Level) -> bool) {
        for level in (0..self.floors.len()).rev() {
            if self.floors[level].keeps && which(&self.floors[level]) {
                self.put_into(level, keys, walked);
            }
        }
    }

    /// Puts what was found into those floors above that should have it and have lost it.
    pub(super) fn put_where_lost(&self, keys: &[i64], walked: &Walked) {
        for (at, level) in self.floors.iter().enumerate().filter(|(_, level)| level.shared && level.keeps) {
            // Changes went to every floor: one that was found below alone was lost above, or left there for want of room.
            let lost = |&place: &u32| {
                walked.versions[place as usize] > 0 || level.floor.missed(keys[place as usize]).is_some()
            };
            self.put_places(at, keys, walked, &walked.below(at).into_iter().filter(lost).collect::<Vec<_>>());
        }
    }

    /// Puts what was found below one floor into it.
    fn put_into(&self, level: usize, keys: &[i64], walked: &Walked) {
        self.put_places(level, keys, walked, &walked.below(level));
    }

    fn put_places(&self, level: usize, keys: &[i64], walked: &Walked, places: &[u32]) {
        if places.is_empty() {
            return;
        }
        let floor = &*self.floors[level].floor;
        let found = walked.gather(keys, places);
        if let Err(error) = floor.put(&found.rows(), &self.current(keys, walked, places)) {
            self.complain(floor.name(), &error.to_string());
        }
    }

    /// Puts what was found into the cache, and into those on devices. What is doubtful is noted, to be read again soon.
    fn cache_found(&self, keys: &[i64], walked: &Walked) {
        let devices = self.devices.live();
        if self.cache.is_none() && devices.is_empty() {
            return;
        }
        let found = walked.places(|place| {
            walked.outcomes[place] == Outcome::Found && (!walked.doubtful[place] || self.doubtful.add(keys[place]))
        });
        if found.is_empty() {
            return;
        }
        let (gathered, current) = (walked.gather(keys, &found), self.current(keys, walked, &found));
        if let Some(cache) = &self.cache {
            cache.insert(&gathered.rows(), &current);
        }
        for device in devices {
            if let Err(error) = device.insert(&gathered.rows(), &current) {
                self.complain("device", &error.to_string());
            }
        }
    }

    /// Whether what was found at one of `places` is still current.
    fn current<'a>(&'a self, keys: &'a [i64], walked: &'a Walked, places: &'a [u32]) -> impl Fn(usize) -> bool + 'a {
        move |index| {
            let place = places[index] as usize;
            self.stamps.current(keys[place], walked.seen[place])
        }
    }

    /// Counts that a floor did not do what it was asked, and says so now and then.
    pub(super) fn complain(&self, floor: &'static str, error: &str) {
        metrics::embedding_error(floor);
        if self.complaints.now() {
            log::warn!("table {}: the {floor} floor: {error}", self.name);
        }
    }
}
