//! The host store: histories on disk that survive restarts, crashes and full disks.
//!
//! Caches use the [`Store`] trait. [`DiskStore`] is the one on disk; `sdk/docs/store.md` describes its files.
//! [`HostStore`] is one in host memory, alone or as a tier above another.

mod chain;
mod check_report;
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
mod owner;
mod persistent;
mod queue;
mod recover;
mod sequence_number;
mod ticket;
mod writer;

#[cfg(test)]
mod tests;

use crate::error::Result;

pub use check_report::CheckReport;
pub use disk_store::{DiskStore, StoreStats};
pub use host::HostStore;
pub use options::{Durability, StoreOptions};
pub use owner::Owner;
pub use ticket::Ticket;

/// Names in a store's folder beside the segments.
const LOCK: &str = "LOCK";
const INDEX: &str = "index";

/// A part of a store that one cache claims: a hash of the model's version and of the shape of its keys and values. A
/// version never sees the entries of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Space(pub u64);

/// Whose history it is, and which model computed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Which model.
    pub space: Space,
    /// The owner of the history.
    pub owner: Owner,
}

/// A piece of one owner's history, to be stored.
#[derive(Clone, Debug)]
pub struct Record {
    /// Whose.
    pub key: Key,
    /// Where the history begins from now on; stored tokens at earlier positions are removed.
    pub history_start: u64,
    /// The position of the first token in here. Stored tokens from this position on are replaced by these.
    pub start: u64,
    /// How many tokens there are.
    pub tokens: u32,
    /// How many layers `data` has.
    pub layers: u32,
    /// Bytes of the caller's own, readable without the data; at most 64 KiB.
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
    /// A number that is unique among all pieces this store ever had.
    pub id: u64,
}

/// A snapshot of one owner's history. Its pieces stay readable while it lives, also when they are replaced, removed or
/// compacted meanwhile.
pub trait History: Send + Sync {
    /// The position of the first token. It may lie inside the first piece.
    fn start(&self) -> u64;

    /// The position after the last token.
    fn end(&self) -> u64;

    /// The pieces, in order of position and without gaps.
    fn pieces(&self) -> &[Piece];

    /// The tag of a piece, checked.
    fn tag(&self, piece: usize) -> Result<Vec<u8>>;

    /// The bytes of one layer of a piece, checked: all of its tokens, also those before `start`. If they can not be
    /// read, or the checksum is wrong, this is an error, and the store drops the piece and those after it before this
    /// returns.
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

/// How full a tier under the pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct TierStats {
    /// `host` or `disk`.
    pub name: &'static str,
    /// Bytes that histories have.
    pub used_bytes: u64,
    /// Bytes that it may have; 0: any number.
    pub most_bytes: u64,
}

/// A store of histories.
///
/// A write is visible to [`Store::find`] and [`Store::history`] as soon as the call returns, and as durable as the
/// store promises when its [`Ticket`] says so.
pub trait Store: Send + Sync {
    /// Claims a space for one cache; false if another cache has it.
    fn claim(&self, space: Space) -> bool;

    /// Releases a claimed space.
    fn release(&self, space: Space);

    /// Where an owner's stored history begins and ends, and its pieces; `None` if nothing is stored.
    fn find(&self, key: Key) -> Option<Found>;

    /// An owner's stored history, to be read. Marks the owner as used.
    fn history(&self, key: Key) -> Option<Box<dyn History>>;

    /// Queues a piece for writing. Either it begins at its own `history_start`, and replaces everything, or the store
    /// has all tokens from there to the beginning of the piece. Otherwise it is refused with INVALID_ARGUMENT.
    fn write(&self, record: Record, room: Room) -> Result<Ticket>;

    /// Queues the removal of an owner's tokens from a position on; 0 removes the owner. Never refused for lack of room.
    fn cut(&self, key: Key, from: u64) -> Result<Ticket>;

    /// The owners of a space, in no order.
    fn owners(&self, space: Space) -> Vec<Owner>;

    /// The most bytes of data that a record should have: enough to be written and read at full speed.
    fn record_bytes(&self) -> usize {
        16 << 20
    }

    /// How full its tiers are, the fastest first.
    fn tiers(&self) -> Vec<TierStats> {
        Vec::new()
    }

    /// Waits until everything queued before is as durable as the store promises. An error means that a write since the
    /// last flush failed.
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
