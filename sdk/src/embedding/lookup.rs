//! One lookup: what the cache has at once, and what becomes of the rest.

use std::time::{Duration, Instant};

use super::distinct::Distinct;
use super::row::Layout;
use super::view::EmbeddingTable;
use super::walk::{Outcome, Walked};
use crate::error::{Error, Result};

/// Longer than anyone waits.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// What a lookup does about keys that the cache does not have.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Miss {
    /// What the table's `hit_rate_threshold` says: below it as [`Miss::Wait`], otherwise as [`Miss::Default`].
    #[default]
    ByHitRate,
    /// Fetches them from the floors below and returns their rows.
    Wait,
    /// Returns the table's default vector for them, and has them inserted in the background.
    Default,
    /// Fetches them, and returns the default vector for those that have not arrived in time; they are inserted when they
    /// arrive.
    Within(Duration),
}

/// What a lookup found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Different keys that were asked for. If the cache had all of them, no one counts them: then every key as it was given.
    pub keys: usize,
    /// Those of them that the cache had.
    pub hits: usize,
    /// Those that got the default vector, for whatever reason.
    pub defaults: usize,
}

impl EmbeddingTable {
    /// Looks keys up, any number of times each: `numbers` gets a row for each of them, and `found` whether it is the key's
    /// own or the default vector.
    pub fn lookup(&self, keys: &[i64], numbers: &mut [f32], found: &mut [bool], miss: Miss) -> Result<Looked> {
        self.check(keys, numbers, found)?;
        let mut missing = Vec::new();
        match self.table.cache.as_ref().filter(|_| self.cached) {
            Some(cache) => cache.lookup(keys, numbers, &mut missing),
            None => missing.extend(0..keys.len() as u32),
        }
        found.fill(true);
        let looked = if missing.is_empty() {
            Looked { keys: keys.len(), hits: keys.len(), defaults: 0 }
        } else {
            self.look_below(keys, &missing, numbers, found, miss)
        };
        self.table.counters.count(looked);
        Ok(looked)
    }

    fn check(&self, keys: &[i64], numbers: &[f32], found: &[bool]) -> Result<()> {
        if keys.len() > u32::MAX as usize / 2 {
            return Err(Error::invalid("keys", format!("{} keys are too many for one call", keys.len())));
        }
        let (dim, count) = (self.dim(), keys.len());
        if numbers.len() != count * dim {
            let message = format!(
                "there is room for {} numbers and {count} keys of table {} take {dim} each: make it {}",
                numbers.len(),
                self.table.name,
                count * dim
            );
            return Err(Error::invalid("numbers", message));
        }
        if found.len() != count {
            return Err(Error::invalid("found", format!("there is room for {} marks and {count} keys", found.len())));
        }
        Ok(())
    }

    /// Deals with the keys at the places `missing`, which the cache does not have.
    fn look_below(&self, keys: &[i64], missing: &[u32], numbers: &mut [f32], found: &mut [bool], miss: Miss) -> Looked {
        let wanted = Distinct::of(missing.iter().map(|&place| keys[place as usize]));
        let hits = self.distinct_hits(keys, missing);
        let count = hits + wanted.keys.len();
        let miss = match miss {
            // Without a cache there is no hit rate to go by: every lookup goes below.
            Miss::ByHitRate if !self.cached || self.table.cache.is_none() || self.below_threshold(hits, count) => {
                Miss::Wait
            }
            Miss::ByHitRate => Miss::Default,
            miss => miss,
        };
        // Which of the wanted keys are worth looking for, and where in `wanted` they are.
        let (places, sought): (Vec<u32>, Vec<i64>) =
            (0..).zip(wanted.keys.iter().copied()).filter(|&(_, key)| !self.table.absent.contains(key)).unzip();
        let mut rows = Arrived::new(self.table.layout, wanted.keys.len());
        match miss {
            _ if sought.is_empty() => {}
            Miss::Wait | Miss::ByHitRate => {
                rows.take(&places, &self.table.walk(&sought, None, Some(&self.later), &mut |_| ()));
            }
            Miss::Default => {
                self.later.insert(&self.table, sought);
            }
            Miss::Within(limit) => self.look_within(limit, &places, &sought, &mut rows),
        }
        for (&place, &index) in missing.iter().zip(&wanted.places) {
            let place = place as usize;
            match rows.row(index as usize) {
                Some(row) => numbers[place * row.len()..][..row.len()].copy_from_slice(row),
                None => {
                    numbers[place * self.dim()..][..self.dim()].copy_from_slice(&self.default);
                    found[place] = false;
                }
            }
        }
        Looked { keys: count, hits, defaults: rows.wanted.iter().filter(|row| row.is_none()).count() }
    }

    /// What is in host memory, and what arrives from below that within a time limit.
    fn look_within(&self, limit: Duration, places: &[u32], sought: &[i64], rows: &mut Arrived) {
        // A limit beyond what a clock can say is met in any case.
        let deadline = Instant::now().checked_add(limit).unwrap_or_else(|| Instant::now() + FOREVER);
        let (mut places, mut sought) = (places.to_vec(), sought.to_vec());
        if let Some(near) = self.table.walk_near(&sought) {
            rows.take(&places, &near);
            let unknown = near.places(|place| near.outcomes[place] == Outcome::Unknown);
            places = unknown.iter().map(|&place| places[place as usize]).collect();
            sought = unknown.iter().map(|&place| sought[place as usize]).collect();
        }
        if !sought.is_empty() {
            self.later.walk_until(&self.table, sought, deadline, |walked| rows.take(&places, walked));
        }
    }

    /// Whether the hit rate is below the threshold; exactly at it, it is not.
    pub(super) fn below_threshold(&self, hits: usize, keys: usize) -> bool {
        // In this form 7 hits of 10 keys are at a threshold of 0.7, which 0.7 * 10 would not be sure to say.
        (hits as f64 / keys as f64) < self.hit_rate_threshold
    }

    /// How many different keys the cache had.
    fn distinct_hits(&self, keys: &[i64], missing: &[u32]) -> usize {
        let mut missing = missing.iter().copied().peekable();
        let hits = (0..).zip(keys).filter(|(place, _)| missing.next_if_eq(place).is_none());
        // A row that was inserted or left meanwhile may be on both sides; it is counted on both.
        Distinct::count(keys.len(), hits.map(|(_, &key)| key))
    }
}

/// The rows of missing keys, as numbers.
struct Arrived {
    layout: Layout,
    /// For each wanted key where its row begins.
    wanted: Vec<Option<usize>>,
    numbers: Vec<f32>,
}

impl Arrived {
    fn new(layout: Layout, wanted: usize) -> Self {
        Self { layout, wanted: vec![None; wanted], numbers: Vec::new() }
    }

    /// Takes what a walk found for the wanted keys at `places`.
    fn take(&mut self, places: &[u32], walked: &Walked) {
        let layout = self.layout;
        for (index, &place) in places.iter().enumerate() {
            if let Some(row) = walked.row(index)
                && self.wanted[place as usize].is_none()
            {
                let start = self.numbers.len();
                self.numbers.resize(start + layout.dim(), 0.0);
                layout.decode(row, &mut self.numbers[start..]);
                self.wanted[place as usize] = Some(start);
            }
        }
    }

    fn row(&self, wanted: usize) -> Option<&[f32]> {
        self.wanted[wanted].map(|start| &self.numbers[start..][..self.layout.dim()])
    }
}
