//! Handles: what C callers hold instead of pointers.
//!
//! A handle is a number dressed as a pointer: the kind of object, a place in that kind's table, and how often the place
//! has been used. It is never dereferenced, so a freed, forged or mixed-up handle is found out by comparing
//! numbers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result, Status};
use crate::metrics;
use crate::sync::RwLock;

/// What C callers can hold a handle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    // Not small numbers, so that little of what a stray integer or a pointer holds looks like a kind.
    Error = 0xE1,
    Model = 0xA3,
    Tensor = 0xB5,
    Cancel = 0xC9,
    Store = 0xD6,
    KvCache = 0x9A,
    KvLease = 0x8E,
    Embedding = 0xF2,
    Engine = 0x75,
    Generator = 0x6B,
    GenerateResponse = 0x5D,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Error,
        Self::Model,
        Self::Tensor,
        Self::Cancel,
        Self::Store,
        Self::KvCache,
        Self::KvLease,
        Self::Embedding,
        Self::Engine,
        Self::Generator,
        Self::GenerateResponse,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Error => "pagoda_error",
            Self::Model => "pagoda_model",
            Self::Tensor => "pagoda_tensor",
            Self::Cancel => "pagoda_cancel",
            Self::Store => "pagoda_store",
            Self::KvCache => "pagoda_kv_cache",
            Self::KvLease => "pagoda_kv_lease",
            Self::Embedding => "pagoda_embeddings",
            Self::Engine => "pagoda_engine",
            Self::Generator => "pagoda_generator",
            Self::GenerateResponse => "pagoda_generate_response",
        }
    }
}

/// An object that C callers hold.
pub(super) trait Object: Send + Sync + Sized + 'static {
    /// The type that stands for it in the header.
    type C;
    const KIND: Kind;

    fn table() -> &'static Table<Self>;

    /// Gives it a handle.
    fn insert(self: Arc<Self>) -> Result<*mut Self::C> {
        Ok(std::ptr::without_provenance_mut(Self::table().insert(Self::KIND, self)?))
    }

    /// The object behind the handle that was passed as `argument`.
    fn get(handle: *const Self::C, argument: &str) -> Result<Arc<Self>> {
        Self::table().get(Self::KIND, handle.addr()).map_err(|wrong| wrong.error(Self::KIND, handle.addr(), argument))
    }

    /// Takes a handle back. The object lives on while a run uses it. NULL is fine.
    fn remove(handle: *mut Self::C, argument: &str) -> Result<()> {
        if handle.is_null() {
            return Ok(());
        }
        let removed = Self::table().remove(Self::KIND, handle.addr());
        // Dropped here, after the table is unlocked: a release callback may call back into Pagoda.
        removed.map(drop).map_err(|wrong| wrong.error(Self::KIND, handle.addr(), argument))
    }
}

/// How many handles are held, of every kind together.
pub(super) fn live() -> usize {
    LIVE.iter().map(|count| count.load(Ordering::Relaxed)).sum()
}

/// Tells the metrics how many handles of each kind are held.
pub(super) fn report_live() {
    for (kind, count) in Kind::ALL.into_iter().zip(&LIVE) {
        metrics::live_objects(kind.name(), count.load(Ordering::Relaxed));
    }
}

static LIVE: [AtomicUsize; Kind::ALL.len()] = [const { AtomicUsize::new(0) }; Kind::ALL.len()];

fn live_of(kind: Kind) -> &'static AtomicUsize {
    &LIVE[Kind::ALL.iter().position(|&other| other == kind).expect("ALL has every kind")]
}

/// The objects of one kind.
pub(super) struct Table<T> {
    slots: RwLock<Slots<T>>,
}

struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    /// Counts the uses of this place; a handle from an earlier use has a smaller number.
    generation: u32,
    object: Option<Arc<T>>,
}

/// Why a number is not a handle of a kind.
#[derive(Debug, PartialEq, Eq)]
enum Wrong {
    Null,
    Kind(Kind),
    Freed,
    Forged,
}

impl Wrong {
    fn error(self, expected: Kind, token: usize, argument: &str) -> Error {
        let expected = expected.name();
        let message = match self {
            Self::Null => format!("NULL, where a {expected} is needed"),
            Self::Kind(kind) => format!("this is a {}, where a {expected} is needed", kind.name()),
            Self::Freed => format!("this {expected} was freed already"),
            Self::Forged => format!("{token:#x} is not a handle that Pagoda gave out; a {expected} is needed"),
        };
        Error::new(Status::InvalidHandle, message).about(argument)
    }
}

/// The three parts of a handle need all 64 bits.
const _: () = assert!(usize::BITS == 64);
const INDEX_BITS: u32 = 24;
const MAX_OBJECTS: usize = 1 << INDEX_BITS;
/// Where the count of uses begins. Its highest bit makes a handle a number that is no address: a caller's garbage
/// collector that takes it for a pointer finds nothing there.
const FIRST_GENERATION: u32 = 1 << 31;

fn token(kind: Kind, index: u32, generation: u32) -> usize {
    (generation as usize) << 32 | (index as usize) << 8 | kind as usize
}

fn decode(kind: Kind, token: usize) -> Result<(usize, u32), Wrong> {
    if token == 0 {
        return Err(Wrong::Null);
    }
    match Kind::ALL.into_iter().find(|&known| known as usize == token & 0xFF) {
        Some(found) if found == kind => Ok((token >> 8 & (MAX_OBJECTS - 1), (token >> 32) as u32)),
        // Only a real handle of the other kind has a generation; anything else is a stray number.
        Some(found) if (token >> 32) as u32 >= FIRST_GENERATION => Err(Wrong::Kind(found)),
        _ => Err(Wrong::Forged),
    }
}

impl<T> Table<T> {
    pub(super) const fn new() -> Self {
        Self { slots: RwLock::new(Slots { slots: Vec::new(), free: Vec::new() }) }
    }

    fn insert(&self, kind: Kind, object: Arc<T>) -> Result<usize> {
        let mut table = self.slots.write();
        let index = match table.free.pop() {
            Some(index) => index,
            None if table.slots.len() == MAX_OBJECTS => {
                let message = format!("{MAX_OBJECTS} handles of {} are held: free some", kind.name());
                return Err(Error::new(Status::Capacity, message));
            }
            None => {
                table.slots.push(Slot { generation: FIRST_GENERATION, object: None });
                (table.slots.len() - 1) as u32
            }
        };
        let slot = &mut table.slots[index as usize];
        slot.object = Some(object);
        live_of(kind).fetch_add(1, Ordering::Relaxed);
        Ok(token(kind, index, slot.generation))
    }

    fn get(&self, kind: Kind, token: usize) -> Result<Arc<T>, Wrong> {
        let (index, generation) = decode(kind, token)?;
        let table = self.slots.read();
        let slot = table.slots.get(index).ok_or(Wrong::Forged)?;
        match &slot.object {
            Some(object) if slot.generation == generation => Ok(Arc::clone(object)),
            _ => Err(slot.explain(generation)),
        }
    }

    fn remove(&self, kind: Kind, token: usize) -> Result<Arc<T>, Wrong> {
        let (index, generation) = decode(kind, token)?;
        let mut table = self.slots.write();
        let slot = table.slots.get_mut(index).ok_or(Wrong::Forged)?;
        if slot.generation != generation || slot.object.is_none() {
            return Err(slot.explain(generation));
        }
        let object = slot.object.take().expect("checked above");
        slot.generation = slot.generation.wrapping_add(1);
        // A place whose count has run out is not used again: an old handle must never become valid.
        if slot.generation != 0 {
            table.free.push(index as u32);
        }
        live_of(kind).fetch_sub(1, Ordering::Relaxed);
        Ok(object)
    }
}

impl<T> Slot<T> {
    fn explain(&self, generation: u32) -> Wrong {
        let used_before = generation >= FIRST_GENERATION && (self.generation == 0 || generation < self.generation);
        if used_before { Wrong::Freed } else { Wrong::Forged }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_good_until_it_is_freed() {
        let table = Table::new();
        let first = table.insert(Kind::Tensor, Arc::new(1)).unwrap();
        assert_eq!(first >> 63, 1, "an address");
        assert_eq!(*table.get(Kind::Tensor, first).unwrap(), 1);
        assert_eq!(*table.remove(Kind::Tensor, first).unwrap(), 1);
        assert_eq!(table.get(Kind::Tensor, first).unwrap_err(), Wrong::Freed);
        assert_eq!(table.remove(Kind::Tensor, first).unwrap_err(), Wrong::Freed);
        // The place is used again, and the old handle does not reach the new object.
        let second = table.insert(Kind::Tensor, Arc::new(2)).unwrap();
        assert_ne!(first, second);
        assert_eq!(table.get(Kind::Tensor, first).unwrap_err(), Wrong::Freed);
        assert_eq!(*table.get(Kind::Tensor, second).unwrap(), 2);
    }

    #[test]
    fn strangers_are_told_apart() {
        let table = Table::new();
        let tensor = table.insert(Kind::Tensor, Arc::new(())).unwrap();
        assert_eq!(table.get(Kind::Tensor, 0).unwrap_err(), Wrong::Null);
        assert_eq!(table.get(Kind::Model, tensor).unwrap_err(), Wrong::Kind(Kind::Tensor));
        for forged in [1, 8, 0xdead_beef, usize::MAX, tensor + (1 << 32), tensor + (1 << 8), tensor & 0xFFFF_FFFF] {
            assert_eq!(table.get(Kind::Tensor, forged).unwrap_err(), Wrong::Forged, "{forged:#x}");
        }
        assert!(table.get(Kind::Tensor, (&raw const table).addr()).is_err());
    }

    #[test]
    fn a_place_whose_count_runs_out_is_retired() {
        let table = Table::new();
        let first = table.insert(Kind::Tensor, Arc::new(())).unwrap();
        table.remove(Kind::Tensor, first).unwrap();
        table.slots.write().slots[0].generation = u32::MAX;
        let last = table.insert(Kind::Tensor, Arc::new(())).unwrap();
        table.remove(Kind::Tensor, last).unwrap();
        assert_eq!(table.get(Kind::Tensor, last).unwrap_err(), Wrong::Freed);
        let next = table.insert(Kind::Tensor, Arc::new(())).unwrap();
        assert_eq!(decode(Kind::Tensor, next).unwrap().0, 1);
    }
}
