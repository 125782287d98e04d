//! The floor in host memory: rows in partitions, each with a lock and a cap of its own.

mod partition;
#[cfg(test)]
mod tests;

use std::time::Instant;

use self::partition::Partition;
use super::Layout;
use super::floor::{Floor, Rows, Sink};
use super::mix::{below, mix};
use super::overflow::Overflow;
use crate::error::{Error, Result};
use crate::sync::Mutex;

const MAX_PARTITIONS: usize = 1 << 16;
/// How many keys are served before others may have the partition.
const AT_ONCE: usize = 128;
const SALT: u64 = 0x5061_7274_6974_696F;

/// How much of a table host memory keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryOptions {
    /// Rows are spread over so many partitions by their keys. More of them let more threads in at the same time.
    pub partitions: usize,
    /// The most rows of a partition. 0 keeps none; deleted keys count.
    pub margin: usize,
    /// Which rows leave a partition that is full.
    pub policy: Overflow,
    /// How many do: until so much of the margin is left, from 0 to 1. They leave a few at a time, whenever another row
    /// comes in.
    pub target: f64,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        Self { partitions: 16, margin: usize::MAX, policy: Overflow::default(), target: 0.8 }
    }
}

/// Rows of one table in host memory.
pub(super) struct Memory {
    partitions: Box<[Mutex<Partition>]>,
}

impl Memory {
    /// Without rows. What it takes grows with them.
    pub(super) fn new(layout: Layout, options: &MemoryOptions) -> Result<Self> {
        let &MemoryOptions { partitions, target, .. } = options;
        if !(1..=MAX_PARTITIONS).contains(&partitions) {
            let message = format!("{partitions} partitions are not between 1 and {MAX_PARTITIONS}");
            return Err(Error::invalid("num_partitions", message));
        }
        if !(0.0..=1.0).contains(&target) {
            return Err(Error::invalid("overflow_resolution_target", format!("{target} is not between 0 and 1")));
        }
        let partitions = (0..partitions).map(|_| Mutex::new(Partition::new(layout, options)));
        Ok(Self { partitions: partitions.collect() })
    }

    /// What so many rows take, about, in bytes.
    pub(super) fn bytes_for(layout: Layout, rows: u64) -> u64 {
        rows.saturating_mul(partition::bytes_of_row(layout))
    }

    /// How many rows there are; deleted keys count.
    #[cfg(test)]
    pub(super) fn rows(&self) -> usize {
        self.partitions.iter().map(|partition| partition.lock().rows()).sum()
    }

    /// Calls `each` with every key's partition and place. A partition is locked for a few keys at a time.
    fn each(&self, keys: &[i64], mut each: impl FnMut(&mut Partition, usize) -> Result<()>) -> Result<()> {
        let (order, ends) = self.by_partition(keys);
        let begins = std::iter::once(0).chain(ends.iter().copied());
        for ((begin, &end), partition) in begins.zip(&ends).zip(&self.partitions) {
            for places in order[begin..end].chunks(AT_ONCE) {
                let mut partition = partition.lock();
                places.iter().try_for_each(|&place| each(&mut partition, place as usize))?;
            }
        }
        Ok(())
    }

    /// The places of the keys, those of one partition after those of another, and where those of each end.
    fn by_partition(&self, keys: &[i64]) -> (Vec<u32>, Vec<usize>) {
        let partition_of = |key: i64| below(mix(key, SALT), self.partitions.len());
        let mut ends = vec![0; self.partitions.len()];
        for &key in keys {
            ends[partition_of(key)] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            (sum, *end) = (sum + *end, sum);
        }
        // Each is where a partition begins, and ends where it ends.
        let mut order = vec![0; keys.len()];
        for (place, &key) in keys.iter().enumerate() {
            let end = &mut ends[partition_of(key)];
            order[*end] = place as u32;
            *end += 1;
        }
        (order, ends)
    }
}

impl Floor for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    /// The deadline does not matter: nothing here waits for anything.
    fn fetch(&self, keys: &[i64], _deadline: Option<Instant>, sink: &mut Sink<'_>) -> Result<()> {
        self.each(keys, |partition, place| {
            if let Some((version, row)) = partition.look_up(keys[place]) {
                sink(place, version, row);
            }
            Ok(())
        })
    }

    fn put(&self, found: &Rows<'_>, current: &dyn Fn(usize) -> bool) -> Result<()> {
        self.each(found.keys, |partition, place| {
            if partition.version(found.keys[place]).is_some() || !current(place) {
                return Ok(());
            }
            partition.set(found.keys[place], found.versions[place], found.row(place))
        })
    }

    /// Keys that are not here are taken in.
    fn update(&self, change: &Rows<'_>) -> Result<()> {
        self.each(change.keys, |partition, place| {
            if partition.version(change.keys[place]).is_some_and(|version| version > change.versions[place]) {
                return Ok(());
            }
            partition.set(change.keys[place], change.versions[place], change.row(place))
        })
    }

    fn memory(&self) -> u64 {
        self.partitions.iter().map(|partition| partition.lock().memory()).sum()
    }
}
