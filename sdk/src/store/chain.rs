//! An owner's history as a chain of pieces, and what each record changes in it.

use super::Piece;
use super::format::{Kind, RecordHeader, total_len};
use super::sequence_number::SequenceNumber;

/// Where a piece is in the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    pub(super) segment: u64,
    pub(super) offset: u64,
}

/// A piece of a chain. It may hold more tokens than are valid: those from the start of the next piece on were replaced,
/// those from the end of the chain on were cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Slot<P> {
    pub(super) seq: SequenceNumber,
    pub(super) start: u64,
    pub(super) tokens: u32,
    pub(super) layers: u32,
    pub(super) layer_bytes: u64,
    pub(super) tag_len: u32,
    pub(super) place: P,
}

impl<P> Slot<P> {
    pub(super) fn total_len(&self) -> u64 {
        total_len(self.layers, self.layer_bytes, self.tag_len)
    }

    fn end(&self) -> u64 {
        self.start + u64::from(self.tokens)
    }

    /// The same piece at another place.
    pub(super) fn at<Q>(&self, place: Q) -> Slot<Q> {
        Slot {
            seq: self.seq,
            start: self.start,
            tokens: self.tokens,
            layers: self.layers,
            layer_bytes: self.layer_bytes,
            tag_len: self.tag_len,
            place,
        }
    }
}

/// What is stored of an owner. There is at least one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chain<P> {
    pub(super) start: u64,
    pub(super) end: u64,
    /// The newest record of the key.
    pub(super) newest: SequenceNumber,
    /// Grows with every use of any owner.
    pub(super) stamp: u64,
    pub(super) slots: Vec<Slot<P>>,
}

/// What a record stores so that recovery can rebuild the chain from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// Of a put: the piece before it. Of a cut: the last piece that is left.
    pub(super) prev_seq: SequenceNumber,
    pub(super) history_start: u64,
}

impl<P> Chain<P> {
    /// How a piece would join a chain; `None` if there would be a gap between `history_start` and the piece.
    pub(super) fn plan_put(chain: Option<&Self>, history_start: u64, start: u64) -> Option<Plan> {
        if start == history_start {
            return Some(Plan { prev_seq: SequenceNumber::NONE, history_start });
        }
        let chain = chain.filter(|chain| chain.start <= history_start && start <= chain.end)?;
        Some(Plan { prev_seq: chain.last_before(start), history_start })
    }

    /// What is left after a cut at `from`, which lies before the chain's end.
    pub(super) fn plan_cut(&self, from: u64) -> Plan {
        let prev_seq = if from <= self.start { SequenceNumber::NONE } else { self.last_before(from) };
        Plan { prev_seq, history_start: self.start }
    }

    fn last_before(&self, position: u64) -> SequenceNumber {
        self.slots.iter().rev().find(|slot| slot.start < position).map_or(SequenceNumber::NONE, |slot| slot.seq)
    }

    /// Joins a piece to a chain as planned. Returns the pieces that were removed.
    pub(super) fn put(chain: Option<Self>, plan: Plan, slot: Slot<P>, stamp: u64) -> (Self, Vec<Slot<P>>) {
        let (start, end, newest) = (plan.history_start, slot.end(), slot.seq);
        let mut slots = chain.map_or_else(Vec::new, |chain| chain.slots);
        let kept = if plan.prev_seq == SequenceNumber::NONE {
            0
        } else {
            slots.partition_point(|piece| piece.start < slot.start)
        };
        let mut removed = slots.split_off(kept);
        slots.push(slot);
        let before = slots.iter().skip(1).take_while(|next| next.start <= start).count();
        removed.extend(slots.drain(..before));
        (Self { start, end, newest, stamp, slots }, removed)
    }

    /// Removes the tokens from `from` on, which lies inside the chain. Returns the pieces that were removed.
    pub(super) fn cut(&mut self, from: u64, seq: SequenceNumber) -> Vec<Slot<P>> {
        self.newest = seq;
        self.end = from;
        self.slots.split_off(self.slots.partition_point(|piece| piece.start < from))
    }

    pub(super) fn slot(&self, seq: SequenceNumber) -> Option<&Slot<P>> {
        self.slots.iter().rev().find(|slot| slot.seq == seq)
    }

    /// The pieces as callers of the store see them.
    pub(super) fn pieces(&self) -> Vec<Piece> {
        let ends = self.slots.iter().skip(1).map(|next| next.start).chain([self.end]);
        let pieces = self.slots.iter().zip(ends).map(|(slot, end)| Piece {
            start: slot.start,
            tokens: (end - slot.start) as u32,
            bytes: u64::from(slot.layers) * slot.layer_bytes,
            id: slot.seq.0,
        });
        pieces.collect()
    }
}

/// A record that is known to be in the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) kind: Kind,
    pub(super) prev_seq: SequenceNumber,
    pub(super) history_start: u64,
    pub(super) slot: Slot<Location>,
}

impl Known {
    pub(super) fn of(header: &RecordHeader) -> Self {
        Self {
            kind: header.kind,
            prev_seq: header.prev_seq,
            history_start: header.history_start,
            slot: Slot {
                seq: header.seq,
                start: header.start,
                tokens: header.tokens,
                layers: header.layers,
                layer_bytes: header.layer_bytes,
                tag_len: header.tag_len,
                place: Location { segment: header.segment, offset: header.offset },
            },
        }
    }

    /// The records of a stored chain, so that later ones can be joined to them.
    pub(super) fn of_chain(chain: &Chain<Location>) -> Vec<Self> {
        let mut prev_seq = SequenceNumber::NONE;
        let mut known: Vec<Self> = Vec::with_capacity(chain.slots.len() + 1);
        for slot in &chain.slots {
            known.push(Self { kind: Kind::Put, prev_seq, history_start: chain.start, slot: slot.clone() });
            prev_seq = slot.seq;
        }
        if chain.newest != prev_seq {
            // The newest record is a cut. Only its number, its position and the piece that it left matter.
            let place = Location { segment: 0, offset: 0 };
            let slot =
                Slot { seq: chain.newest, start: chain.end, tokens: 0, layers: 0, layer_bytes: 0, tag_len: 0, place };
            known.push(Self { kind: Kind::Cut, prev_seq, history_start: chain.start, slot });
        }
        known
    }
}

/// The history that the records of one key make: an empty one, or one whose records are all there. An error means that
/// a record is missing.
pub(super) fn resolve(records: &mut Vec<Known>, stamp: u64) -> Result<Option<Chain<Location>>, Broken> {
    // A crash during a compaction leaves a record twice. The first copy is used.
    records.sort_by_key(|record| record.slot.seq);
    records.dedup_by_key(|record| record.slot.seq);
    let Some(newest) = records.last() else { return Ok(None) };
    let find = |seq: SequenceNumber| {
        let at = records.binary_search_by_key(&seq, |record| record.slot.seq).map_err(|_| Broken)?;
        if records[at].kind == Kind::Put { Ok(&records[at]) } else { Err(Broken) }
    };
    let joined = |before: &Known, position: u64| {
        if before.slot.start < position && position <= before.slot.end() { Ok(()) } else { Err(Broken) }
    };
    let (start, mut at, end) = match newest.kind {
        Kind::Put => (newest.history_start, newest, newest.slot.end()),
        Kind::Cut if newest.prev_seq == SequenceNumber::NONE => return Ok(None),
        Kind::Cut => {
            let last = find(newest.prev_seq)?;
            joined(last, newest.slot.start)?;
            (newest.history_start, last, newest.slot.start)
        }
    };
    let mut slots = vec![at.slot.clone()];
    while at.slot.start > start {
        let before = find(at.prev_seq)?;
        joined(before, at.slot.start)?;
        slots.push(before.slot.clone());
        at = before;
    }
    slots.reverse();
    Ok(Some(Chain { start, end, newest: newest.slot.seq, stamp, slots }))
}

/// A record of the chain is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(seq: u64, start: u64, tokens: u32) -> Slot<Location> {
        let place = Location { segment: 1, offset: seq * 64 };
        Slot { seq: SequenceNumber(seq), start, tokens, layers: 1, layer_bytes: 1, tag_len: 0, place }
    }

    fn put(seq: u64, prev_seq: u64, history_start: u64, start: u64, tokens: u32) -> Known {
        Known { kind: Kind::Put, prev_seq: SequenceNumber(prev_seq), history_start, slot: slot(seq, start, tokens) }
    }

    fn cut(seq: u64, prev_seq: u64, from: u64) -> Known {
        Known { kind: Kind::Cut, prev_seq: SequenceNumber(prev_seq), history_start: 0, slot: slot(seq, from, 0) }
    }

    fn ends(records: &[Known]) -> Result<Option<(u64, u64, Vec<u64>)>, Broken> {
        let chain = resolve(&mut records.to_vec(), 0)?;
        Ok(chain.map(|chain| (chain.start, chain.end, chain.slots.iter().map(|slot| slot.seq.0).collect())))
    }

    #[test]
    fn the_newest_record_decides() {
        let all = [put(1, 0, 0, 0, 10), put(2, 1, 0, 10, 5), put(3, 1, 0, 8, 4), cut(4, 3, 9)];
        assert_eq!(ends(&all[..2]), Ok(Some((0, 15, vec![1, 2]))));
        assert_eq!(ends(&all[..3]), Ok(Some((0, 12, vec![1, 3]))));
        assert_eq!(ends(&all), Ok(Some((0, 9, vec![1, 3]))));
        assert_eq!(ends(&[cut(5, 0, 0)]), Ok(None));
    }

    #[test]
    fn what_the_window_left_behind_may_be_gone_and_nothing_else() {
        let (a, b, c) = (put(1, 0, 0, 0, 10), put(2, 1, 0, 10, 10), put(3, 2, 12, 20, 10));
        assert_eq!(ends(&[b.clone(), c.clone()]), Ok(Some((12, 30, vec![2, 3]))));
        assert_eq!(ends(&[a.clone(), c]), Err(Broken));
        assert_eq!(ends(&[b]), Err(Broken));
        // Before the cut there was a record that replaced tokens of the first. It is lost.
        assert_eq!(ends(&[a, cut(5, 4, 7)]), Err(Broken));
    }

    #[test]
    fn a_stored_chain_stands_for_its_records() {
        let mut records = vec![put(1, 0, 0, 0, 10), put(2, 1, 4, 10, 10), cut(3, 2, 15)];
        records[2].history_start = 4;
        let chain = resolve(&mut records, 7).unwrap().unwrap();
        let mut again = Known::of_chain(&chain);
        assert_eq!(resolve(&mut again, 7).unwrap().unwrap(), chain);
        again.push(put(9, 2, 11, 15, 5));
        let longer = resolve(&mut again, 8).unwrap().unwrap();
        assert_eq!((longer.start, longer.end, longer.slots.len()), (11, 20, 2));
    }
}
