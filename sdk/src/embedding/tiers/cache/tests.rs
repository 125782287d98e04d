//! What a cache holds, against a plain map, alone and with threads that change it.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pagoda_test_support::{Random, times};

use super::set::WAYS;
use super::*;
use crate::sync::Mutex;

const TYPES: [RowType; 3] = [RowType::F32, RowType::F16, RowType::I8];

fn layout(dim: u32, row_type: RowType) -> Layout {
    Layout::new(dim, row_type).unwrap()
}

/// A key, a version, and a number for all of its row, or none if it is deleted.
type Change = (i64, u64, Option<f32>);

fn with_rows<R>(layout: Layout, changes: &[Change], call: impl FnOnce(&Rows<'_>) -> R) -> R {
    let keys: Vec<i64> = changes.iter().map(|change| change.0).collect();
    let versions: Vec<Version> = changes.iter().map(|change| Version(change.1)).collect();
    let deleted: Vec<bool> = changes.iter().map(|change| change.2.is_none()).collect();
    let numbers: Vec<f32> = changes.iter().flat_map(|change| vec![change.2.unwrap_or(-1.0); layout.dim()]).collect();
    let mut rows = vec![0; layout.row_bytes() * changes.len()];
    layout.encode(&numbers, &mut rows);
    call(&Rows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted })
}

fn insert(cache: &Cache, changes: &[Change]) {
    with_rows(cache.layout, changes, |rows| cache.insert(rows, &|_| true));
}

fn update(cache: &Cache, changes: &[Change]) {
    with_rows(cache.layout, changes, |rows| cache.update(rows));
}

/// The number of each key's row, which is the same all along; what is missing agrees with a probe.
fn look_up(cache: &Cache, keys: &[i64]) -> Vec<Option<f32>> {
    let (mut numbers, mut missing, mut probed) =
        (vec![f32::NAN; keys.len() * cache.layout.dim()], Vec::new(), Vec::new());
    cache.lookup(keys, &mut numbers, &mut missing);
    cache.probe(keys, &mut probed);
    assert_eq!(missing, probed);
    let rows = numbers.chunks_exact(cache.layout.dim()).zip(0..);
    let row = |(row, place): (&[f32], u32)| {
        (!missing.contains(&place)).then(|| {
            assert!(row.iter().all(|number| (number / row[0] - 1.0).abs() < 1e-3), "{row:?}");
            row[0]
        })
    };
    rows.map(row).collect()
}

/// Keys that all belong to one set of the cache.
fn keys_of_one_set(cache: &Cache, count: usize) -> Vec<i64> {
    (0..).filter(|&key| cache.home(key).number == 0).take(count).collect()
}

#[test]
fn rows_of_all_types_and_lengths_come_back() {
    for row_type in TYPES {
        for dim in [1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100] {
            let layout = layout(dim, row_type);
            let cache = Cache::new(layout, 64).unwrap();
            let numbers: Vec<f32> = (0..2 * dim).map(|number| number as f32 - 7.0).collect();
            let mut rows = vec![0; 2 * layout.row_bytes()];
            layout.encode(&numbers, &mut rows);
            let keys = [i64::MIN, -1];
            cache.insert(
                &Rows { keys: &keys, versions: &[Version::LOADED; 2], rows: &rows, deleted: &[false; 2] },
                &|_| true,
            );
            let mut expected = vec![0.0; 2 * dim as usize];
            for (row, numbers) in rows.chunks(layout.row_bytes()).zip(expected.chunks_mut(dim as usize)) {
                layout.decode(row, numbers);
            }
            let (mut found, mut missing) = (vec![f32::NAN; 5 * dim as usize], Vec::new());
            cache.lookup(&[-1, 0, i64::MIN, i64::MAX, -1], &mut found, &mut missing);
            let found: Vec<&[f32]> = found.chunks(dim as usize).collect();
            let (first, second) = expected.split_at(dim as usize);
            assert_eq!((found[0], found[2], found[4]), (second, first, second), "{row_type:?} of {dim}");
            assert_eq!(missing, [1, 3]);
        }
    }
}

#[test]
fn a_cache_of_no_rows_holds_nothing() {
    let cache = Cache::new(layout(4, RowType::F32), 0).unwrap();
    insert(&cache, &[(1, 1, Some(1.0))]);
    update(&cache, &[(1, 2, Some(1.0)), (2, 2, None)]);
    cache.clear();
    let (mut from, mut keys) = (0, Vec::new());
    cache.keys(&mut from, 10, &mut keys);
    assert_eq!(look_up(&cache, &[0, 1]), [None, None]);
    assert_eq!((cache.capacity(), cache.len(), from, keys.len()), (0, 0, 0, 0));
}

#[test]
fn a_cache_of_one_row_has_one_set() {
    let cache = Cache::new(layout(4, RowType::F32), 1).unwrap();
    assert_eq!(cache.capacity(), WAYS);
    for key in 0..100 {
        insert(&cache, &[(key, 1, Some(key as f32 + 1.0))]);
        assert_eq!(look_up(&cache, &[key]), [Some(key as f32 + 1.0)]);
    }
    assert_eq!(cache.len(), WAYS);
}

#[test]
fn the_least_recently_used_of_a_set_leaves() {
    let cache = Cache::new(layout(2, RowType::F32), 100).unwrap();
    let keys = keys_of_one_set(&cache, 2 * WAYS + 2);
    let (first, others) = keys.split_at(WAYS);
    let there = |keys: &[i64]| {
        let mut missing = Vec::new();
        cache.probe(keys, &mut missing);
        missing.is_empty()
    };
    for &key in first {
        insert(&cache, &[(key, 1, Some(1.0))]);
    }
    assert!(there(&first[..1]));
    // In order of their coming, but for the first, which was used.
    for (step, &key) in others[..WAYS - 2].iter().enumerate() {
        insert(&cache, &[(key, 1, Some(1.0))]);
        let rows: Vec<i64> = cache.region.set(0).lock().rows().map(|(_, key)| key).collect();
        assert!(!rows.contains(&first[step + 1]) && rows.contains(&first[0]), "step {step}");
    }
    // One that is used all the time never leaves.
    let used = others[0];
    for &key in keys.iter().filter(|&&key| key != used).cycle().take(10 * WAYS) {
        assert!(there(&[used]));
        insert(&cache, &[(key, 1, Some(1.0))]);
    }
    assert!(there(&[used]));
    assert_eq!(cache.len(), WAYS);
}

#[test]
fn an_insert_is_asked_for_under_the_lock_and_yields_to_higher_versions() {
    let layout = layout(5, RowType::F32);
    let cache = Cache::new(layout, 50).unwrap();
    insert(&cache, &[(1, 5, Some(5.0)), (2, 5, Some(5.0)), (3, 5, Some(5.0))]);
    insert(&cache, &[(1, 4, Some(4.0)), (2, 5, Some(5.5)), (3, 6, Some(6.0)), (4, 1, None)]);
    assert_eq!(look_up(&cache, &[1, 2, 3, 4]), [Some(5.0), Some(5.5), Some(6.0), None]);
    let changes = [(1, 9, Some(9.0)), (5, 9, Some(9.0)), (6, 9, Some(9.0))];
    with_rows(layout, &changes, |rows| {
        cache.insert(rows, &|index| {
            assert!(cache.home(rows.keys[index]).set.is_locked());
            // Readers are let in meanwhile.
            assert_eq!(look_up(&cache, &[1]), [Some(5.0)]);
            index == 2
        });
    });
    assert_eq!(look_up(&cache, &[1, 5, 6]), [Some(5.0), None, Some(9.0)]);
    assert_eq!(cache.len(), 4);
}

#[test]
fn a_panic_of_the_one_who_is_asked_leaves_the_set_open() {
    let cache = Cache::new(layout(5, RowType::F32), 50).unwrap();
    let asked = || with_rows(cache.layout, &[(1, 1, Some(1.0))], |rows| cache.insert(rows, &|_| panic!("as intended")));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(asked)).is_err());
    insert(&cache, &[(1, 1, Some(1.0))]);
    assert_eq!(look_up(&cache, &[1]), [Some(1.0)]);
}

#[test]
fn an_update_changes_what_is_there() {
    let cache = Cache::new(layout(5, RowType::F16), 50).unwrap();
    insert(&cache, &[(1, 5, Some(5.0)), (2, 5, Some(5.0)), (3, 5, Some(5.0)), (4, 5, Some(5.0))]);
    update(&cache, &[(1, 4, Some(4.0)), (2, 5, Some(5.5)), (3, 6, None), (4, 4, None), (5, 9, Some(9.0))]);
    assert_eq!(look_up(&cache, &[1, 2, 3, 4, 5]), [Some(5.0), Some(5.5), None, Some(5.0), None]);
    assert_eq!(cache.len(), 3);
    // A way that has lost its row and its key's next one are told apart.
    insert(&cache, &[(3, 7, Some(7.0))]);
    assert_eq!(look_up(&cache, &[3]), [Some(7.0)]);
    cache.clear();
    assert_eq!(look_up(&cache, &[1, 2, 3, 4, 5]), [None; 5]);
    assert_eq!(cache.len(), 0);
}

#[test]
fn keys_walks_over_all_and_begins_again() {
    let cache = Cache::new(layout(1, RowType::I8), 1000).unwrap();
    let there: Vec<i64> = (0..300).map(|key| key * 0x1_0000_0001 - 150).collect();
    insert(&cache, &there.iter().map(|&key| (key, 0, Some(1.0))).collect::<Vec<_>>());
    for _ in 0..2 {
        let (mut from, mut walked, mut steps) = (0, Vec::new(), 0);
        while steps == 0 || from != 0 {
            let before = walked.len();
            cache.keys(&mut from, 20, &mut walked);
            assert!(walked.len() - before < 20 + WAYS);
            steps += 1;
        }
        walked.sort_unstable();
        assert_eq!(walked.len(), cache.len());
        assert!(
            walked.iter().all(|key| there.binary_search(key).is_ok())
                && walked.is_sorted_by(|left, right| left < right)
        );
        assert!(steps > walked.len() / (20 + WAYS));
    }
}

#[test]
#[cfg_attr(miri, ignore = "its memory has no end that could be told")]
fn memory_that_can_not_be_had_is_an_error() {
    let layout = layout(64, RowType::F32);
    for rows in [usize::MAX, usize::MAX / 2, 1 << 50] {
        let error = Cache::new(layout, rows).map(drop).unwrap_err();
        assert!(error.message().contains(&Region::bytes(layout, rows).to_string()), "{error}");
    }
    let cache = Cache::new(layout, 1000).unwrap();
    assert_eq!(cache.memory(), Cache::bytes_for(layout, 1000));
    assert!(cache.memory() > 1000 * 4 * 64);
}

/// Keys that follow one another, lie apart by powers of two, or differ in their upper half fill the sets as keys at
/// random would.
#[test]
#[cfg_attr(miri, ignore = "many keys, and nothing that could go wrong there")]
fn keys_are_spread_evenly() {
    let cache = Cache::new(layout(1, RowType::F32), 1024 * WAYS).unwrap();
    for shift in [0, 1, 8, 16, 20, 32, 40, 48] {
        let mut counts = vec![0_usize; cache.region.sets()];
        let keys = (0..1024 * WAYS as i64).map(|key| (key - 1000) << shift);
        keys.for_each(|key| counts[cache.home(key).number] += 1);
        let overflow: usize = counts.iter().map(|count| count.saturating_sub(WAYS)).sum();
        // 15 % at random.
        assert!(overflow < 1024 * WAYS / 5, "{overflow} keys at {shift} find no place");
    }
}

#[test]
#[cfg_attr(miri, ignore = "takes too long there")]
fn random_operations_agree_with_a_plain_map() {
    let mut random = Random(7);
    // One key at a time where rows leave: which of them do is not for the map to know.
    for (row_type, rows, batch) in TYPES.into_iter().flat_map(|row_type| [(row_type, 60, 1), (row_type, 4000, 20)]) {
        let cache = Cache::new(layout(9, row_type), rows).unwrap();
        // What was put last of each key; the cache may have lost it.
        let mut model: HashMap<i64, (u64, f32)> = HashMap::new();
        for step in 1..times(900, 3000) as u64 {
            let mut keys: Vec<i64> = (0..batch).map(|_| random.below(100) as i64 - 50).collect();
            keys.sort_unstable();
            keys.dedup();
            random.shuffle(&mut keys);
            let versions: Vec<u64> = keys.iter().map(|_| random.below_u64(step)).collect();
            let number = |_: &i64| (!random.once_in(4)).then(|| 1.0 + random.below(100) as f32);
            let numbers: Vec<Option<f32>> = keys.iter().map(number).collect();
            let changes: Vec<Change> = (0..keys.len()).map(|at| (keys[at], versions[at], numbers[at])).collect();
            let before = look_up(&cache, &keys);
            let is_update = random.once_in(2);
            if is_update {
                update(&cache, &changes)
            } else {
                insert(&cache, &changes)
            }
            for (&(key, version, number), before) in changes.iter().zip(before) {
                let kept = before.is_some_and(|_| model[&key].0 > version);
                let _replaced = match number {
                    Some(number) if !kept && (!is_update || before.is_some()) => model.insert(key, (version, number)),
                    None if is_update && !kept => model.remove(&key),
                    _ => None,
                };
            }
            let all: Vec<i64> = (-50..50).collect();
            let found = look_up(&cache, &all);
            for (key, found) in all.iter().zip(&found) {
                if let Some(found) = found {
                    assert!((found / model[key].1 - 1.0).abs() < 1e-3, "{key}: {found} and {:?}", model[key]);
                }
            }
            assert_eq!(cache.len(), found.iter().flatten().count());
            if random.once_in(200) {
                cache.clear();
            }
        }
    }
}

/// Eight threads look up, put, change and delete rows that tell their key and version in every number. No row is ever
/// seen that is of another key, or half of one version and half of another, or older than an update that was complete.
#[test]
fn threads_see_whole_rows() {
    // As many versions as the numbers of a type can tell apart.
    for (row_type, dim, versions) in [(RowType::F32, 83, 4096), (RowType::F16, 131, 8)] {
        let load = Load {
            cache: Cache::new(layout(dim, row_type), KEYS / 2).unwrap(),
            versions,
            announced: (0..KEYS).map(|_| AtomicU64::new(1)).collect(),
            complete: (0..KEYS).map(|_| AtomicU64::new(1)).collect(),
            updating: Mutex::new(()),
            hits: AtomicUsize::new(0),
        };
        let end = Instant::now() + if cfg!(miri) { Duration::from_millis(200) } else { Duration::from_secs(2) };
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let load = &load;
                scope.spawn(move || {
                    let mut random = Random(thread);
                    while Instant::now() < end {
                        let missing = load.look_up(&mut random);
                        if thread < 6 {
                            load.put(&missing)
                        } else {
                            load.change(&mut random)
                        }
                        if random.once_in(1000) {
                            load.cache.clear();
                        }
                    }
                });
            }
        });
        let changes: u64 = load.complete.iter().map(|version| version.load(Ordering::SeqCst) - 1).sum();
        assert!(cfg!(miri) || (load.hits.into_inner() > 1000 && changes > 100));
    }
}

const KEYS: usize = 200;

struct Load {
    cache: Cache,
    versions: u64,
    /// The version that each key has below the cache.
    announced: Vec<AtomicU64>,
    /// The same once it has reached the cache.
    complete: Vec<AtomicU64>,
    /// Updates of a table come one after the other.
    updating: Mutex<()>,
    hits: AtomicUsize,
}

impl Load {
    fn number(&self, key: i64, version: u64) -> f32 {
        (key.cast_unsigned() * self.versions + version % self.versions) as f32
    }

    /// Looks random keys up and gives those that were missing.
    fn look_up(&self, random: &mut Random) -> Vec<i64> {
        let keys: Vec<i64> = (0..32).map(|_| random.below(KEYS) as i64).collect();
        let least: Vec<u64> = keys.iter().map(|&key| self.complete[key as usize].load(Ordering::SeqCst)).collect();
        let (mut numbers, mut missing) = (vec![f32::NAN; 32 * self.cache.layout.dim()], Vec::new());
        self.cache.lookup(&keys, &mut numbers, &mut missing);
        for (place, row) in numbers.chunks_exact(self.cache.layout.dim()).enumerate() {
            if !missing.contains(&(place as u32)) {
                self.hits.fetch_add(1, Ordering::Relaxed);
                self.check(keys[place], least[place], row);
            }
        }
        let mut missing: Vec<i64> = missing.iter().map(|&place| keys[place as usize]).collect();
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    fn check(&self, key: i64, least: u64, row: &[f32]) {
        assert!(row.iter().all(|&number| number == row[0]), "a torn row of key {key}: {row:?}");
        let (of, version) = (row[0] as u64 / self.versions, row[0] as u64 % self.versions);
        assert_eq!(of, key.cast_unsigned(), "a row of another key");
        if self.versions > 1000 {
            let newer = (version + self.versions - least % self.versions) % self.versions;
            assert!(newer < self.versions / 2, "key {key} has version {version}, and {least} was complete");
        }
    }

    /// Puts what is found below.
    fn put(&self, keys: &[i64]) {
        let announced = |key: i64| self.announced[key as usize].load(Ordering::SeqCst);
        let found: Vec<u64> = keys.iter().map(|&key| announced(key)).collect();
        let change = |(&key, &version): (&i64, &u64)| (key, version, Some(self.number(key, version)));
        let changes: Vec<Change> = keys.iter().zip(&found).map(change).collect();
        with_rows(self.cache.layout, &changes, |rows| self.cache.insert(rows, &|at| announced(keys[at]) == found[at]));
    }

    /// Changes or deletes a row.
    fn change(&self, random: &mut Random) {
        let _one_at_a_time = self.updating.lock();
        let key = random.below(KEYS) as i64;
        let version = self.announced[key as usize].load(Ordering::SeqCst) + 1;
        self.announced[key as usize].store(version, Ordering::SeqCst);
        update(&self.cache, &[(key, version, (!random.once_in(3)).then(|| self.number(key, version)))]);
        self.complete[key as usize].store(version, Ordering::SeqCst);
    }
}
