//! The slots that a policy chooses.

use super::layer_slots::LayerSlots;

/// Slots whose lowest number is found at once.
const BLOCK: usize = 64;

/// The slots that a policy chooses, and memory to choose them in, which is kept from call to call.
#[derive(Clone, Debug, Default)]
pub struct Ranking {
    /// `[heads, count]`.
    pub(super) slots: Vec<u32>,
    order: Vec<u64>,
    /// For what a policy computes of a head's slots before it chooses.
    pub(super) numbers: Vec<f32>,
}

impl Ranking {
    /// Chooses slots of the next head, in this order.
    pub fn choose(&mut self, slots: impl Iterator<Item = usize>) {
        self.slots.extend(slots.map(|slot| slot as u32));
    }

    /// Chooses `count` slots of a head with the lowest numbers, the lowest first, ties to the lowest slot. The last `grace` slots
    /// are left out. `numbers`: one for each place.
    pub fn choose_lowest(&mut self, slots: &LayerSlots, head: usize, grace: usize, numbers: &[f32], count: usize) {
        match slots.places(head) {
            None => self.lowest(numbers[..slots.len() - grace].iter().copied(), count),
            Some(places) => {
                let places = &places[..slots.len() - grace];
                self.lowest(places.iter().map(|&place| numbers[place as usize]), count);
            }
        }
    }

    fn lowest(&mut self, numbers: impl ExactSizeIterator<Item = f32>, count: usize) {
        if count == 1 {
            self.slots.push(lowest(numbers) as u32);
            return;
        }
        self.order.clear();
        // By number, then by slot.
        let key = |(slot, number): (usize, f32)| (u64::from((order_of(number) as u32) ^ (1 << 31)) << 32) | slot as u64;
        self.order.extend(numbers.enumerate().map(key));
        if count < self.order.len() {
            self.order.select_nth_unstable(count);
            self.order.truncate(count);
        }
        self.order.sort_unstable();
        self.slots.extend(self.order.iter().map(|&key| key as u32));
    }
}

/// The first of the lowest numbers. Blocks have no branch inside, so that several numbers are compared at once.
fn lowest(mut numbers: impl ExactSizeIterator<Item = f32>) -> usize {
    let (mut least, mut at) = (i32::MAX, 0);
    let mut block = [i32::MAX; BLOCK];
    let count = numbers.len();
    for first in (0..count).step_by(BLOCK) {
        let len = BLOCK.min(count - first);
        block[..len].iter_mut().zip(&mut numbers).for_each(|(to, number)| *to = order_of(number));
        let lowest = block[..len].iter().fold(i32::MAX, |least, &number| least.min(number));
        if lowest < least {
            least = lowest;
            at = first + block[..len].iter().position(|&number| number == lowest).unwrap_or(0);
        }
    }
    at
}

/// A number that compares as `f32::total_cmp` does.
fn order_of(number: f32) -> i32 {
    let bits = number.to_bits() as i32;
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_are_chosen_in_order_and_ties_go_to_the_lowest_slot() {
        let mut state = 7_u64;
        for len in 1..300 {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Few numbers, so that there are ties; negative ones, zeros of both signs and NaN too.
                [0.0, -0.0, 1.5, -2.0, f32::NAN, 3.0, f32::NEG_INFINITY][(state >> 40) as usize % 7]
            };
            let numbers: Vec<f32> = (0..len).map(|_| next()).collect();
            let mut expected: Vec<usize> = (0..len).collect();
            expected.sort_by(|&a, &b| numbers[a].total_cmp(&numbers[b]).then(a.cmp(&b)));
            for count in [1, 2, len / 2, len] {
                let mut ranking = Ranking::default();
                ranking.lowest(numbers.iter().copied(), count.clamp(1, len));
                let found: Vec<usize> = ranking.slots.iter().map(|&slot| slot as usize).collect();
                assert_eq!(found, expected[..count.clamp(1, len)], "{numbers:?}");
            }
        }
    }
}
