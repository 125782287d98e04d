//! The store as a whole.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pagoda_test_support::{Folder, Random};

use super::disk::{RealClock, RealDisk};
use super::index::MemoryIndex;
use super::*;
use crate::error::Status;

const LAYERS: u32 = 3;

pub(super) fn key(owner: u64) -> Key {
    Key { space: Space(7), owner: Owner(owner) }
}

fn word(version: u64, position: u64, layer: u32) -> u64 {
    (version << 40 ^ position << 8 ^ u64::from(layer)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A piece whose every word says which version, position and layer it is of.
pub(super) fn record(owner: u64, history_start: u64, start: u64, tokens: u32, version: u64) -> Record {
    let positions = start..start + u64::from(tokens);
    let data = (0..LAYERS).flat_map(|layer| positions.clone().map(move |position| word(version, position, layer)));
    let data = data.flat_map(u64::to_le_bytes).collect();
    Record { key: key(owner), history_start, start, tokens, layers: LAYERS, tag: version.to_le_bytes().to_vec(), data }
}

/// What should be stored of an owner: where it begins and the version of each token.
pub(super) type Model = HashMap<u64, (u64, Vec<u64>)>;

pub(super) fn model_put(
    model: &mut Model,
    owner: u64,
    history_start: u64,
    start: u64,
    tokens: u32,
    version: u64,
) -> bool {
    let new = vec![version; tokens as usize];
    if start == history_start {
        model.insert(owner, (start, new));
        return true;
    }
    let Some((first, mut old)) = model.get(&owner).cloned() else { return false };
    if history_start < first || start > first + old.len() as u64 {
        return false;
    }
    old.truncate((start - first) as usize);
    old.extend(new);
    model.insert(owner, (history_start, old.split_off((history_start - first) as usize)));
    true
}

pub(super) fn model_cut(model: &mut Model, owner: u64, from: u64) {
    if let Some((first, tokens)) = model.get_mut(&owner) {
        tokens.truncate(from.saturating_sub(*first) as usize);
        if tokens.is_empty() {
            model.remove(&owner);
        }
    }
}

/// The versions of an owner's tokens as the store gives them, every word checked.
pub(super) fn read(store: &DiskStore, owner: u64) -> Result<Option<(u64, Vec<u64>)>> {
    let Some(history) = store.history(key(owner)) else { return Ok(None) };
    let mut versions = Vec::new();
    let mut at = history.pieces()[0].start;
    for (number, piece) in history.pieces().iter().enumerate() {
        assert_eq!(piece.start, at, "no gaps");
        at += u64::from(piece.tokens);
        let version = u64::from_le_bytes(history.tag(number)?.try_into().unwrap());
        for layer in 0..LAYERS {
            let bytes = history.layer(number, layer)?;
            for (position, chunk) in (piece.start..at).zip(bytes.chunks(8)) {
                assert_eq!(u64::from_le_bytes(chunk.try_into().unwrap()), word(version, position, layer));
            }
        }
        versions.extend((piece.start..at).filter(|&position| position >= history.start()).map(|_| version));
    }
    assert_eq!(at, history.end());
    Ok(Some((history.start(), versions)))
}

pub(super) fn compare(store: &DiskStore, model: &Model, owners: u64) {
    for owner in 0..owners {
        assert_eq!(read(store, owner).unwrap(), model.get(&owner).cloned(), "owner {owner}");
        let found = store.find(key(owner)).map(|found| (found.start, found.end));
        assert_eq!(found, model.get(&owner).map(|(start, tokens)| (*start, start + tokens.len() as u64)));
    }
    let mut listed = store.owners(Space(7));
    listed.sort_unstable();
    let mut known: Vec<u64> = model.keys().copied().collect();
    known.sort_unstable();
    assert_eq!(listed, Owner::slice(&known));
    assert!(store.owners(Space(8)).is_empty());
}

pub(super) fn small() -> StoreOptions {
    StoreOptions { segment_bytes: 1 << 14, garbage_bytes: 1 << 15, ..StoreOptions::default() }
}

/// Random writes and cuts; gives how many were made.
fn play(store: &DiskStore, model: &mut Model, random: &mut Random, steps: u64, version: &mut u64) {
    for _ in 0..steps {
        let owner = random.below_u64(8);
        let (first, end) = model.get(&owner).map_or((0, 0), |(first, tokens)| (*first, first + tokens.len() as u64));
        if random.below_u64(6) == 0 {
            let from = if random.below_u64(3) == 0 { 0 } else { first + random.below_u64(end - first + 2) };
            model_cut(model, owner, from);
            drop(store.cut(key(owner), from).unwrap());
            continue;
        }
        let start = match random.below_u64(8) {
            0 => first + random.below_u64(end - first + 1),
            1 => end + random.below_u64(3),
            _ => end,
        };
        let history_start = match random.below_u64(5) {
            0 => start,
            1 => start - random.below_u64(start.min(20) + 1),
            // What is claimed to be there before may not be.
            2 => first.saturating_sub(random.below_u64(3)),
            _ => first,
        };
        let tokens = 1 + random.below_u64(12) as u32;
        *version += 1;
        let accepted = store.write(record(owner, history_start, start, tokens, *version), Room::Wait);
        let expected = model_put(model, owner, history_start, start, tokens, *version);
        assert_eq!(
            accepted.is_ok(),
            expected,
            "owner {owner} has {first}..{end}, put {history_start} {start} {tokens}"
        );
        if let Err(error) = accepted {
            assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("record.start")));
        }
    }
}

#[test]
fn random_histories_match_a_simple_model_through_reopening() {
    for (seed, durability) in [(11, Durability::Power), (22, Durability::Process), (33, Durability::None)] {
        let folder = Folder::new();
        let options = StoreOptions { durability, ..small() };
        let mut random = Random(seed);
        let (mut model, mut version) = (Model::new(), 0);
        for round in 0..20 {
            let store = DiskStore::open(folder.path(), &options).unwrap();
            let expected = u64::from(round > 0 && round % 3 == 0);
            assert_eq!(store.stats().index_rebuilds, expected, "round {round} of {durability:?}");
            compare(&store, &model, 8);
            for _ in 0..4 {
                play(&store, &mut model, &mut random, 50, &mut version);
                compare(&store, &model, 8);
            }
            if round % 4 == 3 {
                store.compact().unwrap();
                compare(&store, &model, 8);
            }
            store.flush().unwrap();
            compare(&store, &model, 8);
            let stats = store.stats();
            assert_eq!(
                (stats.write_errors, stats.corrupt_records, stats.index_errors, stats.dropped_owners),
                (0, 0, 0, 0)
            );
            drop(store);
            assert!(DiskStore::check(folder.path()).unwrap().is_sound());
            if round % 3 == 2 {
                fs::remove_dir_all(folder.path().join(INDEX)).unwrap();
            }
        }
    }
}

#[test]
fn an_index_that_lags_behind_is_brought_up_to_date() {
    let folder = Folder::new();
    let index = MemoryIndex::default();
    // An index from before a compaction would name a segment that is gone; it is flushed before that.
    let options = StoreOptions { garbage_bytes: 1 << 40, ..small() };
    let open = || {
        let disk = Box::new(RealDisk::new(folder.path()));
        DiskStore::open_with(disk, Box::new(index.clone()), Box::new(RealClock), &options).unwrap()
    };
    let mut random = Random(5);
    let (mut model, mut version) = (Model::new(), 0);
    for round in 0..30 {
        let store = open();
        assert_eq!(store.stats().index_rebuilds, 0);
        compare(&store, &model, 8);
        play(&store, &mut model, &mut random, 20, &mut version);
        if round % 10 == 9 {
            store.compact().unwrap();
        }
        store.flush().unwrap();
        let early = index.pairs.lock().clone();
        play(&store, &mut model, &mut random, 100, &mut version);
        drop(store);
        // As after a crash: the index knows only what was before.
        *index.pairs.lock() = early;
        let store = open();
        assert_eq!(store.stats().index_rebuilds, 0);
        compare(&store, &model, 8);
    }
}

#[test]
fn a_compaction_takes_garbage_away_and_readers_do_not_notice() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions { garbage_bytes: 1 << 40, ..small() }).unwrap();
    for version in 0..20 {
        for owner in 0..20 {
            store.write(record(owner, 0, 0, 50, version), Room::Wait).unwrap();
        }
    }
    store.flush().unwrap();
    let before = store.stats();
    assert!(before.segments > 20 && before.file_bytes > 4 * before.live_bytes, "{before:?}");
    let held: Vec<_> = (0..20).map(|owner| store.history(key(owner)).unwrap()).collect();
    std::thread::scope(|scope| {
        let reading = scope.spawn(|| {
            let end = Instant::now() + Duration::from_millis(300);
            while Instant::now() < end {
                for owner in 0..20 {
                    assert_eq!(read(&store, owner).unwrap(), Some((0, vec![19; 50])));
                }
            }
        });
        store.compact().unwrap();
        reading.join().unwrap();
    });
    let after = store.stats();
    assert_eq!((after.owners, after.records, after.live_bytes), (20, 20, before.live_bytes));
    assert!(after.file_bytes < after.live_bytes + 200 && after.compacted_segments > 20, "{after:?}");
    for history in &held {
        assert_eq!(&history.layer(0, 1).unwrap()[..8], &word(19, 0, 1).to_le_bytes());
    }
    // Removals leave as well once there is nothing left that they hide.
    for owner in 0..20 {
        store.cut(key(owner), 0).unwrap();
    }
    store.compact().unwrap();
    store.compact().unwrap();
    assert!(store.stats().file_bytes < 500, "{:?}", store.stats());
    drop(store);
    fs::remove_dir_all(folder.path().join(INDEX)).unwrap();
    assert_eq!(DiskStore::open(folder.path(), &small()).unwrap().stats().owners, 0);
}

#[test]
fn the_least_recently_used_are_evicted_first() {
    let folder = Folder::new();
    let options = StoreOptions { max_bytes: 4 << 20, ..StoreOptions::default() };
    let store = DiskStore::open(folder.path(), &options).unwrap();
    let tokens = 4096;
    for owner in 0..100 {
        store.write(record(owner, 0, 0, tokens, 1), Room::Wait).unwrap();
        store.flush().unwrap();
        assert!(store.history(key(0)).is_some(), "used all the time");
        assert!(store.stats().file_bytes <= (4 << 20) + (1 << 20), "{:?}", store.stats());
    }
    let mut left = store.owners(Space(7));
    left.sort_unstable();
    let (first, rest) = left.split_first().unwrap();
    assert_eq!(*first, Owner(0));
    assert!(rest.len() > 15, "{left:?}");
    assert!(rest.iter().copied().eq((100 - rest.len() as u64..100).map(Owner)), "{left:?}");
    assert_eq!(store.stats().evicted_owners, 100 - left.len() as u64);
    let large = store.write(record(1, 0, 0, 1 << 18, 1), Room::Wait).unwrap_err();
    assert_eq!(large.status(), Status::Capacity);
    drop(store);
    let store = DiskStore::open(folder.path(), &options).unwrap();
    assert_eq!(store.stats().owners, left.len() as u64);
    assert_eq!(read(&store, 99).unwrap(), Some((0, vec![1; tokens as usize])));
}

#[test]
fn room_is_made_while_others_write_without_a_pause() {
    let folder = Folder::new();
    let options = StoreOptions {
        segment_bytes: 1 << 20,
        max_bytes: 4 << 20,
        queue_bytes: 1 << 20,
        durability: Durability::Process,
        ..StoreOptions::default()
    };
    let store = DiskStore::open(folder.path(), &options).unwrap();
    let largest = std::thread::scope(|scope| {
        let write = |first: u64| {
            let piece = record(0, 0, 0, 1024, 1);
            for owner in 0..400 {
                store.write(Record { key: key(first + owner), ..piece.clone() }, Room::Wait).unwrap();
            }
        };
        let writers = [0, 1000, 2000, 3000].map(|first| scope.spawn(move || write(first)));
        let mut largest = 0;
        while writers.iter().any(|writer| !writer.is_finished()) {
            largest = largest.max(store.stats().file_bytes);
            std::thread::yield_now();
        }
        largest
    });
    // 38 MiB were written. Beside the cap there may be what was queued when room is made, a few times, and copies of
    // what stays.
    assert!(largest < 16 << 20, "{largest} bytes; {:?}", store.stats());
}

/// The file of a store that has one segment.
fn segment(folder: &Folder) -> PathBuf {
    folder.path().join(format::segment_name(1))
}

#[test]
fn an_unfinished_write_at_the_end_is_cut_off() {
    let folder = Folder::new();
    let options = StoreOptions { durability: Durability::Process, ..StoreOptions::default() };
    let open = |index: &MemoryIndex| {
        let disk = Box::new(RealDisk::new(folder.path()));
        DiskStore::open_with(disk, Box::new(index.clone()), Box::new(RealClock), &options).unwrap()
    };
    let store = open(&MemoryIndex::default());
    store.write(record(1, 0, 0, 10, 1), Room::Wait).unwrap();
    store.write(record(2, 0, 0, 10, 1), Room::Wait).unwrap();
    store.flush().unwrap();
    let whole = fs::metadata(segment(&folder)).unwrap().len();
    store.write(record(1, 0, 10, 10, 2), Room::Wait).unwrap();
    drop(store);
    let end = fs::metadata(segment(&folder)).unwrap().len();
    let bytes = fs::read(segment(&folder)).unwrap();
    for length in (whole + 1..end).step_by(7) {
        fs::write(segment(&folder), &bytes[..length as usize]).unwrap();
        let store = open(&MemoryIndex::default());
        assert_eq!(store.stats().torn_tails, 1, "{length} of {end}");
        assert_eq!(read(&store, 1).unwrap(), Some((0, vec![1; 10])));
        assert_eq!(read(&store, 2).unwrap(), Some((0, vec![1; 10])));
        store.write(record(1, 0, 10, 5, 3), Room::Wait).unwrap().wait().unwrap();
        drop(store);
        let store = open(&MemoryIndex::default());
        assert_eq!(store.stats().torn_tails, 0);
        assert_eq!(read(&store, 1).unwrap().unwrap().1.len(), 15);
    }
}

#[test]
fn damaged_data_is_a_miss_and_leaves() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &small()).unwrap();
    for piece in 0..3 {
        store.write(record(1, 0, piece * 10, 10, piece), Room::Wait).unwrap();
    }
    store.flush().unwrap();
    let length = fs::metadata(segment(&folder)).unwrap().len();
    let record_length = (length - 64) / 3;
    let file = OpenOptions::new().write(true).open(segment(&folder)).unwrap();
    file.write_all_at(b"!", 64 + record_length + 320).unwrap();
    let history = store.history(key(1)).unwrap();
    assert!(history.layer(0, 0).is_ok());
    let results: Vec<_> = (0..LAYERS).map(|layer| history.layer(1, layer).map_err(|error| error.status())).collect();
    assert!(results.contains(&Err(Status::Io)), "{results:?}");
    assert_eq!(read(&store, 1).unwrap(), Some((0, vec![0; 10])));
    assert_eq!(store.stats().corrupt_records, 1);
    drop((history, store));
    fs::remove_dir_all(folder.path().join(INDEX)).unwrap();
    assert!(!DiskStore::check(folder.path()).unwrap().is_sound());
    let stats = DiskStore::rebuild(folder.path()).unwrap();
    assert_eq!((stats.owners, stats.records), (1, 1));
}

#[test]
fn a_lost_record_takes_along_what_it_may_have_replaced() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions { segment_bytes: 1 << 12, ..small() }).unwrap();
    store.write(record(1, 0, 0, 10, 1), Room::Wait).unwrap().wait().unwrap();
    store.write(record(1, 0, 0, 10, 2), Room::Wait).unwrap().wait().unwrap();
    store.write(record(3, 0, 0, 10, 1), Room::Wait).unwrap().wait().unwrap();
    while store.stats().segments < 3 {
        store.write(record(2, 0, 0, 10, 1), Room::Wait).unwrap().wait().unwrap();
    }
    drop(store);
    // The head of the second record: without it the first would seem current.
    let file = OpenOptions::new().write(true).open(segment(&folder)).unwrap();
    let length = format::total_len(LAYERS, 80, 8);
    file.write_all_at(&[0xff; 32], 64 + length + 40).unwrap();
    let stats = DiskStore::rebuild(folder.path()).unwrap();
    assert_eq!((stats.damaged_regions, stats.dropped_owners, stats.owners), (1, 2, 1));
    let store = DiskStore::open(folder.path(), &small()).unwrap();
    assert_eq!(store.owners(Space(7)), [Owner(2)]);
    assert_eq!(store.stats().index_rebuilds, 0);
}

#[test]
fn a_full_queue_refuses_and_changes_nothing() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &StoreOptions { queue_bytes: 1 << 16, ..small() }).unwrap();
    let (mut refused, mut written) = (0, 0);
    for turn in 0..2000 {
        match store.write(record(1, 0, written, 200, turn), Room::OrRefuse) {
            Ok(_) => written += 200,
            Err(error) => {
                assert_eq!(error.status(), Status::Capacity);
                refused += 1;
            }
        }
        assert!(store.stats().queued_bytes <= 1 << 16);
        assert_eq!(store.find(key(1)).unwrap().end, written);
    }
    assert!(refused > 0 && written > 0);
    store.flush().unwrap();
    assert_eq!(store.stats().queued_bytes, 0);
}

#[test]
fn one_at_a_time() {
    let folder = Folder::new();
    let path = folder.path().join("a/b");
    let store = DiskStore::open(&path, &small()).unwrap();
    let error = DiskStore::open(&path, &small()).err().unwrap();
    assert_eq!(error.status(), Status::Busy);
    assert!(error.message().contains(&format!("process {}", std::process::id())), "{error}");
    assert_eq!(DiskStore::check(&path).unwrap_err().status(), Status::Busy);
    drop(store);
    DiskStore::open(&path, &small()).unwrap();
}

#[test]
fn folders_of_others_and_formats_to_come_are_left_alone() {
    let folder = Folder::new();
    fs::write(folder.path().join("thesis.txt"), "years of work").unwrap();
    let error = DiskStore::open(folder.path(), &small()).err().unwrap();
    assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some("path")));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    assert_eq!(DiskStore::check(folder.path().join("none")).unwrap_err().status(), Status::NotFound);

    let folder = Folder::new();
    let mut bytes = b"PAGODASG".to_vec();
    bytes.extend(9_u32.to_le_bytes());
    bytes.resize(56, 0);
    bytes.extend(crate::checksum::xxh3(&bytes).to_le_bytes());
    fs::write(segment(&folder), &bytes).unwrap();
    let error = DiskStore::open(folder.path(), &small()).err().unwrap();
    assert_eq!(error.status(), Status::Unsupported);
    assert_eq!(fs::read(segment(&folder)).unwrap(), bytes);
}

#[test]
fn what_can_not_be_a_piece_is_refused() {
    let folder = Folder::new();
    let store = DiskStore::open(folder.path(), &small()).unwrap();
    let good = record(1, 5, 5, 2, 1);
    let cases = [
        ("record.layers", Record { layers: 0, ..good.clone() }),
        ("record.tokens", Record { tokens: 0, ..good.clone() }),
        ("record.tokens", Record { start: u64::MAX, ..good.clone() }),
        ("record.history_start", Record { history_start: 6, ..good.clone() }),
        ("record.tag", Record { tag: vec![0; (1 << 16) + 1], ..good.clone() }),
        ("record.data", Record { layers: 5, ..good.clone() }),
    ];
    for (argument, case) in cases {
        let error = store.write(case, Room::Wait).unwrap_err();
        assert_eq!((error.status(), error.argument()), (Status::InvalidArgument, Some(argument)));
    }
    store.write(good, Room::Wait).unwrap().wait().unwrap();
    let history = store.history(key(1)).unwrap();
    assert_eq!(history.layer(1, 0).unwrap_err().argument(), Some("piece"));
    assert_eq!(history.layer(0, LAYERS).unwrap_err().argument(), Some("layer"));
}
