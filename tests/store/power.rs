//! Loss of power at every moment: what was acknowledged is there, what was cut stays cut, every byte is right.

use std::collections::BTreeMap;

use pagoda::store::{DiskStore, Store};
use pagoda::{Durability, StoreOptions};
use pagoda_test_support::{Random, times};

use crate::simulated::{Event, Recorded, Simulated, Told, crash};
use crate::workload::{Past, key, open, read, step};

const OWNERS: u64 = 5;

#[test]
fn power_lost_at_any_moment() {
    // Segments of a few records, and garbage enough for compactions by themselves.
    let options = StoreOptions { segment_bytes: 4096, garbage_bytes: 6000, ..StoreOptions::default() };
    for seed in [1, 2] {
        campaign(seed, 45, &options, 3);
    }
}

#[test]
fn power_lost_while_users_leave_to_make_room() {
    let options =
        StoreOptions { segment_bytes: 4096, max_bytes: 6000, garbage_bytes: 1 << 40, ..StoreOptions::default() };
    let evicted = campaign(3, 40, &options, 2);
    assert!(evicted > 3, "{evicted} owners left");
}

/// Plays a script once, then looks at what every moment of it could leave on the disk. Gives how many owners left.
fn campaign(seed: u64, turns: usize, options: &StoreOptions, variants: u64) -> u64 {
    assert_eq!(options.durability, Durability::Power);
    let (events, pasts, evicted) = play(seed, turns, options);
    let mut random = Random(seed * 1000);
    let mut acknowledged = [0; OWNERS as usize];
    let (mut moments, mut kept, every) = (0, 0, times(3, 1));
    for at in 0..=events.len() {
        if let Some(Event::Told(Told::Acknowledged(owner, state))) = at.checked_sub(1).map(|last| &events[last]) {
            let newest = &mut acknowledged[*owner as usize];
            *newest = (*newest).max(*state);
        }
        if !random.once_in(every) {
            continue;
        }
        for variant in 0..variants {
            let left = crash(&events[..at], &mut random);
            for index in indexes(&events[..at], &mut random) {
                // The first time the process is killed, and the power is lost later.
                let disk = if variant == 0 { Simulated::replayed(&events[..at]) } else { left.copy() };
                let place = format!("seed {seed}, after event {at}, variant {variant}");
                kept += reopen(&disk, index, options, &pasts, &acknowledged, &place, &mut random);
                moments += 1;
            }
        }
    }
    println!("{moments} losses of power within {} events; {kept} owners came back", events.len());
    evicted
}

/// Several owners at once, some waited for and some not.
fn play(seed: u64, turns: usize, options: &StoreOptions) -> (Vec<Event>, Vec<Past>, u64) {
    let disk = Simulated::slow();
    let store = open(&disk, Recorded { pairs: BTreeMap::new(), disk: disk.clone() }, options).unwrap();
    let mut random = Random(seed);
    let mut pasts: Vec<_> = (0..OWNERS).map(|_| Past::new()).collect();
    let mut version = 0;
    for turn in 0..turns {
        let mut tickets = Vec::new();
        // Who leaves between two steps of a group would not be noticed.
        let group = if options.max_bytes > 0 { 1 } else { 1 + random.below(4) };
        for _ in 0..group {
            version += 1;
            let owner = random.below_u64(OWNERS);
            let past = &mut pasts[owner as usize];
            tickets.push((owner, past.states.len(), step(&store, owner, past, version, &mut random).unwrap()));
        }
        if turn % 11 == 10 {
            store.compact().unwrap();
        }
        for (owner, state, ticket) in tickets {
            ticket.wait().unwrap();
            disk.note(Event::Told(Told::Acknowledged(owner, state)));
        }
        if options.max_bytes > 0 {
            notice_who_left(&store, options, &mut pasts);
        }
    }
    let stats = store.stats();
    assert_eq!((stats.write_errors, stats.corrupt_records, stats.index_errors), (0, 0, 0));
    assert!(stats.compacted_segments > 3, "{stats:?}");
    drop(store);
    (disk.events(), pasts, stats.evicted_owners)
}

fn notice_who_left(store: &DiskStore, options: &StoreOptions, pasts: &mut [Past]) {
    // The writer lets owners leave after it has told that a step is written, and flushes end meanwhile too. It is done
    // when the files are small enough.
    for tries in 0.. {
        store.flush().unwrap();
        if store.stats().file_bytes <= options.max_bytes {
            break;
        }
        assert!(tries < 1000, "no room is made: {:?}", store.stats());
    }
    for (owner, past) in pasts.iter_mut().enumerate() {
        if store.find(key(owner as u64)).is_none() && past.now().is_some() {
            past.states.push(None);
        }
    }
}

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// What could be left of the index: something between the last that was durable and the last that was said; nothing; or
/// something damaged.
fn indexes(events: &[Event], random: &mut Random) -> Vec<Pairs> {
    let mut possible = vec![Pairs::new()];
    for event in events {
        if let Event::Told(Told::Index(pairs, durable)) = event {
            if *durable {
                possible.clear();
            }
            possible.push((**pairs).clone());
        }
    }
    let whole = possible.swap_remove(random.below(possible.len()));
    let mut damaged = whole.clone();
    let place = random.below(whole.len().max(1));
    if let Some(value) = damaged.values_mut().nth(place) {
        let at = random.below(value.len());
        value[at] ^= 1 << random.below(8);
    }
    vec![whole, Pairs::new(), damaged]
}

fn reopen(
    disk: &Simulated,
    pairs: Pairs,
    options: &StoreOptions,
    pasts: &[Past],
    acknowledged: &[usize],
    place: &str,
    random: &mut Random,
) -> u64 {
    let had = pairs.len();
    let place = format!("{place}, {had} pairs");
    let store = open(disk, Recorded { pairs, disk: disk.clone() }, options)
        .unwrap_or_else(|error| panic!("{place}: does not open: {error}"));
    let mut found: Vec<Past> = Vec::new();
    for (owner, past) in pasts.iter().enumerate() {
        let state = read(&store, owner as u64).unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
        let known = acknowledged[owner];
        assert!(
            past.allows(&state, known),
            "{place}: owner {owner} has {state:?}, and {:?} was acknowledged; {:?}",
            past.states[known],
            store.stats()
        );
        found.push(Past { states: vec![state], acknowledged: 0, weak: false });
    }
    let stats = store.stats();
    assert_eq!((stats.dropped_owners, stats.corrupt_records), (0, 0), "{place}: {stats:?}");
    let kept = found.iter().filter(|past| past.now().is_some()).count() as u64;
    // It works, and what it is told now survives the next loss of power.
    // What was read once is not lost either, if nothing is written.
    for turn in 0..random.pick(&[0, 3, 3]) {
        let owner = random.below(found.len());
        let ticket = step(&store, owner as u64, &mut found[owner], 1_000_000 + turn, random).unwrap();
        ticket.wait().unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
        if options.max_bytes > 0 {
            notice_who_left(&store, options, &mut found);
        }
    }
    let lost = random.once_in(2);
    let before = disk.events();
    drop(store);
    let events = if lost { before } else { disk.events() };
    let disk = crash(&events, random);
    let pairs = indexes(&events, random).swap_remove(random.below(2));
    let store = open(&disk, Recorded { pairs, disk: disk.clone() }, options)
        .unwrap_or_else(|error| panic!("{place}: does not open again: {error}"));
    for (owner, past) in found.iter().enumerate() {
        let state = read(&store, owner as u64).unwrap_or_else(|error| panic!("{place}: again: owner {owner}: {error}"));
        let evicted = options.max_bytes > 0 && past.states.iter().rev().take(2).any(|other| *other == state);
        assert!(
            state == *past.now() || evicted,
            "{place}: again: owner {owner} has {state:?} and not {:?}; {:?}",
            past.now(),
            store.stats()
        );
    }
    kept
}
