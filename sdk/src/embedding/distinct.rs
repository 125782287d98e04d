//! The different keys among many.

use super::mix::mix;

/// The different keys of a list, in the order in which they come first.
pub(super) struct Distinct {
    pub(super) keys: Vec<i64>,
    /// For each key of the list its place in `keys`.
    pub(super) places: Vec<u32>,
}

impl Distinct {
    pub(super) fn of(keys: impl ExactSizeIterator<Item = i64>) -> Self {
        const NONE: u32 = u32::MAX;
        let mask = (2 * keys.len()).next_power_of_two() - 1;
        let mut slots = vec![NONE; mask + 1];
        let mut distinct = Self { keys: Vec::new(), places: Vec::with_capacity(keys.len()) };
        for key in keys {
            let mut slot = mix(key, 2) as usize & mask;
            let place = loop {
                match slots[slot] {
                    NONE => {
                        slots[slot] = distinct.keys.len() as u32;
                        distinct.keys.push(key);
                        break slots[slot];
                    }
                    place if distinct.keys[place as usize] == key => break place,
                    _ => slot = (slot + 1) & mask,
                }
            };
            distinct.places.push(place);
        }
        distinct
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_is_there_once() {
        let keys = [5, -1, 5, i64::MIN, i64::MAX, -1, 0];
        let distinct = Distinct::of(keys.into_iter());
        assert_eq!(distinct.keys, [5, -1, i64::MIN, i64::MAX, 0]);
        assert_eq!(distinct.places, [0, 1, 0, 2, 3, 1, 4]);
        assert!(Distinct::of([].into_iter()).keys.is_empty());
        let many = Distinct::of((0..100_000_u32).map(|number| i64::from(number % 1000) << 40));
        assert_eq!(many.keys.len(), 1000);
        assert!(many.places.iter().enumerate().all(|(index, &place)| place as usize == index % 1000));
    }
}
