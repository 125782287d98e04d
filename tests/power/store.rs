//! The host store on real files, with its index in sled: acknowledged data survives any loss of power.

use std::collections::HashMap;

use pagoda::StoreOptions;
use pagoda::store::{DiskStore, Key, Owner, Record, Room, Space, Store};
use pagoda_test_support::power::{crash, killed};
use pagoda_test_support::{Folder, Random, times};

use crate::recorder::{Event, Recording};

const OWNERS: u64 = 4;
const TOKENS: u32 = 5;

fn key(owner: u64) -> Key {
    Key { space: Space(7), owner: Owner(owner) }
}

/// The `number`th piece of an owner's history.
fn record(owner: u64, number: u64) -> Record {
    let start = number * u64::from(TOKENS);
    Record {
        key: key(owner),
        history_start: 0,
        start,
        tokens: TOKENS,
        layers: 1,
        tag: Vec::new(),
        data: (start..start + u64::from(TOKENS)).flat_map(|position| (position << 8 | owner).to_le_bytes()).collect(),
    }
}

#[test]
fn power_lost_at_any_moment_of_a_store_on_files() {
    let folder = Folder::new();
    let work = folder.path().join("work");
    std::fs::create_dir_all(&work).unwrap();
    // Small segments, so that the index is synced often.
    let options = StoreOptions { segment_bytes: 4096, garbage_bytes: 4000, ..StoreOptions::default() };
    let recording = Recording::start(&work);
    let mut written = HashMap::<u64, u64>::new();
    let mut random = Random(5);
    for _ in 0..3 {
        let store = DiskStore::open(work.join("store"), &options).unwrap();
        for _ in 0..30 {
            let owner = random.below_u64(OWNERS);
            let number = written.entry(owner).or_default();
            store.write(record(owner, *number), Room::Wait).and_then(|ticket| ticket.wait()).unwrap();
            *number += 1;
            recording.acknowledge(owner << 32 | *number);
        }
        store.compact().unwrap();
    }
    let events = recording.events();
    drop(recording);
    let (mut acknowledged, mut moments) = (HashMap::<u64, u64>::new(), 0);
    for at in 0..=events.len() {
        let told = matches!(at.checked_sub(1).map(|last| &events[last]), Some(Event::Told(_)));
        if let Some(Event::Told(what)) = at.checked_sub(1).map(|last| &events[last]) {
            acknowledged.insert(what >> 32, what & 0xFFFF_FFFF);
        }
        if !random.once_in(if told { times(2, 1) } else { times(12, 4) }) {
            continue;
        }
        for left in [crash(&events[..at], &mut random), killed(&events[..at])] {
            moments += 1;
            let other = Folder::new();
            left.write(other.path());
            let store = DiskStore::open(other.path().join("store"), &options)
                .unwrap_or_else(|error| panic!("after event {at}: does not open: {error}"));
            for (&owner, &number) in &acknowledged {
                check(&store, owner, number * u64::from(TOKENS), at);
            }
        }
    }
    println!("{moments} losses of power within {} events", events.len());
}

fn check(store: &DiskStore, owner: u64, tokens: u64, at: usize) {
    let place = format!("after event {at}: owner {owner}");
    let history = store.history(key(owner)).unwrap_or_else(|| panic!("{place} is gone, with {tokens} tokens"));
    assert!(history.start() == 0 && history.end() >= tokens, "{place} has {} of {tokens} tokens", history.end());
    for (number, piece) in history.pieces().iter().enumerate() {
        let bytes = history.layer(number, 0).unwrap_or_else(|error| panic!("{place}: {error}"));
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let right: Vec<u64> =
            (piece.start..).take(piece.tokens as usize).map(|position| position << 8 | owner).collect();
        assert_eq!(words, right, "{place}");
    }
}
