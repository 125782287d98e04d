//! The memory of a cache: one mapping, which the operating system fills with zeros as it is touched.

use std::sync::atomic::AtomicU64;

use memmap2::{MmapMut, MmapRaw};

use super::set::{Set, WAYS};
use crate::embedding::Layout;
use crate::error::{Error, Result, Status};

const WORD: usize = size_of::<AtomicU64>();

/// The rows of all ways of all sets, then the sets, then the versions of the rows. Everything in it is atomic, and all zeros is a set without
/// rows.
pub(super) struct Region {
    map: MmapRaw,
    sets: usize,
    /// Words of a row.
    row: usize,
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
        Ok(Self { map, sets: rows.div_ceil(WAYS), row: words(layout) })
    }

    /// What a region for so many rows takes.
    pub(super) fn bytes(layout: Layout, rows: usize) -> u64 {
        let set = size_of::<Set>() + WAYS * WORD * (words(layout) + 1);
        // A line for the gap before the sets.
        (rows.div_ceil(WAYS) as u64).saturating_mul(set as u64).saturating_add(align_of::<Set>() as u64)
    }

    /// The words of one row. Its place is set times ways plus way.
    #[inline]
    pub(super) fn row(&self, place: usize) -> &[AtomicU64] {
        assert!(place < self.places());
        // SAFETY: the region begins with this many rows, at a page's alignment. They are valid when zeroed, atomic, and
        // never accessed as anything else.
        unsafe { std::slice::from_raw_parts(self.at(place * self.row * WORD).cast(), self.row) }
    }

    #[inline]
    pub(super) fn sets(&self) -> &[Set] {
        // SAFETY: this many sets follow the rows, at the next line; as for the rows.
        unsafe { std::slice::from_raw_parts(self.at(self.sets_at()).cast(), self.sets) }
    }

    pub(super) fn versions(&self) -> &[AtomicU64] {
        let at = self.sets_at() + self.sets * size_of::<Set>();
        // SAFETY: this many versions follow the sets; as for the rows.
        unsafe { std::slice::from_raw_parts(self.at(at).cast(), self.places()) }
    }

    pub(super) fn places(&self) -> usize {
        self.sets * WAYS
    }

    fn sets_at(&self) -> usize {
        (self.places() * self.row * WORD).next_multiple_of(align_of::<Set>())
    }

    fn at(&self, byte: usize) -> *const u8 {
        debug_assert!(byte <= self.map.len());
        // SAFETY: all that is asked for lies inside the region.
        unsafe { self.map.as_ptr().add(byte) }
    }
}

/// Whole words of a row.
fn words(layout: Layout) -> usize {
    layout.row_bytes().div_ceil(WORD)
}
