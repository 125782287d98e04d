//! The memory of a cache: one mapping, which the operating system fills with zeros as it is touched.

use std::sync::atomic::AtomicU64;

use memmap2::{MmapMut, MmapRaw};

use super::set::{Set, WAYS};
use crate::embedding::Layout;
use crate::error::{Error, Result, Status};

const WORD: usize = size_of::<AtomicU64>();

/// Set after set: first the set itself, then the rows of its ways, then the versions of these. What a lookup needs of a key
/// lies together: finding another page in the processor's tables costs it about as much as the row does. Everything in it is
/// atomic, and all zeros is a set without rows.
pub(super) struct Region {
    map: MmapRaw,
    sets: usize,
    /// Words of a row.
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
        // Rows are read in no order: with pages of 4 KiB nearly every one would miss the processor's table of pages. Where
        // there are no larger ones the cache is slower, and that is all.
        #[cfg(all(target_os = "linux", not(miri)))]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map, sets: rows.div_ceil(WAYS), row: words(layout), stride: stride(layout) })
    }

    /// What a region for so many rows takes.
    pub(super) fn bytes(layout: Layout, rows: usize) -> u64 {
        (rows.div_ceil(WAYS) as u64).saturating_mul(stride(layout) as u64)
    }

    /// How many sets there are.
    #[inline]
    pub(super) fn sets(&self) -> usize {
        self.sets
    }

    #[inline]
    pub(super) fn set(&self, set: usize) -> &Set {
        // SAFETY: the place begins with a set, at a line's alignment; it is valid when zeroed, atomic, and never accessed as
        // anything else.
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

    /// Where a set begins.
    #[inline]
    fn at(&self, set: usize) -> *const u8 {
        assert!(set < self.sets);
        // SAFETY: the region is as long as all sets.
        unsafe { self.map.as_ptr().add(set * self.stride) }
    }
}

/// Bytes of a set with its rows and their versions, in whole lines.
fn stride(layout: Layout) -> usize {
    (size_of::<Set>() + WAYS * WORD * (words(layout) + 1)).next_multiple_of(align_of::<Set>())
}

/// Whole words of a row.
fn words(layout: Layout) -> usize {
    layout.row_bytes().div_ceil(WORD)
}
