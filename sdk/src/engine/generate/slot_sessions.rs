//! Sessions whose keys and values have a fixed number of slots: what is kept of them between their turns, in memory and in a store.
//!
//! Slots are overwritten, so such a session is no history that grows. It is stored as a list: all slots, then of each turn those
//! that it has written, with the state of the policy. A turn is written behind the others, so that a crash leaves them as they were;
//! a turn that is not complete does not count. When the turns take more bytes than the slots, all slots are written again, and with
//! the turn after that what is before them is dropped. So the last turn but one is there in any case: a turn that was stored, and
//! whose answer did not arrive, can be sent again.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::open_model::OpenModel;
use super::policy::{ChosenPolicy, OpenPolicy, Slots};
use super::sequence::Sequence;
use super::slot_image::{Change, SlotImage, Stored};
use crate::error::{Error, Result, Status};
use crate::kv::policy::LayerSlots;
use crate::kv::{KvCache, KvRequest, Owner};
use crate::store::{Found, Key, Record, Room, Space, Store, Ticket};

/// The sessions of a generator with a policy.
pub(super) struct SlotSessions {
    kept: HashMap<Owner, Kept>,
    tiers: Option<Tiers>,
}

/// Where sessions are stored.
struct Tiers {
    store: Arc<dyn Store>,
    space: Space,
}

/// A session whose slots are in the pool, between two turns.
struct Kept {
    slots: Slots,
    /// The item of the last token that was computed: it stands for all of them.
    item: u64,
    stored: Stored,
}

impl SlotSessions {
    /// For a generator with a store, or without.
    ///
    /// # Errors
    /// BUSY if another generator has the same sessions.
    pub(super) fn open(model: &OpenModel) -> Result<Self> {
        let Some((store, space)) = tier(model) else { return Ok(Self { kept: HashMap::new(), tiers: None }) };
        if !store.claim(space) {
            let message = "another generator of this model and policy uses the store: share it, or free it first";
            return Err(Error::new(Status::Busy, message).about("options.store"));
        }
        Ok(Self { kept: HashMap::new(), tiers: Some(Tiers { store: Arc::clone(store), space }) })
    }

    /// Gives a sequence the slots of its session, as far as its tokens continue what is in them, or free ones. Returns false if
    /// what is in the pool of its owner can not be removed now.
    pub(super) fn resume(&mut self, model: &OpenModel, policy: &OpenPolicy, sequence: &mut Sequence) -> bool {
        let kv = &model.kv;
        let in_pool = kv.lookup(&[sequence.owner])[0].length as usize;
        sequence.stored = Stored::default();
        if let Some(Kept { slots, item, stored }) = self.kept.remove(&sequence.owner)
            && slots.used() == in_pool
            && continues(sequence, &slots, item)
        {
            (sequence.cached, sequence.slots, sequence.stored) = (slots.seen(), Some(slots), stored);
            return true;
        }
        let Some(chosen) = sequence.policy.clone() else { return true };
        sequence.slots = policy.slots(&chosen).ok();
        if in_pool > 0 && kv.forget(sequence.owner, &mut Vec::new()).is_err() {
            return false;
        }
        let loaded = self
            .tiers
            .as_ref()
            .filter(|_| sequence.is_session)
            .map(|tiers| tiers.load(model, policy, &chosen, sequence));
        match loaded {
            Some(Ok(Some((slots, stored)))) => {
                (sequence.cached, sequence.slots, sequence.stored) = (slots.seen(), Some(slots), stored);
            }
            Some(Err(error)) => log::warn!("a session is computed anew, since it can not be read: {error}"),
            _ => {}
        }
        true
    }

    /// Keeps the slots of a session whose turn has ended. Returns what to wait for until they are stored.
    pub(super) fn keep(&mut self, model: &OpenModel, sequence: &mut Sequence) -> Result<Vec<Ticket>> {
        // Those of sessions that were evicted are of no use.
        self.kept.retain(|&owner, _| model.kv.lookup(&[owner])[0].length > 0);
        let Some(slots) = sequence.slots.take().filter(|slots| slots.seen() > 0) else { return Ok(Vec::new()) };
        let item = sequence.items.get()[slots.seen() - 1];
        let mut stored = std::mem::take(&mut sequence.stored);
        let tickets = match &self.tiers {
            Some(tiers) => tiers.save(model, sequence.owner, &slots, item, &mut stored),
            None => Ok(Vec::new()),
        };
        if tickets.is_err() {
            stored = Stored::default();
        }
        self.kept.insert(sequence.owner, Kept { slots, item, stored });
        tickets
    }
}

impl Drop for SlotSessions {
    fn drop(&mut self) {
        if let Some(Tiers { store, space }) = &self.tiers {
            store.release(*space);
        }
    }
}

/// The store of a generator with a policy, and the part of it that is the policy's.
fn tier(model: &OpenModel) -> Option<(&Arc<dyn Store>, Space)> {
    let policy = model.policy.as_ref()?;
    Some((model.slot_store.as_ref()?, model.kv.space_of(&policy.kind())))
}

/// Of each owner, whether a session of it is stored.
pub(super) fn stored(model: &OpenModel, owners: &[Owner]) -> Vec<bool> {
    let is_stored =
        |&owner: &Owner| tier(model).is_some_and(|(store, space)| store.find(Key { space, owner }).is_some());
    owners.iter().map(is_stored).collect()
}

/// Removes stored sessions; with `None` all of them. Says how many there were.
pub(super) fn forget(model: &OpenModel, owners: Option<&[Owner]>) -> Result<usize> {
    let Some((store, space)) = tier(model) else { return Ok(0) };
    let all = || store.owners(space);
    let owners = owners.map_or_else(all, <[Owner]>::to_vec);
    let keys = owners.into_iter().map(|owner| Key { space, owner }).filter(|&key| store.find(key).is_some());
    let tickets = keys.map(|key| store.cut(key, 0)).collect::<Result<Vec<_>>>()?;
    Ticket::wait_all(&tickets)?;
    Ok(tickets.len())
}

/// Whether the tokens of a sequence begin with those that are in slots.
fn continues(sequence: &Sequence, slots: &Slots, item: u64) -> bool {
    let is_same = sequence.policy.as_ref().is_some_and(|policy| policy.kind == slots.chosen.kind);
    let seen = slots.seen();
    let items = sequence.cacheable();
    is_same && seen > 0 && seen <= items.len() && items[seen - 1] == item && !sequence.needs_prompt_logits()
}

/// How a list is written: positions in the store count records, and a record has a part of a change.
const LAYERS: u32 = 1;

impl Tiers {
    fn save(
        &self,
        model: &OpenModel,
        owner: Owner,
        slots: &Slots,
        item: u64,
        stored: &mut Stored,
    ) -> Result<Vec<Ticket>> {
        let key = Key { space: self.space, owner };
        let found = self.store.find(key);
        let is_in = |found: &Found| found.start <= stored.start && stored.end <= found.end;
        let is_known = !stored.token_pos.is_empty() && found.as_ref().is_some_and(is_in);
        if !is_known {
            // Something else is there, or nothing. It stays until the next turn.
            *stored = Stored::default();
            (stored.start, stored.end) = found.map_or((0, 0), |found| (found.start, found.end));
        }
        let whole = !is_known || stored.turn_bytes > stored.whole_bytes;
        let known = if whole { &[][..] } else { &stored.token_pos[..] };
        // A turn that was cancelled before its first step.
        if !whole && known.iter().zip(&slots.layers).all(|(known, layer)| known == layer.token_pos()) {
            return Ok(Vec::new());
        }
        let lease = lease(&model.kv, owner, slots.used() as u64, 0)?;
        let mut layers = Vec::with_capacity(model.folder.kv.layers as usize);
        let mut bytes = Vec::new();
        let image = SlotImage::new(model, slots.used());
        for layer in 0..model.folder.kv.layers {
            let at = (layer as usize).min(slots.layers.len() - 1);
            let changed = changed(&slots.layers[at], known.get(at).map_or(&[], Vec::as_slice));
            lease.read_layer(layer, slots.used(), &mut bytes)?;
            layers.push(image.take(&bytes, &changed, slots.layers[at].len()));
        }
        drop(lease);
        let data = Change { whole, item, slots, layers }.to_bytes();
        let count = data.len() as u64;
        let mut tickets = Vec::new();
        let parts: Vec<&[u8]> = data.chunks(self.store.record_bytes().max(1)).collect();
        let first = stored.end;
        for (part, data) in parts.iter().enumerate() {
            let record = Record {
                key,
                history_start: stored.start,
                start: first + part as u64,
                tokens: 1,
                layers: LAYERS,
                tag: [part as u32, parts.len() as u32].iter().flat_map(|number| number.to_le_bytes()).collect(),
                data: data.to_vec(),
            };
            tickets.push(self.store.write(record, Room::Wait)?);
        }
        stored.end = first + parts.len() as u64;
        stored.token_pos = slots.layers.iter().map(|layer| layer.token_pos().to_vec()).collect();
        match whole {
            true => (stored.start, stored.whole_bytes, stored.turn_bytes) = (first, count, 0),
            false => stored.turn_bytes += count,
        }
        Ok(tickets)
    }

    /// The slots of a session that a sequence continues, in the pool; `None` if there are none.
    fn load(
        &self,
        model: &OpenModel,
        open: &OpenPolicy,
        chosen: &Arc<ChosenPolicy>,
        sequence: &Sequence,
    ) -> Result<Option<(Slots, Stored)>> {
        let key = Key { space: self.space, owner: sequence.owner };
        let changes = self.read(key)?;
        let strange = || Error::new(Status::Internal, "what is stored of it is not of this policy");
        let parse = |change: &Bytes| Change::from_bytes(&change.bytes, open, chosen).map(|it| (it.slots, it.item));
        // The last turn that the sequence continues: it may be one before the last, if that one was never answered, or is edited.
        let Some((last, slots)) = (0..changes.len()).rev().find_map(|at| {
            let (slots, item) = parse(&changes[at])?;
            continues(sequence, &slots, item).then_some((at, slots))
        }) else {
            return Ok(None);
        };
        let Some(first) = changes[..=last].iter().rposition(|change| Change::is_whole(&change.bytes)) else {
            return Ok(None);
        };
        let list = &changes[first..=last];
        let read = list.iter().map(|change| Change::from_bytes(&change.bytes, open, chosen).ok_or_else(strange));
        let read = read.collect::<Result<Vec<_>>>()?;
        let used = slots.used();
        let lease = lease(&model.kv, sequence.owner, 0, used as u32)?;
        let image = SlotImage::new(model, used);
        for layer in 0..model.folder.kv.layers {
            let at = (layer as usize).min(slots.layers.len() - 1);
            let mut bytes = image.empty();
            for change in &read {
                image.put(&mut bytes, change.layers[layer as usize], slots.layers[at].len()).ok_or_else(strange)?;
            }
            lease.write_layer(layer, used, &bytes)?;
        }
        drop(lease.commit()?);
        let stored = Stored {
            start: list[0].positions.start,
            end: list[list.len() - 1].positions.end,
            token_pos: slots.layers.iter().map(|layer| layer.token_pos().to_vec()).collect(),
            whole_bytes: list[0].bytes.len() as u64,
            turn_bytes: list[1..].iter().map(|change| change.bytes.len() as u64).sum(),
        };
        Ok(Some((slots, stored)))
    }

    /// The changes that are complete, in order.
    fn read(&self, key: Key) -> Result<Vec<Bytes>> {
        let Some(history) = self.store.history(key) else { return Ok(Vec::new()) };
        let mut changes = Vec::new();
        let (mut bytes, mut next) = (Vec::new(), 0);
        for (index, piece) in history.pieces().iter().enumerate() {
            let tag = history.tag(index)?;
            let [part, parts] = [0, 1].map(|at| tag.as_chunks().0.get(at).map(|bytes| u32::from_le_bytes(*bytes)));
            if part == Some(0) {
                (bytes, next) = (Vec::new(), 0);
            }
            if part != Some(next) {
                continue;
            }
            bytes.extend_from_slice(history.layer(index, 0)?);
            next += 1;
            if parts == Some(next) {
                let end = piece.start + 1;
                changes.push(Bytes { bytes: std::mem::take(&mut bytes), positions: end - u64::from(next)..end });
            }
        }
        Ok(changes)
    }
}

/// A stored change, and where it is.
struct Bytes {
    bytes: Vec<u8>,
    positions: Range<u64>,
}

/// A hold on the tokens of an owner: to read those that are cached, or to write new ones.
fn lease(kv: &KvCache, owner: Owner, start: u64, tokens: u32) -> Result<crate::kv::KvLease> {
    kv.prepare_for_run(&[KvRequest { owner, start, tokens, ..KvRequest::default() }])
}

/// The slots whose tokens are others than before, of all heads; `before` is empty if none is known.
fn changed(slots: &LayerSlots, before: &[i32]) -> Vec<u32> {
    let is_new = |at: usize, position: i32| position >= 0 && before.get(at) != Some(&position);
    let all = slots.token_pos().iter().enumerate();
    all.filter(|(at, position)| is_new(*at, **position)).map(|(at, _)| at as u32).collect()
}
