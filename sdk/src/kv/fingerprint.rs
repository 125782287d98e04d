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
    items.iter().fold(before, |hash, &item| add(multiply(hash, BASE), 1 + spread(item) % (PRIME - 1)))
}

/// Spreads an item's bits, so that items that follow a pattern do not make hashes that cancel out.
fn spread(item: u64) -> u64 {
    let item = (item ^ (item >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    let item = (item ^ (item >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    item ^ (item >> 32)
}

fn multiply(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    add((product as u64) & PRIME, (product >> 61) as u64)
}

fn add(a: u64, b: u64) -> u64 {
    let sum = a + b;
    let sum = (sum & PRIME) + (sum >> 61);
    if sum >= PRIME { sum - PRIME } else { sum }
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
        for a in [0, 1, 2, BASE, PRIME - 1] {
            for b in [0, 1, 3, BASE, PRIME - 1] {
                let exact = |value: u128| (value % u128::from(PRIME)) as u64;
                assert_eq!(multiply(a, b), exact(u128::from(a) * u128::from(b)));
                assert_eq!(add(a, b), exact(u128::from(a) + u128::from(b)));
            }
        }
    }
}
