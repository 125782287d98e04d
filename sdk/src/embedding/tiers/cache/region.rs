//! The memory of a cache: one anonymous mapping, which the system fills with zeros on demand.

use std::sync::atomic::AtomicU64;

use memmap2::{MmapMut, MmapRaw};

use super::set::{Set, WAYS};
use crate::embedding::row::Layout;
use crate::error::{Error, Result, Status};

const WORD: usize = size_of::<AtomicU64>();

/// A sequence of sets: first the set itself, then the rows of its ways, then their versions. Everything that a lookup
/// of a key needs lies together: a second TLB miss costs about as much as the row. All of it is atomic, and all zeros
/// is a set without rows.
pub(super) struct Region {
    map: MmapRaw,
    sets: usize,
    /// The number of words of a row.
    row: usize,
    /// Bytes from one set to the next.
    stride: usize,
}

impl Region {
    pub(super) fn new(layout: Layout, rows: usize) -> Result<Self> {
        let bytes = Self::bytes(layout, rows);
        let refused = |why: &dyn std::fmt::Display| {
            let message =
                format!("a cache of {rows} rows takes {bytes} bytes, which can not be had ({why}): make it smaller");
            Error::new(Status::Capacity, message)
        };
        let length = isize::try_from(bytes).map_err(|error| refused(&error))?.cast_unsigned();
        let map = MmapRaw::from(MmapMut::map_anon(length).map_err(|error| refused(&error))?);
        // Rows are read in random order: with pages of 4 KiB nearly every one would miss the TLB. Without huge pages
        // the cache is slower, but works.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map, sets: rows.div_ceil(WAYS), row: words(layout), stride: stride(layout) })
    }

    /// The number of bytes of a region for `rows` rows.
    pub(super) fn bytes(layout: Layout, rows: usize) -> u64 {
        (rows.div_ceil(WAYS) as u64).saturating_mul(stride(layout) as u64)
    }

    /// The number of sets.
    #[inline]
    pub(super) fn sets(&self) -> usize {
        self.sets
    }

    #[inline]
    pub(super) fn set(&self, set: usize) -> &Set {
        // SAFETY: a set begins there, aligned to a line. It is valid when zeroed, atomic, and never accessed as another
        // type.
        unsafe { &*self.at(set).cast() }
    }

    /// The words of one row.
    #[inline]
    pub(super) fn row(&self, set: usize, way: usize) -> &[AtomicU64] {
        assert!(way < WAYS);
        // SAFETY: the rows follow the set, as many as there are ways; as for the set.
        unsafe {
            let rows = self.at(set).add(size_of::<Set>()).cast::<AtomicU64>();
            std::slice::from_raw_parts(rows.add(way * self.row), self.row)
        }
    }

    pub(super) fn version(&self, set: usize, way: usize) -> &AtomicU64 {
        assert!(way < WAYS);
        // SAFETY: the versions follow the rows, as many as there are ways; as for the set.
        unsafe { &*self.at(set).add(size_of::<Set>()).cast::<AtomicU64>().add(WAYS * self.row + way) }
    }

    pub(super) fn places(&self) -> usize {
        self.sets * WAYS
    }

    /// The address of a set.
    #[inline]
    fn at(&self, set: usize) -> *const u8 {
        assert!(set < self.sets);
        // SAFETY: the region is as long as all sets.
        unsafe { self.map.as_ptr().add(set * self.stride) }
    }
}

/// The bytes of a set with its rows and their versions, rounded up to whole lines.
fn stride(layout: Layout) -> usize {
    (size_of::<Set>() + WAYS * WORD * (words(layout) + 1)).next_multiple_of(align_of::<Set>())
}

/// The number of words of a row.
fn words(layout: Layout) -> usize {
    layout.row_bytes().div_ceil(WORD)
}
