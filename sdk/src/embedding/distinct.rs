//! The different keys among many.

use std::cell::RefCell;

use super::mix::mix;

/// The different keys of a list, in the order in which they come first.
pub(super) struct Distinct {
    pub(super) keys: Vec<i64>,
    /// For each key of the list its place in `keys`.
    pub(super) places: Vec<u32>,
}

impl Distinct {
    pub(super) fn of(keys: impl ExactSizeIterator<Item = i64>) -> Self {
        let mut distinct = Self { keys: Vec::new(), places: Vec::with_capacity(keys.len()) };
        let Self { keys: different, places } = &mut distinct;
        SLOTS.with_borrow_mut(|slots| each(slots, different, keys.len(), keys, |place| places.push(place)));
        distinct
    }

    /// How many different keys there are among at most `most`.
    pub(super) fn count(most: usize, keys: impl Iterator<Item = i64>) -> usize {
        KEYS.with_borrow_mut(|different| {
            different.clear();
            SLOTS.with_borrow_mut(|slots| each(slots, different, most, keys, |_| ()));
            different.len()
        })
    }
}

thread_local! {
    // Kept from one lookup to the next: the memory of large ones is taken from the system, and given back, each time.
    static SLOTS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    static KEYS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

/// Calls `each` with the place of each key in `different`, to which it adds those that are new.
fn each(
    slots: &mut Vec<u32>,
    different: &mut Vec<i64>,
    most: usize,
    keys: impl Iterator<Item = i64>,
    mut each: impl FnMut(u32),
) {
    const NONE: u32 = u32::MAX;
    let mask = (2 * most).next_power_of_two() - 1;
    slots.clear();
    slots.resize(mask + 1, NONE);
    for key in keys {
        let mut slot = mix(key, 2) as usize & mask;
        let place = loop {
            match slots[slot] {
                NONE => {
                    slots[slot] = different.len() as u32;
                    different.push(key);
                    break slots[slot];
                }
                place if different[place as usize] == key => break place,
                _ => slot = (slot + 1) & mask,
            }
        };
        each(place);
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
        assert_eq!((Distinct::count(7, keys.into_iter()), Distinct::count(0, [].into_iter())), (5, 0));
        let many = Distinct::of((0..100_000_u32).map(|number| i64::from(number % 1000) << 40));
        assert_eq!(many.keys.len(), 1000);
        assert!(many.places.iter().enumerate().all(|(index, &place)| place as usize == index % 1000));
    }
}
