//! The host store: histories on disk that survive restarts, crashes and full disks.
//!
//! What the caches above see is the [`Store`] trait; [`DiskStore`] is the one on disk, whose files `sdk/docs/store.md`
//! describes, [`HostStore`] one in host memory that can stand above it.

mod chain;
mod compact;
#[doc(hidden)]
pub mod disk;
mod disk_store;
mod format;
mod host;
#[doc(hidden)]
pub mod index;
mod inner;
mod open;
mod options;
mod persistent;
mod queue;
mod recover;
mod ticket;
mod writer;

#[cfg(test)]
mod tests;

use crate::error::Result;

pub(crate) use crate::checksum::xxh3 as checksum;
pub use disk_store::{CheckReport, DiskStore, Stats};
pub use host::HostStore;
pub use options::{Durability, StoreOptions};
pub use ticket::Ticket;

/// The names of what lies in a store's folder beside the segments.
const LOCK: &str = "LOCK";
const INDEX: &str = "index";

/// Whose history, computed by what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// A number that stands for the model's version and the shape of its keys and values: another version never sees
    /// the entries of this one.
    pub space: u64,
    /// The user.
    pub user: u64,
}

/// A piece of one user's history, to be stored.
#[derive(Clone, Debug)]
pub struct Record {
    /// Whose.
    pub key: Key,
    /// Where the history begins now; what is stored of earlier positions leaves.
    pub history_start: u64,
    /// The position of the first token in here. Stored tokens from this position on are replaced by these.
    pub start: u64,
    /// How many tokens there are.
    pub tokens: u32,
    /// How many layers `data` has.
    pub layers: u32,
    /// What the owner wants to know of this piece without reading it; at most 64 KiB.
    pub tag: Vec<u8>,
    /// The layers one after the other, each as long as the others.
    pub data: Vec<u8>,
}

/// A piece of a stored history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The position of its first token.
    pub start: u64,
    /// How many tokens it has.
    pub tokens: u32,
    /// Bytes of its data, all layers together.
    pub bytes: u64,
    /// A number that no other piece of this store ever had.
    pub id: u64,
}

/// What a store has of one user, at one moment. The pieces stay readable while this lives, whatever is written, removed
/// or compacted meanwhile.
pub trait History: Send + Sync {
    /// The position of the first token. It may lie inside the first piece.
    fn start(&self) -> u64;

    /// The position after the last token.
    fn end(&self) -> u64;

    /// The pieces, in order of position and without gaps.
    fn pieces(&self) -> &[Piece];

    /// The tag of a piece, checked.
    fn tag(&self, piece: usize) -> Result<Vec<u8>>;

    /// The bytes of one layer of a piece, checked: all of its tokens, also those before `start`. What fails its checksum
    /// or can not be read is an error, and the store has dropped it and what follows it when this returns.
    fn layer(&self, piece: usize, layer: u32) -> Result<&[u8]>;
}

/// Whether a write may wait for room in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// Wait for it.
    Wait,
    /// Refuse the write with CAPACITY.
    OrRefuse,
}

/// A place for histories.
///
/// A write is visible to [`Store::find`] and [`Store::history`] as soon as the call returns, and as durable as the store
/// promises when its [`Ticket`] says so.
pub trait Store: Send + Sync {
    /// Takes a space for one cache alone; false if another has it.
    fn claim(&self, space: u64) -> bool;

    /// Gives a claimed space back.
    fn release(&self, space: u64);

    /// Where a user's stored history begins and ends, and in how many pieces it lies; `None` if nothing is stored.
    fn find(&self, key: Key) -> Option<Found>;

    /// A user's stored history, to be read. Marks the user as used.
    fn history(&self, key: Key) -> Option<Box<dyn History>>;

    /// Queues a piece for writing. It begins at its own `history_start`, and so replaces everything, or the store has
    /// everything from there to where it begins; otherwise it is refused with INVALID_ARGUMENT.
    fn write(&self, record: Record, room: Room) -> Result<Ticket>;

    /// Queues the removal of a user's tokens from a position on; 0 removes the user. Never refused for want of room.
    fn cut(&self, key: Key, from: u64) -> Result<Ticket>;

    /// The users of a space, in no order.
    fn users(&self, space: u64) -> Vec<u64>;

    /// The most bytes of data that a record should have: enough to be written and read at full speed.
    fn record_bytes(&self) -> usize {
        16 << 20
    }

    /// Waits until everything queued before is as durable as the store promises, and says whether any of it failed since
    /// the last flush.
    fn flush(&self) -> Result<()>;
}

/// Where a stored history begins and ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The position of the first token.
    pub start: u64,
    /// The position after the last token.
    pub end: u64,
    /// The pieces, in order of position and without gaps; the first may begin before `start`.
    pub pieces: Vec<Piece>,
}
