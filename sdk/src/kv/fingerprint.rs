//! A rolling hash over the items of a history, which tells an edited history from the one that is cached.
//!
//! The hash of a history is a polynomial in a fixed base over the numbers of its items, modulo the prime 2^61 - 1. Knowing
//! it at one position is enough to go on from there, so only one number a page is kept.

/// 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;
/// Any number below the prime that is not small would do.
const BASE: u64 = 0x1656_67B1_9E37_79F9 % PRIME;

/// The hash of a history that goes on after `before` with `items`.
pub(super) fn extend(before: u64, items: &[u64]) -> u64 {
    reduce(items.iter().fold(before, |hash, &item| follow(hash, 1 + spread(item) % (PRIME - 1))))
}

/// A number that is `hash` times the base plus `item` modulo the prime: not the smallest one, for which every item
/// would wait a little longer for the one before. Below 2^63 if both are, as the base is below 3/4 of the prime.
fn follow(hash: u64, item: u64) -> u64 {
    let sum = u128::from(hash) * u128::from(BASE) + u128::from(item);
    (sum as u64 & PRIME) + (sum >> 61) as u64
}

/// The smallest number that is the same modulo the prime.
fn reduce(hash: u64) -> u64 {
    let hash = (hash & PRIME) + (hash >> 61);
    if hash >= PRIME { hash - PRIME } else { hash }
}

/// Spreads an item's bits, so that items that follow a pattern do not make hashes that cancel out.
fn spread(item: u64) -> u64 {
    let item = (item ^ (item >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let item = (item ^ (item >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    item ^ (item >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_can_be_gone_on_from_anywhere() {
        let items: Vec<u64> = (0..100).map(|n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        let whole = extend(0, &items);
        for at in 0..=items.len() {
            assert_eq!(extend(extend(0, &items[..at]), &items[at..]), whole);
        }
    }

    #[test]
    fn any_edit_shows() {
        let items: Vec<u64> = (0..64).collect();
        let whole = extend(0, &items);
        for at in 0..items.len() {
            let mut edited = items.clone();
            edited[at] ^= 1 << (at % 64);
            assert_ne!(extend(0, &edited), whole, "item {at} changed");
            let mut removed = items.clone();
            removed.remove(at);
            assert_ne!(extend(0, &removed), whole, "item {at} removed");
            if at > 0 {
                let mut swapped = items.clone();
                swapped.swap(at - 1, at);
                assert_ne!(extend(0, &swapped), whole, "items {at} and the one before swapped");
            }
        }
        assert_ne!(extend(0, &[0]), extend(0, &[0, 0]), "an item 0 counts");
        assert_ne!(extend(0, &[u64::MAX]), extend(0, &[0]));
    }

    #[test]
    fn arithmetic_is_modulo_the_prime() {
        const { assert!(BASE < PRIME / 4 * 3) };
        let most = (1 << 63) - 1;
        for hash in [0, 1, 2, BASE, PRIME - 1, PRIME, PRIME + 1, 2 * PRIME, most] {
            for item in [0, 1, 3, BASE, PRIME - 1] {
                let exact = (u128::from(hash) * u128::from(BASE) + u128::from(item)) % u128::from(PRIME);
                assert_eq!(u128::from(reduce(follow(hash, item))), exact, "{hash} {item}");
                assert!(follow(hash, item) <= most, "{hash} {item}");
            }
        }
    }

    #[test]
    fn hashes_are_what_they_were() {
        // They are stored: what was written by an older version must be found.
        assert_eq!(extend(0, &[1, 2, 3, u64::MAX]), 0x1598_ad07_3209_43f2);
        assert_eq!(extend(PRIME - 1, &(0..1000).collect::<Vec<_>>()), 0x188b_9bbe_015d_8ab2);
    }
}
