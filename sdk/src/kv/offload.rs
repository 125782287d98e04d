//! Hands histories to the store, with the hashes that are stored beside them.

use super::options::{Edited, Offload};
use super::table::Entry;
use super::{Inner, Owners};
use crate::error::{Error, Result, Status};
use crate::store::{Found, History, Owner, Piece, Record, Room, Ticket};

/// The most pages of one record: the hashes of this many fit into its tag.
const RECORD_PAGES: usize = 4096;

/// A history as it was at one moment. Its pages stay its own while it is copied.
struct Snapshot {
    owner: Owner,
    start: u64,
    tokens: u32,
    pages: Vec<u32>,
    hashes: Vec<u64>,
    end_hash: u64,
    edits: u32,
}

/// What was handed to the store.
pub(super) struct Saved {
    owner: Owner,
    /// The position after the last token.
    end: u64,
    /// How often the history was edited before.
    edits: u32,
    tickets: Vec<Ticket>,
    /// Whether anything had to be written.
    written: bool,
}

/// An owner that is marked as copying. Removes the mark when it is dropped, also by a panic in a store.
pub(super) struct Copying<'a> {
    pub(super) inner: &'a Inner,
    pub(super) owner: Owner,
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.inner.table.lock(self.owner).change(self.owner, |entry| entry.copying = false);
    }
}

impl Inner {
    pub(super) fn offload(&self, owners: Owners<'_>) -> Result<usize> {
        if self.store.is_none() {
            let message = "this cache has no store to offload to: open it with one";
            return Err(Error::new(Status::Unsupported, message));
        }
        let all;
        let owners = match owners {
            Owners::These(owners) => owners,
            Owners::All => {
                all = self.table.owners();
                &all
            }
        };
        let (mut saved, mut failed) = (Vec::new(), Vec::new());
        // All owners, also after an error: it may concern one history alone.
        for &owner in owners {
            match self.save(owner, Room::Wait) {
                Ok(some) => saved.extend(some),
                Err(error) => failed.push(error),
            }
        }
        let written = saved.iter().filter(|saved| saved.written).count();
        let waited = self.wait_for(&saved);
        let Some(error) = failed.first() else { return waited.map(|()| written) };
        let message = format!("{} of {} owners could not be stored: {}", failed.len(), owners.len(), error.message());
        Err(Error::new(error.status(), message))
    }

    /// Hands what is not stored yet of an owner's history to the store. `None` if nothing is in the pool that the store
    /// did not give.
    fn save(&self, owner: Owner, room: Room) -> Result<Option<Saved>> {
        let mut locked = self.table.lock(owner).wait_while(owner, |entry| entry.copying || entry.leaving);
        // What is loading comes from the store.
        let Some(_) = locked.get(owner).filter(|entry| entry.tokens > 0 && entry.loading.is_none() && !entry.failed)
        else {
            return Ok(None);
        };
        locked.change(owner, |entry| entry.copying = true);
        drop(locked);
        self.save_copying(Copying { inner: self, owner }, room).map(Some)
    }

    /// As [`Inner::save`], of an owner that is marked as copying; removes the mark.
    pub(super) fn save_copying(&self, copying: Copying<'_>, room: Room) -> Result<Saved> {
        let owner = copying.owner;
        let snapshot = self.snapshot(owner);
        let saved = self.write(&snapshot, room)?;
        // A commit may have made it longer meanwhile; every other change waits for the copy.
        self.table.lock(owner).change(owner, |entry| entry.saved = entry.cached().end() == saved.end);
        Ok(saved)
    }

    /// As [`Inner::save`], of an owner that is marked as leaving; does nothing with [`Offload::ByHand`].
    pub(super) fn save_leaving(&self, owner: Owner, room: Room) -> Result<()> {
        if self.offload == Offload::ByHand || self.store.is_none() {
            return Ok(());
        }
        self.write(&self.snapshot(owner), room).map(drop)
    }

    fn snapshot(&self, owner: Owner) -> Snapshot {
        let locked = self.table.lock(owner);
        Snapshot::new(owner, locked.get(owner).expect("an owner that is marked is in the table"))
    }

    /// Waits until what was saved is as durable as the store promises.
    pub(super) fn wait_for(&self, saved: &[Saved]) -> Result<()> {
        Ticket::wait_all(saved.iter().flat_map(|saved| &saved.tickets))?;
        for Saved { owner, end, edits, .. } in saved.iter().filter(|saved| !saved.written) {
            // Another call has written it; the store knows whether that went well.
            let is_lost = self.found(*owner).is_none_or(|found| found.end < *end);
            if is_lost && !self.was_edited(*owner, *edits) {
                let message = format!("owner {owner} is in the store no more, or could not be written: see the log");
                return Err(Error::new(Status::Io, message));
            }
        }
        Ok(())
    }

    /// Whether a commit has removed a part of the history since: then the store has done so, too.
    fn was_edited(&self, owner: Owner, edits: u32) -> bool {
        self.table.lock(owner).get(owner).is_some_and(|entry| entry.edits != edits)
    }

    /// Writes a snapshot; once more in whole if what is stored went while it was copied.
    fn write(&self, snapshot: &Snapshot, room: Room) -> Result<Saved> {
        match self.write_from(snapshot, room, self.found(snapshot.owner)) {
            Err(error) if error.status() == Status::InvalidArgument => self.write_from(snapshot, room, None),
            result => result,
        }
    }

    fn write_from(&self, snapshot: &Snapshot, room: Room, found: Option<Found>) -> Result<Saved> {
        let store = self.store.as_ref().expect("a cache that saves has a store");
        let Snapshot { owner, start, tokens, edits, ref pages, .. } = *snapshot;
        let end = start + u64::from(tokens);
        let page_size = u64::from(self.shape.page_size);
        let most = (store.record_bytes() / self.shape.page_bytes()).clamp(1, RECORD_PAGES) as u64 * page_size;
        let mut at = first_to_write(found, start, end, most);
        let written = at < end;
        let mut tickets = Vec::new();
        if !written {
            // What is stored may still be queued: removing what comes after it is done when that is.
            tickets.push(store.cut(self.key(owner), end)?);
        }
        while at < end {
            // Records end where pages do, so that the hash there is known.
            let to = ((at - start) / page_size * page_size + start + most).min(end);
            let count = (to - at) as usize;
            let mut data = Vec::with_capacity(2 * self.shape.layers as usize * count * self.shape.row_bytes());
            for layer in 0..self.shape.layers {
                // SAFETY: the tokens are below the owner's length, and the owner is marked as copying or leaving, so its
                // pages stay its own.
                unsafe { self.pool.read(layer, pages, (at - start) as usize, count, &mut data) }?;
            }
            let record = Record {
                key: self.key(owner),
                history_start: start,
                start: at,
                tokens: count as u32,
                layers: self.shape.layers,
                tag: if self.rules.edited == Edited::Unnoticed { Vec::new() } else { snapshot.tag(at, to, page_size) },
                data,
            };
            tickets.push(store.write(record, room)?);
            at = to;
        }
        Ok(Saved { owner, end, edits, tickets, written })
    }
}

impl Snapshot {
    fn new(owner: Owner, entry: &Entry) -> Self {
        Self {
            owner,
            start: entry.start,
            tokens: entry.tokens,
            pages: entry.pages.to_vec(),
            hashes: entry.hashes.clone(),
            end_hash: entry.end_hash,
            edits: entry.edits,
        }
    }

    /// How many tokens there are from `from` to before `to`, the hashes where pages begin among them, and the one at `to`.
    fn tag(&self, from: u64, to: u64, page_size: u64) -> Vec<u8> {
        let first = (from - self.start).div_ceil(page_size) as usize;
        let last = (to - self.start).div_ceil(page_size) as usize;
        let end = self.hashes.get(last).copied().unwrap_or(self.end_hash);
        let numbers = [to - from].into_iter().chain(self.hashes[first..last].iter().copied()).chain([end]);
        numbers.flat_map(u64::to_le_bytes).collect()
    }
}

/// The hashes of a stored history: where each page begins, and at the end.
pub(super) fn hashes(history: &dyn History, page_size: u32) -> Result<(Vec<u64>, u64)> {
    let (start, page_size) = (history.start(), u64::from(page_size));
    let (mut all, mut end) = (Vec::new(), None);
    for (index, piece) in history.pieces().iter().enumerate() {
        let tag = history.tag(index)?;
        let numbers: Vec<u64> = tag.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        // Pages of the first piece that have left the history, and those of any that begin before the next piece does.
        let gone = (start.saturating_sub(piece.start) / page_size) as usize;
        let to = piece.start + u64::from(piece.tokens);
        let wanted = ((to - start).div_ceil(page_size) as usize).saturating_sub(all.len());
        let hash = numbers.get(1 + gone + wanted).copied();
        all.extend(numbers.iter().skip(1 + gone).take(wanted));
        // Where less of a piece counts than was written, the hash is known where a page begins.
        let known = numbers.first() == Some(&piece.tokens.into()) || (to - start).is_multiple_of(page_size);
        end = hash.filter(|_| known);
        if end.is_none() {
            return Err(Error::new(Status::Internal, format!("the tag of its piece {index} does not fit it")));
        }
    }
    let end = end.ok_or_else(|| Error::new(Status::Internal, "it has no pieces"))?;
    Ok((all, end))
}

/// From which position on a history that ends at `end` is to be written: what is not stored yet, and the last pieces
/// before it as long as they are no larger than what is written anyhow. So a history that grows token by token lies in few
/// pieces, each larger than all that follow, and each token is written a few times at most.
fn first_to_write(found: Option<Found>, start: u64, end: u64, most: u64) -> u64 {
    let Some(found) = found.filter(|found| found.start <= start && found.end > start && found.end <= end) else {
        return start;
    };
    if found.end == end {
        return end;
    }
    let mut from = found.end;
    for Piece { start: piece, tokens, .. } in found.pieces.into_iter().rev() {
        let tokens = u64::from(tokens);
        if tokens >= most || tokens > end - from || piece < start {
            break;
        }
        from = piece;
    }
    from
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_that_grows_token_by_token_lies_in_few_pieces() {
        let mut pieces: Vec<Piece> = Vec::new();
        let mut written = 0;
        for end in 1..=4096_u64 {
            let found = (end > 1).then(|| Found { start: 0, end: end - 1, pieces: pieces.clone() });
            let from = first_to_write(found, 0, end, 1 << 20);
            pieces.retain(|piece| piece.start < from);
            pieces.push(Piece { start: from, tokens: (end - from) as u32, bytes: 0, id: end });
            written += end - from;
            assert_eq!(pieces.iter().map(|piece| u64::from(piece.tokens)).sum::<u64>(), end);
            assert!(pieces.len() <= 13, "{} pieces for {end} tokens", pieces.len());
        }
        assert!(written <= 4096 * 8, "{written} tokens were written");
    }

    #[test]
    fn what_is_stored_is_not_written_again() {
        let found = |start, end| {
            Some(Found { start, end, pieces: vec![Piece { start, tokens: (end - start) as u32, bytes: 0, id: 1 }] })
        };
        assert_eq!(first_to_write(found(0, 100), 0, 100, 1000), 100);
        assert_eq!(first_to_write(found(0, 100), 64, 110, 1000), 100);
        assert_eq!(first_to_write(found(0, 100), 0, 110, 1000), 100, "the new tokens are fewer than the old ones");
        assert_eq!(first_to_write(found(0, 10), 0, 110, 1000), 0, "the old tokens are fewer than the new ones");
        assert_eq!(first_to_write(None, 5, 100, 1000), 5);
        // Stored, but of another time.
        assert_eq!(first_to_write(found(0, 50), 50, 100, 1000), 50);
        assert_eq!(first_to_write(found(8, 50), 0, 100, 1000), 0);
        assert_eq!(first_to_write(found(0, 120), 0, 100, 1000), 0);
    }
}
