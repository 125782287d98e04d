//! The tier in host memory: rows in partitions, each with a lock and a limit of its own.

mod limits;
mod partition;
#[cfg(test)]
mod tests;

use std::time::Instant;

use self::partition::Partition;
use crate::embedding::hash::{below, mix};
use crate::embedding::options::MEMORY;
use crate::embedding::row::Layout;
use crate::embedding::tiers::tier::{Rows, Sink, Tier};
use crate::error::{Error, Result};
use crate::sync::Mutex;

pub(in crate::embedding) use self::limits::MemoryLimits;

const MAX_PARTITIONS: usize = 1 << 16;
/// How many keys are served before the lock of a partition is released.
const AT_ONCE: usize = 128;
const SALT: u64 = 0x5061_7274_6974_696F;

/// The rows of one table in host memory.
pub(in crate::embedding) struct MemoryTier {
    partitions: Box<[Mutex<Partition>]>,
}

impl MemoryTier {
    /// An empty tier. Its memory grows with its rows.
    pub(in crate::embedding) fn new(layout: Layout, limits: &MemoryLimits) -> Result<Self> {
        let &MemoryLimits { partitions, keep, .. } = limits;
        if !(1..=MAX_PARTITIONS).contains(&partitions) {
            let message = format!("{partitions} partitions are not between 1 and {MAX_PARTITIONS}");
            return Err(Error::invalid(format!("{MEMORY}.partitions"), message));
        }
        if !(0.0..=1.0).contains(&keep) {
            let message = format!("{keep} is not between 0 and 1");
            return Err(Error::invalid(format!("{MEMORY}.overflow.keep"), message));
        }
        let partitions = (0..partitions).map(|_| Mutex::new(Partition::new(layout, limits)));
        Ok(Self { partitions: partitions.collect() })
    }

    /// The approximate number of bytes of `rows` rows.
    pub(in crate::embedding) fn bytes_for(layout: Layout, rows: u64) -> u64 {
        rows.saturating_mul(partition::bytes_of_row(layout))
    }

    /// The number of rows, tombstones included.
    #[cfg(test)]
    pub(in crate::embedding) fn rows(&self) -> usize {
        self.partitions.iter().map(|partition| partition.lock().rows()).sum()
    }

    /// Calls `each` with the partition and the index of every key. It locks a partition for a few keys at a time.
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

    /// The indices of the keys, ordered by partition, and the end of each partition in that list.
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
        // Each entry of `ends` begins as the start of its partition, and becomes its end below.
        let mut order = vec![0; keys.len()];
        for (place, &key) in keys.iter().enumerate() {
            let end = &mut ends[partition_of(key)];
            order[*end] = place as u32;
            *end += 1;
        }
        (order, ends)
    }
}

impl Tier for MemoryTier {
    fn name(&self) -> &'static str {
        "memory"
    }

    /// Ignores the deadline: nothing here blocks.
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

    /// Adds keys that it does not hold.
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
