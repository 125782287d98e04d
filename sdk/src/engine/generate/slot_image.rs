//! What is written of slots: their keys and values, and what a policy knows of them, as bytes.

use std::sync::Arc;

use super::open_model::OpenModel;
use super::policy::{ChosenPolicy, OpenPolicy, Slots};
use crate::kv::policy::LayerSlots;

/// What the store has of a session.
#[derive(Clone, Debug, Default)]
pub(super) struct Stored {
    /// Where the list begins from the next turn on, and where it ends: the next turn is written there.
    pub(super) start: u64,
    pub(super) end: u64,
    /// The positions in the slots of each layer, as they are stored; empty: nothing is.
    pub(super) token_pos: Vec<Vec<i32>>,
    pub(super) whole_bytes: u64,
    pub(super) turn_bytes: u64,
}

/// The first number of every change.
const FORMAT: u32 = 1;

/// Slots that were written, and the state of all of them. `L`: the bytes of a layer, `[count]` slots and their keys and values.
pub(super) struct Change<S, L> {
    /// Whether nothing that came before it counts.
    pub(super) whole: bool,
    /// The item of the last token.
    pub(super) item: u64,
    pub(super) slots: S,
    pub(super) layers: Vec<L>,
}

impl Change<&Slots, Vec<u8>> {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend(u32::from(self.whole).to_le_bytes());
        bytes.extend(self.item.to_le_bytes());
        let kind = self.slots.chosen.kind.as_bytes();
        bytes.extend((kind.len() as u64).to_le_bytes());
        bytes.extend(kind);
        self.slots.layers.iter().for_each(|layer| layer.write_to(&mut bytes));
        for layer in &self.layers {
            bytes.extend((layer.len() as u64).to_le_bytes());
            bytes.extend(layer);
        }
        bytes
    }
}

impl<'a> Change<Slots, &'a [u8]> {
    /// Reads what [`to_bytes`](Change::to_bytes) has written with the same policy. `None` if it is something else.
    pub(super) fn from_bytes(mut bytes: &'a [u8], open: &OpenPolicy, chosen: &Arc<ChosenPolicy>) -> Option<Self> {
        let from = &mut bytes;
        let (format, whole) = (u32::from_le_bytes(take(from)?), u32::from_le_bytes(take(from)?) != 0);
        let item = u64::from_le_bytes(take(from)?);
        let kind = usize::try_from(u64::from_le_bytes(take(from)?)).ok()?;
        let (kind, rest) = from.split_at_checked(kind)?;
        *from = rest;
        if (format, kind) != (FORMAT, chosen.kind.as_bytes()) {
            return None;
        }
        let layer = |len: &usize| LayerSlots::read_from(&*chosen.policy, open.heads, *len, from);
        let layers = open.state_lens().iter().map(layer).collect::<Option<_>>()?;
        let slots = Slots { chosen: Arc::clone(chosen), layers, state: None };
        let mut layers = Vec::new();
        for _ in &open.lens {
            let len = usize::try_from(u64::from_le_bytes(take(from)?)).ok()?;
            let (layer, rest) = from.split_at_checked(len)?;
            layers.push(layer);
            *from = rest;
        }
        from.is_empty().then_some(Self { whole, item, slots, layers })
    }
}

impl Change<(), ()> {
    /// Whether the bytes are of a change that is whole.
    pub(super) fn is_whole(mut bytes: &[u8]) -> bool {
        let from = &mut bytes;
        let numbers = (take(from).map(u32::from_le_bytes), take(from).map(u32::from_le_bytes));
        numbers == (Some(FORMAT), Some(1))
    }
}

fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(*first)
}

/// The layout of a layer: for each tensor of the pool the keys, then the values, `[used, heads, head bytes]`.
pub(super) struct SlotImage {
    used: usize,
    heads: usize,
    head_bytes: Vec<usize>,
}

impl SlotImage {
    pub(super) fn new(model: &OpenModel, used: usize) -> Self {
        Self { used, heads: model.folder.kv.heads as usize, head_bytes: model.kv.head_bytes() }
    }

    /// A layer of zeros.
    pub(super) fn empty(&self) -> Vec<u8> {
        vec![0; 2 * self.used * self.heads * self.head_bytes.iter().sum::<usize>()]
    }

    /// Where the bytes of a head's slot are: in each tensor the key and the value.
    fn places(&self, head: usize, place: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
        let mut before = 0;
        self.head_bytes.iter().flat_map(move |&bytes| {
            let first = before;
            before += 2 * self.used * self.heads * bytes;
            [0, 1].map(move |half| {
                let at = first + ((half * self.used + place) * self.heads + head) * bytes;
                at..at + bytes
            })
        })
    }

    /// The numbers of slots, each `head * len + place`, and their keys and values out of a layer's.
    pub(super) fn take(&self, layer: &[u8], slots: &[u32], len: usize) -> Vec<u8> {
        let each = 2 * self.head_bytes.iter().sum::<usize>();
        let mut bytes = Vec::with_capacity(4 + slots.len() * (4 + each));
        bytes.extend((slots.len() as u32).to_le_bytes());
        slots.iter().for_each(|slot| bytes.extend(slot.to_le_bytes()));
        for &slot in slots {
            let (head, place) = (slot as usize / len, slot as usize % len);
            self.places(head, place).for_each(|place| bytes.extend_from_slice(&layer[place]));
        }
        bytes
    }

    /// Puts what [`take`](Self::take) has taken into a layer. `None` if it is something else.
    pub(super) fn put(&self, layer: &mut [u8], mut bytes: &[u8], len: usize) -> Option<()> {
        let count = u32::from_le_bytes(take(&mut bytes)?) as usize;
        let (slots, mut rest) = bytes.split_at_checked(count.checked_mul(4)?)?;
        for slot in slots.as_chunks().0 {
            let slot = u32::from_le_bytes(*slot) as usize;
            let (head, place) = (slot / len, slot % len);
            if head >= self.heads || place >= self.used {
                return None;
            }
            for place in self.places(head, place) {
                let (from, after) = rest.split_at_checked(place.len())?;
                layer[place].copy_from_slice(from);
                rest = after;
            }
        }
        rest.is_empty().then_some(())
    }
}
