//! All tokens of an owner whose slots are overwritten: read and written at once, layer by layer, instead of as a history that
//! grows.

use super::device::Part;
use super::{KvCache, KvLease};
use crate::checksum::xxh3;
use crate::error::Result;
use crate::store::Space;

impl KvCache {
    /// Bytes of a key, or of a value, of one head, in each tensor of a layer's pool.
    pub(crate) fn head_bytes(&self) -> Vec<usize> {
        self.inner.shape.planes().map(|plane| plane.head_bytes()).collect()
    }

    /// A part of a store beside the cache's own, for entries of a kind.
    pub(crate) fn space_of(&self, kind: &str) -> Space {
        let mut bytes = self.inner.space.0.to_le_bytes().to_vec();
        bytes.extend(kind.as_bytes());
        Space(xxh3(&bytes))
    }
}

impl KvLease {
    /// One layer of the first `count` tokens of the only owner, all of them cached: for each tensor of the pool the keys, then the
    /// values, each `[count, heads, head bytes]`. Replaces what is in `to`.
    pub(crate) fn read_layer(&self, layer: u32, count: usize, to: &mut Vec<u8>) -> Result<()> {
        let pages: Vec<u32> = self.pages_of_owners().next().into_iter().flatten().collect();
        to.clear();
        // SAFETY: the lease holds the owner, and the caller has checked that so many tokens are cached.
        unsafe { self.inner.pool.read(layer, &pages, 0, count, to) }
    }

    /// Writes one layer of the `count` new tokens of the only owner, which has none yet, as [`read_layer`](Self::read_layer) gives
    /// it.
    pub(crate) fn write_layer(&self, layer: u32, count: usize, bytes: &[u8]) -> Result<()> {
        let pages: Vec<u32> = self.pages_of_owners().next().into_iter().flatten().collect();
        // SAFETY: the new pages are this lease's alone, and the bytes live until everything is there.
        unsafe { self.inner.pool.write(layer, &pages, 0, &[Part { bytes, held: count, skip: 0, count }])? };
        self.inner.pool.settle()
    }
}
