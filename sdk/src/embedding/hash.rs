//! Hashes of keys: they choose the set of the cache and the partition of host memory.

/// A 64-bit hash of a key. It is uniform for the usual keys: consecutive ones, and ones that differ in their upper half
/// only. Hashes with different salts are independent.
#[inline]
pub(super) fn mix(key: i64, salt: u64) -> u64 {
    let keyed = key.cast_unsigned() ^ salt ^ 0x9E37_79B9_7F4A_7C15;
    let product = u128::from(keyed) * u128::from(0xD6E8_FEB8_6659_FD93_u64);
    (product >> 64) as u64 ^ product as u64
}

/// Maps a hash to a number below `end`, by its upper bits.
#[inline]
pub(super) fn below(bits: u64, end: usize) -> usize {
    ((u128::from(bits) * end as u128) >> 64) as usize
}
