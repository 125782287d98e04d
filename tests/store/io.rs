//! Every call to the disk failing in its turn: the store says so, loses nothing that it had acknowledged, and works
//! again when the disk does.

use std::collections::BTreeMap;
use std::io::ErrorKind;

use pagoda::store::disk::Disk;
use pagoda::store::{DiskStore, Room, Store};
use pagoda::{Durability, Status, StoreOptions};
use pagoda_test_support::Random;

use crate::simulated::{Event, Fault, Recorded, Simulated, Told, crash};
use crate::workload::{Past, cut, is_beginning, is_part, key, open, put, read, record, step};

const OWNERS: u64 = 4;
const FOR_EVER: u64 = u64::MAX;

fn options(durability: Durability) -> StoreOptions {
    StoreOptions { durability, segment_bytes: 4096, garbage_bytes: 5000, ..StoreOptions::default() }
}

/// Every so many calls fail in their turn; `make soak` has each fail.
fn stride() -> usize {
    std::env::var("PAGODA_FAULT_STRIDE").map_or(7, |text| text.parse().expect("a number of calls"))
}

#[test]
fn any_write_failing() {
    let mut runs = 0;
    let (power, process) = (prepared(Durability::Power), prepared(Durability::Process));
    for count in [1, 2, 3, 6, FOR_EVER] {
        let kinds = [(ErrorKind::StorageFull, 0), (ErrorKind::Other, 256), (ErrorKind::StorageFull, 100)];
        for (turn, (kind, written)) in kinds.into_iter().enumerate() {
            for from in ((turn % stride()) as u64..).step_by(stride()) {
                let fault = Fault { from, count, kind, written, reads: false };
                let durability =
                    if (from + turn as u64).is_multiple_of(3) { Durability::Process } else { Durability::Power };
                runs += 1;
                let prepared = if durability == Durability::Power { &power } else { &process };
                if !run(fault, durability, prepared) {
                    break;
                }
            }
        }
    }
    println!("{runs} runs");
}

#[test]
fn any_read_failing() {
    let mut runs = 0;
    let prepared = prepared(Durability::Power);
    for count in [1, FOR_EVER] {
        for from in (0..).step_by(stride()) {
            let fault = Fault { from, count, kind: ErrorKind::Other, written: 128, reads: true };
            runs += 1;
            if !run(fault, Durability::Power, &prepared) {
                break;
            }
        }
    }
    println!("{runs} runs");
}

#[test]
fn a_disk_that_can_not_be_read_is_not_taken_for_an_empty_one() {
    let Prepared { disk, pairs, pasts } = prepared(Durability::Power);
    for pairs in [pairs, BTreeMap::new()] {
        let fault = Fault { from: 0, count: FOR_EVER, kind: ErrorKind::Other, written: 0, reads: true };
        let names = disk.list().unwrap();
        disk.fail_only(fault, "view");
        let error = open(&disk, Recorded { pairs: pairs.clone(), disk: disk.clone() }, &options(Durability::Power));
        assert_eq!(error.err().expect("nothing can be read").status(), Status::Io);
        disk.set_fault(None);
        assert_eq!(disk.list().unwrap(), names, "nothing was removed");
        let store = open(&disk, Recorded { pairs, disk: disk.clone() }, &options(Durability::Power)).unwrap();
        compare(&store, &mut pasts.clone(), "afterwards");
    }
}

#[test]
fn a_disk_that_comes_and_goes_under_writes_without_a_wait() {
    let mut failures = 0;
    for seed in 1..=12 {
        let durability = if seed % 2 == 0 { Durability::Process } else { Durability::Power };
        let options = options(durability);
        let disk = Simulated::slow();
        let mut random = Random(seed);
        let mut pasts: Vec<_> = (0..OWNERS).map(|_| Past::new()).collect();
        let mut pairs = BTreeMap::new();
        for round in 0..8 {
            let place = format!("seed {seed}, round {round}");
            let store = open(&disk, Recorded { pairs, disk: disk.clone() }, &options).unwrap();
            compare(&store, &mut pasts, &place);
            for turn in 0..12 {
                failures += group(&store, &disk, &mut pasts, round * 10_000 + turn * 100, &mut random, &place);
            }
            disk.set_fault(None);
            works(&store, &mut pasts, &place);
            compare(&store, &mut pasts, &place);
            drop(store);
            let last = disk.events().into_iter().rev().find_map(|event| match event {
                Event::Told(Told::Index(pairs, _)) => Some(pairs),
                _ => None,
            });
            pairs = if round % 2 == 0 { BTreeMap::new() } else { last.map_or_else(BTreeMap::new, |it| (*it).clone()) };
        }
    }
    assert!(failures > 100, "{failures} failures");
}

/// Several steps at once on a disk where some calls fail. Gives how many steps failed.
fn group(
    store: &DiskStore,
    disk: &Simulated,
    pasts: &mut [Past],
    version: u64,
    random: &mut Random,
    place: &str,
) -> u64 {
    let kind = random.pick(&[ErrorKind::StorageFull, ErrorKind::Other]);
    let (from, count) = (random.below_u64(30), 1 + random.below_u64(6));
    let fault = Fault { from, count, kind, written: random.below(257), reads: false };
    disk.set_fault(random.once_in(2).then_some(fault));
    let mut tickets = Vec::new();
    for step_version in version..version + 1 + random.below_u64(8) {
        let owner = random.below(pasts.len());
        let before = pasts[owner].states.len();
        match step(store, owner as u64, &mut pasts[owner], step_version, random) {
            Ok(ticket) => tickets.push((owner, before, ticket)),
            Err(error) => {
                // What it would have continued has left by now.
                assert_eq!(error.status(), Status::InvalidArgument, "{place}: {error}");
                pasts[owner].states.truncate(before);
            }
        }
    }
    if random.once_in(6) {
        let _ = store.compact();
    }
    let mut failures = 0;
    for (owner, state, ticket) in tickets {
        let past = &mut pasts[owner];
        match ticket.wait() {
            Ok(()) => past.acknowledged = state.min(past.states.len() - 1),
            Err(error) => {
                assert_eq!(error.status(), Status::Io, "{place}: {error}");
                past.weak = true;
                failures += 1;
            }
        }
    }
    let _ = store.flush();
    compare(store, pasts, place);
    failures
}

/// Every owner has what was written last, or, where that failed, a part of it.
fn compare(store: &DiskStore, pasts: &mut [Past], place: &str) {
    for (owner, past) in pasts.iter_mut().enumerate() {
        let state = read(store, owner as u64).unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
        let part = past.weak && past.states[past.acknowledged..].iter().any(|whole| is_part(&state, whole));
        assert!(state == *past.now() || part, "{place}: owner {owner} has {state:?}: {past:?}");
        past.settle(state);
    }
}

/// A store with something in it, the index behind by a few records.
fn prepared(durability: Durability) -> Prepared {
    let disk = Simulated::default();
    let store = open(&disk, Recorded { pairs: BTreeMap::new(), disk: disk.clone() }, &options(durability)).unwrap();
    let mut random = Random(9);
    let mut pasts: Vec<_> = (0..OWNERS).map(|_| Past::new()).collect();
    for version in 0..24 {
        let owner = version % OWNERS;
        step(&store, owner, &mut pasts[owner as usize], version, &mut random).unwrap().wait().unwrap();
    }
    drop(store);
    pasts.iter_mut().for_each(|past| past.settle(past.now().clone()));
    let events = disk.events();
    let indexes: Vec<_> = events
        .iter()
        .filter_map(|event| if let Event::Told(Told::Index(pairs, _)) = event { Some(pairs) } else { None })
        .collect();
    // One from after the last compaction: an earlier one is never left behind.
    let pairs = (*indexes[indexes.len().saturating_sub(3)]).as_ref().clone();
    Prepared { disk, pairs, pasts }
}

struct Prepared {
    disk: Simulated,
    pairs: BTreeMap<Vec<u8>, Vec<u8>>,
    pasts: Vec<Past>,
}

/// Whether the fault happened.
fn run(fault: Fault, durability: Durability, prepared: &Prepared) -> bool {
    let place = format!("{fault:?}, {durability:?}");
    let options = options(durability);
    let (disk, pairs, mut pasts) = (prepared.disk.copy(), prepared.pairs.clone(), prepared.pasts.clone());
    disk.set_fault(Some(fault));
    let mut random = Random(fault.from);
    let index = Recorded { pairs, disk: disk.clone() };
    match open(&disk, index.clone(), &options) {
        Ok(store) => {
            assert!(!disk.calls().1.contains(&"view"), "{place}: opened without having read everything");
            use_it(&store, &disk, &mut pasts, &mut random, &place);
            let happened = !disk.calls().1.is_empty();
            if happened && fault.count != FOR_EVER && disk.calls().0 >= fault.from + fault.count {
                disk.set_fault(None);
                works(&store, &mut pasts, &place);
            }
            if !happened {
                return false;
            }
            drop(store);
            // A read that failed took something out of the store.
            let reads = disk.calls().1.contains(&"view");
            pasts.iter_mut().for_each(|past| past.weak |= reads);
        }
        Err(error) => assert_eq!(error.status(), Status::Io, "{place}: {error}"),
    }
    disk.set_fault(None);
    // With the index that is there, and from a disk that also lost power, without.
    let events = disk.events();
    let last = events
        .iter()
        .rev()
        .find_map(|event| if let Event::Told(Told::Index(pairs, _)) = event { Some(pairs) } else { None });
    let pairs = last.map_or(index.pairs, |pairs| (**pairs).clone());
    let images = [
        (disk.copy(), pairs.clone()),
        (disk.copy(), BTreeMap::new()),
        (crash(&events, &mut random), BTreeMap::new()),
        (crash(&events, &mut random), pairs),
    ];
    let count = if durability == Durability::Power { 4 } else { 2 };
    for (number, (disk, pairs)) in images.into_iter().take(count).enumerate() {
        reopen(&disk, pairs, &options, &mut pasts.clone(), &format!("{place}, image {number}"));
    }
    true
}

/// Some of everything while calls may fail.
fn use_it(store: &DiskStore, disk: &Simulated, pasts: &mut [Past], random: &mut Random, place: &str) {
    for turn in 0..16 {
        if turn % 6 == 5 {
            let _ = store.compact();
        }
        notice_what_left(store, disk, pasts, place);
        let owner = random.below_u64(OWNERS);
        let past = &mut pasts[owner as usize];
        let ticket = match step(store, owner, past, 100 + turn, random) {
            Ok(ticket) => ticket,
            Err(error) => {
                // What it would have continued has left since, for a compaction could not read it.
                assert_eq!(error.status(), Status::InvalidArgument, "{place}: {error}");
                assert!(disk.calls().1.contains(&"view"), "{place}: {error}");
                past.states.pop();
                past.weak = true;
                continue;
            }
        };
        match ticket.wait() {
            Ok(()) => past.acknowledged = past.states.len() - 1,
            Err(error) => {
                assert_eq!(error.status(), Status::Io, "{place}: {error}");
                assert!(store.stats().write_errors > 0, "{place}");
                past.weak = true;
            }
        }
    }
    notice_what_left(store, disk, pasts, place);
}

/// A read that fails takes what it could not read out of the store; so does a compaction.
fn notice_what_left(store: &DiskStore, disk: &Simulated, pasts: &mut [Past], place: &str) {
    // After what the last step has brought about.
    let _ = store.flush();
    for (owner, past) in pasts.iter_mut().enumerate() {
        let state = read(store, owner as u64);
        past.weak |= disk.calls().1.contains(&"view");
        let Ok(state) = state else {
            assert!(past.weak, "{place}: a read failed of itself");
            let end = store.find(key(owner as u64)).map_or(0, |found| found.end);
            past.states.push(cut(past.now(), end));
            continue;
        };
        if state != *past.now() {
            assert!(past.weak && is_beginning(&state, past.now()), "{place}: owner {owner}: {state:?} {past:?}");
            past.states.push(state);
        }
    }
}

/// After the disk works again: every owner can be read and written.
fn works(store: &DiskStore, pasts: &mut [Past], place: &str) {
    let _ = store.flush();
    for (owner, past) in pasts.iter_mut().enumerate() {
        let state = read(store, owner as u64).unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
        assert!(state == *past.now() || past.weak && is_beginning(&state, past.now()), "{place}: {state:?} {past:?}");
        past.settle(state);
        // Not every owner: the ones that are not written again depend on what was there before.
        if owner < 2 {
            more(store, owner as u64, past, 5000, place);
        }
    }
    store.compact().unwrap_or_else(|error| panic!("{place}: {error}"));
    store.cut(key(0), 0).and_then(|ticket| ticket.wait()).unwrap();
    pasts[0].settle(None);
    store.compact().unwrap();
    store.flush().unwrap_or_else(|error| panic!("{place}: {error}"));
}

fn more(store: &DiskStore, owner: u64, past: &mut Past, version: u64, place: &str) {
    let (first, end) = store.find(key(owner)).map_or((0, 0), |found| (found.start, found.end));
    let state = put(past.now(), first, end, 3, version);
    let ticket = store.write(record(owner, first, end, 3, version), Room::Wait);
    ticket.and_then(|ticket| ticket.wait()).unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
    past.settle(state);
}

fn reopen(
    disk: &Simulated,
    pairs: BTreeMap<Vec<u8>, Vec<u8>>,
    options: &StoreOptions,
    pasts: &mut [Past],
    place: &str,
) {
    let had = pairs.len();
    let store = open(disk, Recorded { pairs, disk: disk.clone() }, options)
        .unwrap_or_else(|error| panic!("{place}: does not open: {error}"));
    for (owner, past) in pasts.iter_mut().enumerate() {
        let state = read(&store, owner as u64).unwrap_or_else(|error| panic!("{place}: owner {owner}: {error}"));
        assert!(
            past.allows(&state, past.acknowledged),
            "{place}, {had} pairs: owner {owner} has {state:?}: {past:?} {:?}",
            store.stats()
        );
        past.settle(state);
        more(&store, owner as u64, past, 6000, place);
    }
    drop(store);
    let store = open(disk, Recorded { pairs: BTreeMap::new(), disk: disk.clone() }, options).unwrap();
    for (owner, past) in pasts.iter().enumerate() {
        assert_eq!(read(&store, owner as u64).unwrap(), *past.now(), "{place}: in the end, owner {owner}");
    }
}
