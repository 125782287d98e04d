//! A table that owns its memory: rows come, change and go, also while they are looked up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use pagoda::device::{Gpu, HostRows, MissList, RowCache};
use pagoda_kernels::Combiner;
use pagoda_kernels::cuda::Type;
use pagoda_test_support::Random;

use crate::row_lookup::{Odd, bag, encoded};

/// Puts rows whose numbers all are their key's value.
fn put(table: &RowCache, dim: usize, element: Type, rows: &[(i64, u64, Option<f32>)], only_present: bool) {
    let keys: Vec<i64> = rows.iter().map(|row| row.0).collect();
    let versions: Vec<u64> = rows.iter().map(|row| row.1).collect();
    let numbers: Vec<f32> = rows.iter().flat_map(|row| vec![row.2.unwrap_or(f32::NAN); dim]).collect();
    let deleted: Vec<bool> = rows.iter().map(|row| row.2.is_none()).collect();
    let rows = encoded(&numbers, element);
    let rows = HostRows { keys: &keys, versions: &versions, rows: &rows, deleted: &deleted };
    table.put(&rows, only_present, &|_| true).unwrap();
}

/// Random changes, against a map: by version, in place, deletions, and what is passed over.
#[test]
#[ignore = "needs a GPU"]
fn rows_change_as_their_versions_say() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::shared(0).unwrap();
    let mut random = Random(8);
    for (element, dim) in [(Type::F32, 128), (Type::F16, 64), (Type::F32, 7), (Type::F16, 3)] {
        let table = RowCache::new(gpu, 100_000, dim, element).unwrap();
        let mut expected: HashMap<i64, (u64, f32)> = HashMap::new();
        let mut scratch = MissList::new(gpu, 2000).unwrap();
        for round in 0..40 {
            let only_present = random.once_in(3);
            let mut rows = HashMap::new();
            for _ in 0..random.below(300) {
                let value = (!random.once_in(4)).then(|| random.below(2000) as f32);
                rows.insert(random.below(600) as i64 - 300, (random.below(6) as u64, value));
            }
            let rows: Vec<_> = rows.into_iter().map(|(key, (version, value))| (key, version, value)).collect();
            put(&table, dim, element, &rows, only_present);
            for (key, version, value) in rows {
                match (expected.get(&key), value) {
                    (Some((held, _)), _) if *held > version => {}
                    (Some(_), None) => drop(expected.remove(&key)),
                    (None, _) if only_present => {}
                    (_, Some(value)) => drop(expected.insert(key, (version, value))),
                    (None, None) => {}
                }
            }
            assert_eq!(table.len(), expected.len(), "{element:?} of {dim}, round {round}");
            let keys: Vec<i64> = (-310..310).collect();
            let bagged = bag(&table, dim, &keys, None, &mut scratch, Odd::default());
            for (place, key) in keys.iter().enumerate() {
                let row = &bagged.vectors[place * dim..][..dim];
                assert_eq!(bagged.found[place], expected.contains_key(key), "key {key}, round {round}");
                let held = expected.get(key).map(|held| held.1);
                assert!(held.is_none_or(|value| row.iter().all(|number| *number == value)), "key {key}: {row:?}");
            }
            // Every key once, in steps of whatever size.
            let (mut at, mut listed) = (0, Vec::new());
            loop {
                table.keys(&mut at, 1 + random.below(500), &mut listed).unwrap();
                if at == 0 {
                    break;
                }
            }
            listed.sort_unstable();
            let mut held: Vec<i64> = expected.keys().copied().collect();
            held.sort_unstable();
            assert_eq!(listed, held, "round {round}");
        }
        // Those that are not wanted any more are not put, and long rows go through in more than one part.
        let many: Vec<i64> = (1000..41_000).collect();
        let rows = encoded(&vec![1.0; many.len() * dim], element);
        let (versions, deleted) = (vec![0; many.len()], vec![false; many.len()]);
        let rows = HostRows { keys: &many, versions: &versions, rows: &rows, deleted: &deleted };
        let before = table.len();
        table.put(&rows, false, &|index| index % 2 == 0).unwrap();
        // A few sets of seven get more than that.
        let more = table.len() - before;
        assert!((19_950..=20_000).contains(&more), "{more}");
    }
}

/// Lookups that combine, while threads put more rows than there is room for, change and delete them: what is found is
/// whole, and the key's own.
#[test]
#[ignore = "needs a GPU"]
fn rows_are_whole_while_others_change_them() {
    let _alone = crate::GPU.write().unwrap_or_else(std::sync::PoisonError::into_inner);
    let gpu = Gpu::shared(0).unwrap();
    const KEYS: usize = 2048;
    for (element, dim) in
        [(Type::F32, 128), (Type::F16, 128), (Type::F32, 33), (Type::F32, 384), (Type::F16, 700), (Type::F32, 900)]
    {
        let table = RowCache::new(gpu, KEYS / 2, dim, element).unwrap();
        let keys: Vec<i64> = (0..KEYS as i64).collect();
        let offsets: Vec<i64> = (0..=KEYS as i64).collect();
        // A row is its key and the round that it was put in, in numbers that every type has.
        let value = |key: i64, round: usize| (key % 64) as f32 + 64.0 * (round % 16) as f32;
        let stop = AtomicBool::new(false);
        let mut found = 0;
        std::thread::scope(|scope| {
            for writer in 0..2 {
                let (keys, table, stop) = (&keys, &table, &stop);
                scope.spawn(move || {
                    for round in 0.. {
                        let changed =
                            |key: &i64| (!(*key as usize + round).is_multiple_of(7)).then(|| value(*key, round));
                        let rows: Vec<_> = keys.iter().map(|key| (*key, 0, changed(key))).collect();
                        put(table, dim, element, &rows, (round + writer) % 3 == 0);
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                });
            }
            let mut scratch = MissList::new(gpu, KEYS).unwrap();
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for round in 0..60 {
                    let pooling = (round % 4 != 0).then_some((Combiner::Mean, &offsets[..]));
                    let bagged = bag(&table, dim, &keys, pooling, &mut scratch, Odd::default());
                    for (key, row) in bagged.vectors.chunks_exact(dim).enumerate().filter(|(key, _)| bagged.found[*key])
                    {
                        let whole = row.iter().all(|number| *number == row[0]);
                        assert!(whole, "{element:?} of {dim}: key {key} is torn: {row:?}");
                        assert_eq!(row[0] as usize % 64, key % 64, "{element:?} of {dim}: another key's row");
                        found += 1;
                    }
                }
            }));
            stop.store(true, Ordering::Relaxed);
            checked.unwrap();
        });
        assert!(found > KEYS, "hardly anything was found: {found}");
    }
}
