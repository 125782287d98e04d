//! Where a key goes: to which set of the cache, to which partition of host memory.

/// Spreads keys evenly over all 64 bits: keys that follow one another, or that differ in their upper half only, are the
/// rule. Another `salt` spreads them independently.
#[inline]
pub(super) fn mix(key: i64, salt: u64) -> u64 {
    let keyed = key.cast_unsigned() ^ salt ^ 0x9E37_79B9_7F4A_7C15;
    let product = u128::from(keyed) * u128::from(0xD6E8_FEB8_6659_FD93_u64);
    (product >> 64) as u64 ^ product as u64
}

/// Turns 64 bits into a number below `end`, by their upper part.
#[inline]
pub(super) fn below(bits: u64, end: usize) -> usize {
    ((u128::from(bits) * end as u128) >> 64) as usize
}
