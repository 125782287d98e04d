use std::sync::atomic::{AtomicBool, Ordering};

use pagoda_test_support::Random;

use super::*;
use crate::embedding::RowType;
use crate::embedding::eviction::Eviction;
use crate::embedding::update::version::Version;

const DIM: usize = 3;

fn layout() -> Layout {
    Layout::new(DIM as u32, RowType::F32).unwrap()
}

fn memory(partitions: usize, margin: usize, policy: Eviction, target: f64) -> MemoryTier {
    MemoryTier::new(layout(), &MemoryLimits { partitions, max_rows: margin, eviction: policy, keep: target }).unwrap()
}

/// A row whose every number tells the key and the version.
fn row(key: i64, version: u64) -> Vec<u8> {
    let mut row = vec![0; layout().row_bytes()];
    layout().encode(&[(key * 1000) as f32 + version as f32; DIM], &mut row);
    row
}

fn with_rows<R>(changes: &[(i64, u64, bool)], call: impl FnOnce(&Rows<'_>) -> R) -> R {
    let keys: Vec<i64> = changes.iter().map(|change| change.0).collect();
    let versions: Vec<Version> = changes.iter().map(|change| Version(change.1)).collect();
    let deleted: Vec<bool> = changes.iter().map(|change| change.2).collect();
    let rows = changes.iter().flat_map(|&(key, version, _)| row(key, version)).collect::<Vec<u8>>();
    call(&Rows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted })
}

fn put(memory: &MemoryTier, changes: &[(i64, u64, bool)]) {
    with_rows(changes, |rows| memory.put(rows, &|_| true)).unwrap();
}

fn update(memory: &MemoryTier, changes: &[(i64, u64, bool)]) {
    with_rows(changes, |rows| memory.update(rows)).unwrap();
}

/// The version of each key, and whether it is deleted; the row has been checked.
fn fetch(memory: &MemoryTier, keys: &[i64]) -> Vec<Option<(u64, bool)>> {
    let mut found = vec![None; keys.len()];
    let mut sink = |place: usize, Version(version): Version, bytes: Option<&[u8]>| {
        assert!(found[place].is_none(), "place {place} comes twice");
        assert!(bytes.is_none_or(|bytes| bytes == row(keys[place], version)), "not the row of {}", keys[place]);
        found[place] = Some((version, bytes.is_none()));
    };
    memory.fetch(keys, None, &mut sink).unwrap();
    found
}

#[test]
fn what_is_there_is_put_over_by_nothing() {
    let memory = memory(3, 100, Eviction::Random, 0.5);
    put(&memory, &[(1, 5, false), (2, 0, false), (-7, 1, true)]);
    put(&memory, &[(1, 9, false), (2, 9, true), (-7, 9, false)]);
    assert_eq!(
        fetch(&memory, &[1, 2, -7, 3, 1]),
        [Some((5, false)), Some((0, false)), Some((1, true)), None, Some((5, false))]
    );
    assert_eq!(memory.rows(), 3);
}

#[test]
fn nothing_is_put_that_is_not_current() {
    let memory = memory(2, 100, Eviction::Random, 0.5);
    with_rows(&[(1, 1, false), (2, 1, false), (3, 1, false)], |rows| memory.put(rows, &|place| place == 1)).unwrap();
    assert_eq!(fetch(&memory, &[1, 2, 3]), [None, Some((1, false)), None]);
}

#[test]
fn whether_it_is_current_is_asked_under_the_lock() {
    let memory = memory(1, 100, Eviction::Random, 0.5);
    let asked = AtomicBool::new(false);
    let locked = |_| {
        asked.store(true, Ordering::Relaxed);
        memory.partitions[0].try_lock().is_none()
    };
    with_rows(&[(1, 1, false)], |rows| memory.put(rows, &locked)).unwrap();
    assert!(asked.load(Ordering::Relaxed));
    assert_eq!(memory.rows(), 1);
}

#[test]
fn an_update_yields_to_a_higher_version_only() {
    let memory = memory(4, 100, Eviction::Oldest, 0.5);
    put(&memory, &[(1, 5, false), (2, 5, false), (3, 5, true), (4, 5, false), (5, 5, true)]);
    update(
        &memory,
        &[(1, 4, false), (2, 5, true), (3, 6, false), (4, 4, true), (5, 4, false), (6, 1, false), (7, 1, true)],
    );
    assert_eq!(
        fetch(&memory, &[1, 2, 3, 4, 5, 6, 7]),
        [
            Some((5, false)),
            Some((5, true)),
            Some((6, false)),
            Some((5, false)),
            Some((5, true)),
            Some((1, false)),
            Some((1, true)),
        ]
    );
}

#[test]
fn the_margin_is_never_exceeded_and_the_target_is_reached_step_by_step() {
    for policy in [Eviction::Random, Eviction::Oldest, Eviction::LeastUsed] {
        let memory = memory(1, 1000, policy, 0.5);
        let (mut most, mut least_after, mut before) = (0, usize::MAX, 0);
        for key in 0..5000 {
            put(&memory, &[(key, 1, key % 7 == 0)]);
            let rows = memory.rows();
            assert!(rows <= 1000 && rows + 3 >= before, "{before} rows, then {rows}");
            assert!(fetch(&memory, &[key])[0].is_some(), "what came in last is there");
            most = most.max(rows);
            if key > 1000 {
                least_after = least_after.min(rows);
            }
            before = rows;
        }
        assert_eq!(most, 1000);
        assert!((497..=501).contains(&least_after), "{least_after} rows are left");
    }
}

#[test]
fn margins_of_no_and_one_row() {
    let none = memory(2, 0, Eviction::Oldest, 1.0);
    put(&none, &[(1, 1, false)]);
    update(&none, &[(2, 1, false)]);
    assert_eq!(fetch(&none, &[1, 2]), [None, None]);
    let one = memory(1, 1, Eviction::LeastUsed, 1.0);
    put(&one, &[(1, 1, false), (2, 1, false)]);
    assert_eq!(fetch(&one, &[1, 2]), [None, Some((1, false))]);
}

#[test]
fn a_full_partition_at_target_1_loses_one_row_for_each() {
    let memory = memory(1, 100, Eviction::Random, 1.0);
    for key in 0..500 {
        put(&memory, &[(key, 1, false)]);
        assert_eq!(memory.rows(), 100.min(key as usize + 1));
    }
}

/// How many of the first and of the second half of a thousand old rows are left after others came in, where `use_first`
/// looks the first half up.
fn left_of_halves(policy: Eviction, use_first: impl Fn(&MemoryTier, &[i64])) -> (usize, usize) {
    let memory = memory(1, 2000, policy, 0.6);
    let old: Vec<i64> = (0..1000).collect();
    put(&memory, &old.iter().map(|&key| (key, 1, false)).collect::<Vec<_>>());
    use_first(&memory, &old);
    // 1000 fill the margin, and each of the next 125 makes four leave.
    for key in 10_000..11_125 {
        put(&memory, &[(key, 1, false)]);
        fetch(&memory, &[key; 3]);
    }
    let left = fetch(&memory, &old);
    let count = |half: &[Option<(u64, bool)>]| half.iter().flatten().count();
    (count(&left[..500]), count(&left[500..]))
}

#[test]
fn the_oldest_leave_first() {
    let (used, unused) = left_of_halves(Eviction::Oldest, |memory, old| {
        fetch(memory, &old[500..]);
        fetch(memory, &old[..500]);
    });
    assert!(used > 350 && unused < 180, "{used} used and {unused} unused rows are left");
}

#[test]
fn the_least_used_leave_first() {
    let (used, unused) = left_of_halves(Eviction::LeastUsed, |memory, old| {
        (0..8).for_each(|_| drop(fetch(memory, &old[..500])));
        fetch(memory, &old[500..]);
    });
    assert!(used > 480 && unused < 180, "{used} used and {unused} unused rows are left");
}

#[test]
fn any_leave_at_random() {
    let (used, unused) = left_of_halves(Eviction::Random, |memory, old| drop(fetch(memory, &old[..500])));
    assert!(used.abs_diff(unused) < 80 && used + unused > 650, "{used} used and {unused} unused rows are left");
}

#[test]
fn keys_of_every_kind_are_told_apart() {
    let memory = memory(5, usize::MAX, Eviction::Oldest, 0.8);
    let keys = [i64::MIN, i64::MAX, 0, -1, 1, 1 << 32, 1 << 33, -(1 << 32)];
    for (version, &key) in keys.iter().enumerate() {
        let rows = [version as u8; 4 * DIM];
        let rows = Rows { keys: &[key], versions: &[Version(version as u64)], rows: &rows, deleted: &[false] };
        memory.put(&rows, &|_| true).unwrap();
    }
    let mut found = 0;
    let mut sink = |place: usize, Version(version): Version, row: Option<&[u8]>| {
        assert_eq!((version, row), (place as u64, Some(&[place as u8; 4 * DIM][..])));
        found += 1;
    };
    memory.fetch(&keys, None, &mut sink).unwrap();
    assert_eq!(found, keys.len());
}

#[test]
fn many_rows_take_about_the_memory_that_was_foretold() {
    let memory = memory(4, usize::MAX, Eviction::Oldest, 0.8);
    let empty = memory.memory();
    let changes: Vec<_> = (0..100_000).map(|key| (key, 1, false)).collect();
    put(&memory, &changes);
    assert_eq!(memory.rows(), changes.len());
    let (took, foretold) =
        ((memory.memory() - empty) as f64, MemoryTier::bytes_for(layout(), changes.len() as u64) as f64);
    assert!((0.7..1.4).contains(&(took / foretold)), "{took} bytes, foretold {foretold}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    for (partitions, target, argument) in [
        (0, 0.5, "EmbeddingOptions.tiers.memory.partitions"),
        (1, 1.5, "EmbeddingOptions.tiers.memory.overflow.keep"),
        (1, f64::NAN, "EmbeddingOptions.tiers.memory.overflow.keep"),
    ] {
        let options = MemoryLimits { partitions, keep: target, ..MemoryLimits::default() };
        let error = MemoryTier::new(layout(), &options).map(drop).unwrap_err();
        assert_eq!(error.argument(), Some(argument));
    }
}

/// Threads that put, update, delete and look up: no row is ever that of another key or version.
#[test]
fn threads_see_whole_rows() {
    const KEYS: usize = 300;
    let rounds = if cfg!(miri) { 20 } else { 5000 };
    for policy in [Eviction::Random, Eviction::Oldest, Eviction::LeastUsed] {
        let memory = memory(2, 100, policy, 0.7);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let memory = &memory;
                scope.spawn(move || {
                    let mut random = Random(thread);
                    for version in 1..rounds {
                        let mut keys: Vec<i64> = (0..8).map(|_| random.below(KEYS) as i64).collect();
                        keys.sort_unstable();
                        keys.dedup();
                        let changes: Vec<_> = keys.iter().map(|&key| (key, version % 900, random.once_in(5))).collect();
                        match random.below(3) {
                            0 => put(memory, &changes),
                            1 => update(memory, &changes),
                            _ => drop(fetch(memory, &keys)),
                        }
                        assert!(memory.rows() <= 200);
                    }
                });
            }
        });
    }
}
