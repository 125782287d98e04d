//! What the campaigns write and how they tell that what comes back is right: every word says whose it is, which
//! version, position and layer.

use pagoda::store::disk::RealClock;
use pagoda::store::index::Index;
use pagoda::store::{DiskStore, Key, Owner, Record, Room, Space, Store, Ticket};
use pagoda::{Result, StoreOptions};
use pagoda_test_support::Random;

use crate::simulated::Simulated;

pub const LAYERS: u32 = 2;
const SPACE: Space = Space(7);

pub fn key(owner: u64) -> Key {
    Key { space: SPACE, owner: Owner(owner) }
}

fn word(owner: u64, version: u64, position: u64, layer: u32) -> u64 {
    (owner << 56 ^ version << 32 ^ position << 8 ^ u64::from(layer)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub fn record(owner: u64, history_start: u64, start: u64, tokens: u32, version: u64) -> Record {
    let positions = start..start + u64::from(tokens);
    let words =
        (0..LAYERS).flat_map(|layer| positions.clone().map(move |position| word(owner, version, position, layer)));
    let data = words.flat_map(u64::to_le_bytes).collect();
    Record { key: key(owner), history_start, start, tokens, layers: LAYERS, tag: version.to_le_bytes().to_vec(), data }
}

/// What is stored of an owner: where it begins and the version of each token; `None` if nothing is.
pub type State = Option<(u64, Vec<u64>)>;

/// The versions of an owner's tokens as the store gives them. Every word is checked: wrong data is a panic, an error is
/// what the store says of data that it can not give.
pub fn read(store: &DiskStore, owner: u64) -> Result<State> {
    let Some(history) = store.history(key(owner)) else { return Ok(None) };
    let mut versions = Vec::new();
    let mut at = history.pieces()[0].start;
    for (number, piece) in history.pieces().iter().enumerate() {
        assert_eq!(piece.start, at, "a gap in the history of owner {owner}");
        at += u64::from(piece.tokens);
        let tag = history.tag(number)?;
        let version = u64::from_le_bytes(tag.try_into().expect("the tag that was written"));
        for layer in 0..LAYERS {
            for (position, chunk) in (piece.start..at).zip(history.layer(number, layer)?.chunks(8)) {
                let wanted = word(owner, version, position, layer).to_le_bytes();
                assert_eq!(chunk, wanted, "wrong data: owner {owner}, position {position}, layer {layer}");
            }
        }
        versions.extend((piece.start..at).filter(|&position| position >= history.start()).map(|_| version));
    }
    assert_eq!(at, history.end());
    Ok(Some((history.start(), versions)))
}

/// What a put makes of a state.
pub fn put(state: &State, history_start: u64, start: u64, tokens: u32, version: u64) -> State {
    let new = vec![version; tokens as usize];
    let Some((first, old)) = state else { return Some((start, new)) };
    let end = first + old.len() as u64;
    assert!(start <= end || start == history_start, "the workload leaves no gaps");
    if start == history_start || start <= *first || history_start >= end {
        return Some((start, new));
    }
    let mut all = old[..(start - first) as usize].to_vec();
    all.extend(new);
    let gone = history_start.saturating_sub(*first);
    Some((first + gone, all.split_off(gone as usize)))
}

/// What a cut makes of a state.
pub fn cut(state: &State, from: u64) -> State {
    let (first, tokens) = state.as_ref()?;
    let left = (from.saturating_sub(*first) as usize).min(tokens.len());
    (left > 0).then(|| (*first, tokens[..left].to_vec()))
}

/// Whether a state is what a cut could leave of another.
pub fn is_beginning(state: &State, of: &State) -> bool {
    match (state, of) {
        (None, _) => true,
        (Some((start, tokens)), Some((first, all))) => start == first && all.starts_with(tokens),
        (Some(_), None) => false,
    }
}

/// Whether a state is what is left of another that lost its beginning, its end or both.
pub fn is_part(state: &State, of: &State) -> bool {
    match (state, of) {
        (None, _) => true,
        (Some((start, tokens)), Some((first, all))) => start
            .checked_sub(*first)
            .and_then(|skipped| all.get(skipped as usize..))
            .is_some_and(|rest| rest.starts_with(tokens)),
        (Some(_), None) => false,
    }
}

/// The states that an owner has gone through.
#[derive(Clone, Debug)]
pub struct Past {
    pub states: Vec<State>,
    /// The newest that was acknowledged.
    pub acknowledged: usize,
    /// Whether the store has said that it lost something of it.
    pub weak: bool,
}

impl Past {
    pub fn new() -> Self {
        Self { states: vec![None], acknowledged: 0, weak: false }
    }

    pub fn now(&self) -> &State {
        self.states.last().expect("there is always one")
    }

    /// Whether a state is one that may be there after `acknowledged` was.
    pub fn allows(&self, state: &State, acknowledged: usize) -> bool {
        let possible = &self.states[acknowledged..];
        possible.contains(state) || self.weak && possible.iter().any(|whole| is_beginning(state, whole))
    }

    /// From now on only this counts.
    pub fn settle(&mut self, state: State) {
        *self = Self { states: vec![state], acknowledged: 0, weak: false };
    }
}

/// One random step for one owner, made both in the store and in its past. Gives its ticket.
pub fn step(store: &DiskStore, owner: u64, past: &mut Past, version: u64, random: &mut Random) -> Result<Ticket> {
    let (first, end) = past.now().as_ref().map_or((0, 0), |(first, tokens)| (*first, first + tokens.len() as u64));
    let span = end - first;
    let tokens = 1 + random.below(14) as u32;
    let (history_start, start) = match random.below(10) {
        0 | 1 => {
            let from = if random.once_in(3) { 0 } else { first + random.below_u64(span + 1) };
            past.states.push(cut(past.now(), from));
            return store.cut(key(owner), from);
        }
        // Replaces a part, or all.
        2 => (first, first + random.below_u64(span + 1)),
        3 => (first, first),
        // Begins anew somewhere else.
        4 => (end + 3, end + 3),
        // A window: old tokens leave.
        5 => (first + random.below_u64(span + 1), end),
        _ => (first, end),
    };
    past.states.push(put(past.now(), history_start, start, tokens, version));
    store.write(record(owner, history_start, start, tokens, version), Room::Wait)
}

pub fn open(disk: &Simulated, index: impl Index + 'static, options: &StoreOptions) -> Result<DiskStore> {
    DiskStore::open_with(Box::new(disk.clone()), Box::new(index), Box::new(RealClock), options)
}
