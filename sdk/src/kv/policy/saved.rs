//! The slots of a layer as bytes, for a store.

use super::cache_policy::CachePolicy;
use super::layer_slots::LayerSlots;

impl LayerSlots {
    /// Adds all that is known of the slots, but not what is in the pages.
    pub(crate) fn write_to(&self, to: &mut Vec<u8>) {
        let numbers = [self.used, self.seen, self.first, self.evicted.into(), self.turn];
        numbers.iter().for_each(|&number| to.extend((number as u64).to_le_bytes()));
        self.places.iter().for_each(|place| to.extend(place.to_le_bytes()));
        self.token_pos.iter().for_each(|position| to.extend(position.to_le_bytes()));
        for numbers in [&self.scores, &self.lengths, &self.errors] {
            numbers.iter().for_each(|number| to.extend(number.to_le_bytes()));
        }
    }

    /// Reads what [`write_to`](Self::write_to) has written of slots of the same policy and number, and removes it from `from`.
    /// `None` if it is something else.
    pub(crate) fn read_from(policy: &dyn CachePolicy, heads: usize, len: usize, from: &mut &[u8]) -> Option<Self> {
        let mut slots = Self::new(policy, heads, len).ok()?;
        let mut number = || take::<8>(from).map(u64::from_le_bytes).and_then(|number| usize::try_from(number).ok());
        (slots.used, slots.seen, slots.first) = (number()?, number()?, number()?);
        (slots.evicted, slots.turn) = (number()? != 0, number()?);
        for place in &mut slots.places {
            *place = take(from).map(u32::from_le_bytes)?;
        }
        for position in &mut slots.token_pos {
            *position = take(from).map(i32::from_le_bytes)?;
        }
        for score in slots.scores.iter_mut().chain(&mut slots.lengths).chain(&mut slots.errors) {
            *score = take(from).map(f32::from_le_bytes)?;
        }
        slots.is_sound(policy).then_some(slots)
    }

    /// Whether no number points outside of what it counts.
    fn is_sound(&self, policy: &dyn CachePolicy) -> bool {
        let Self { len, used, seen, first, turn, .. } = *self;
        let each_once = |places: &[u32]| {
            let mut found = vec![false; len];
            places.iter().all(|&place| (place as usize) < len && !std::mem::replace(&mut found[place as usize], true))
        };
        used <= len
            && used <= seen
            && first <= seen
            && i32::try_from(seen).is_ok()
            && turn < policy.grace().max(1)
            && self.places.chunks_exact(len).all(each_once)
            && self.token_pos.iter().all(|&position| position >= -1 && i64::from(position) < seen as i64)
    }
}

fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use super::super::{PolicyOptions, SlotValues, named};
    use super::*;

    #[test]
    fn slots_come_back_as_they_were_and_nonsense_does_not() {
        for name in ["lastrec", "h2o", "qh2o-vlen"] {
            let grace_period = if name == "lastrec" { 0 } else { 3 };
            let policy = named(name, &PolicyOptions { grace_period, ..PolicyOptions::default() }).unwrap();
            let mut slots = LayerSlots::new(&*policy, 2, 12).unwrap();
            for rows in [7, 5, 2, 1, 1, 3] {
                let plan = slots.plan(&*policy, rows).unwrap();
                let numbers: Vec<f32> = (0..24).map(|n| ((n * 7 + rows) % 11) as f32).collect();
                let values = SlotValues { lengths: &numbers[..2 * rows], errors: &numbers[2..][..2 * rows] };
                slots.commit(&*policy, &plan, &numbers, values).unwrap();
            }
            let mut bytes = Vec::new();
            slots.write_to(&mut bytes);
            let read = |bytes: &[u8]| {
                let mut rest = bytes;
                LayerSlots::read_from(&*policy, 2, 12, &mut rest).map(|slots| (slots, rest.len()))
            };
            assert_eq!(read(&bytes), Some((slots, 0)), "{name}");
            assert_eq!(read(&bytes[..bytes.len() - 1]), None, "{name}: a byte is missing");
            bytes[0] = 13;
            assert_eq!(read(&bytes), None, "{name}: more slots in use than there are");
        }
    }
}
