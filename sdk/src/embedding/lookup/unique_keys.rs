//! Removes duplicates from the keys of a call.

use std::cell::RefCell;

use crate::embedding::hash::mix;

/// The unique keys of a list, in the order of their first occurrence.
pub(in crate::embedding) struct UniqueKeys {
    pub(in crate::embedding) keys: Vec<i64>,
    /// For each key of the list its index in `keys`.
    pub(in crate::embedding) indices: Vec<u32>,
}

impl UniqueKeys {
    pub(in crate::embedding) fn of(keys: impl ExactSizeIterator<Item = i64>) -> Self {
        let mut list = Self { keys: Vec::new(), indices: Vec::with_capacity(keys.len()) };
        let Self { keys: unique, indices } = &mut list;
        SLOTS.with_borrow_mut(|slots| each(slots, unique, keys.len(), keys, |index| indices.push(index)));
        list
    }

    /// The number of unique keys among at most `most` keys.
    pub(in crate::embedding) fn count(most: usize, keys: impl Iterator<Item = i64>) -> usize {
        KEYS.with_borrow_mut(|unique| {
            unique.clear();
            SLOTS.with_borrow_mut(|slots| each(slots, unique, most, keys, |_| ()));
            unique.len()
        })
    }
}

thread_local! {
    // Reused by the next lookup: the allocator would return the memory of large lookups to the system each time.
    static SLOTS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    static KEYS: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

/// Calls `each` with the index of each key in `unique`; appends keys that are not in it yet.
fn each(
    slots: &mut Vec<u32>,
    unique: &mut Vec<i64>,
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
                    slots[slot] = unique.len() as u32;
                    unique.push(key);
                    break slots[slot];
                }
                place if unique[place as usize] == key => break place,
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
        let list = UniqueKeys::of(keys.into_iter());
        assert_eq!(list.keys, [5, -1, i64::MIN, i64::MAX, 0]);
        assert_eq!(list.indices, [0, 1, 0, 2, 3, 1, 4]);
        assert!(UniqueKeys::of([].into_iter()).keys.is_empty());
        assert_eq!((UniqueKeys::count(7, keys.into_iter()), UniqueKeys::count(0, [].into_iter())), (5, 0));
        let many = UniqueKeys::of((0..100_000_u32).map(|number| i64::from(number % 1000) << 40));
        assert_eq!(many.keys.len(), 1000);
        assert!(many.indices.iter().enumerate().all(|(index, &place)| place as usize == index % 1000));
    }
}
