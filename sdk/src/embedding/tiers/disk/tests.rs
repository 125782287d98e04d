//! The disk tier from outside: written rows are read back, and damaged ones are not.

mod update_log;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagoda_test_support::{Folder, Random, times};

use super::*;
use crate::embedding::row::RowType;
use crate::embedding::source::{Source, SourceOptions};

const DIM: usize = 3;

/// A source with these keys; row `i` has the numbers of [`numbers`].
fn source(folder: &Path, keys: &[i64]) -> Source {
    let folder = folder.join("source");
    fs::create_dir_all(&folder).unwrap();
    let rows = (0..keys.len()).flat_map(|row| numbers(row as u64)).flat_map(f32::to_le_bytes);
    fs::write(folder.join("key"), keys.iter().flat_map(|key| key.to_le_bytes()).collect::<Vec<_>>()).unwrap();
    fs::write(folder.join("emb_vector"), rows.collect::<Vec<_>>()).unwrap();
    Source::open(folder, &SourceOptions { dim: Some(DIM as u32), ..SourceOptions::default() }).unwrap()
}

/// What every type of row can hold.
fn numbers(seed: u64) -> [f32; DIM] {
    [127.0, (seed % 100) as f32, -((seed / 100 % 100) as f32)]
}

fn row(seed: u64) -> Vec<u8> {
    numbers(seed).into_iter().flat_map(f32::to_le_bytes).collect()
}

struct Table {
    folder: Folder,
    path: PathBuf,
}

impl Table {
    fn new(keys: &[i64]) -> Self {
        let folder = Folder::new();
        let path = folder.path().join("table.pgt");
        build(&source(folder.path(), keys), &path, RowType::F32).unwrap();
        Self { folder, path }
    }

    fn open(&self, read_only: bool) -> Result<DiskTier> {
        DiskTier::open(&TableFileOptions { path: self.path.clone(), read_only })
    }

    fn updates(&self) -> PathBuf {
        self.folder.path().join("table.pgt.updates")
    }
}

/// A version, and a row unless it was deleted.
type Known = (u64, Option<Vec<u8>>);

fn fetch(disk: &DiskTier, keys: &[i64]) -> (BTreeMap<i64, Known>, Result<()>) {
    let mut known = BTreeMap::new();
    let outcome = disk.fetch(keys, None, &mut |place, Version(version), row| {
        let before = known.insert(keys[place], (version, row.map(<[u8]>::to_vec)));
        assert_eq!(before, None, "a key is told once");
    });
    (known, outcome)
}

fn get(disk: &DiskTier, key: i64) -> Option<Known> {
    let (mut known, outcome) = fetch(disk, &[key]);
    outcome.unwrap();
    known.remove(&key)
}

/// Sets or deletes keys, all with one version.
fn update(disk: &DiskTier, version: u64, keys: &[i64], seed: Option<u64>) -> Result<()> {
    let rows: Vec<u8> = keys.iter().flat_map(|_| row(seed.unwrap_or(0))).collect();
    let (versions, deleted) = (vec![Version(version); keys.len()], vec![seed.is_none(); keys.len()]);
    disk.update(&Rows { keys, versions: &versions, rows: &rows, deleted: &deleted })
}

#[test]
fn every_key_has_its_row_and_others_have_none() {
    let mut random = Random(7);
    let mut keys: Vec<i64> = (0..20_000).map(|_| random.bits().cast_signed()).collect();
    keys.extend([0, -1, i64::MIN, i64::MAX, 1 << 32, (1 << 32) + 1, -(1 << 40)]);
    let table = Table::new(&keys);
    let disk = table.open(false).unwrap();
    assert_eq!((disk.keys(), disk.records(), disk.name()), (keys.len() as u64, keys.len() as u64, "disk"));
    let right: BTreeMap<_, _> =
        keys.iter().enumerate().map(|(number, &key)| (key, (0, Some(row(number as u64))))).collect();
    let mut asked = keys.clone();
    asked.extend((0..20_000).map(|_| random.bits().cast_signed()));
    for cold in [true, false] {
        disk.cold.store(cold, Relaxed);
        let (known, outcome) = fetch(&disk, &asked);
        assert!(known == right && outcome.is_ok(), "cold: {cold}");
    }
    assert!(fetch(&disk, &[]).1.is_ok());
}

#[test]
fn tables_of_none_and_of_one_row() {
    let table = Table::new(&[]);
    let disk = table.open(false).unwrap();
    assert_eq!(fetch(&disk, &[0, -1, 5]).0.len(), 0);
    update(&disk, 3, &[5], Some(1)).unwrap();
    assert_eq!(get(&disk, 5), Some((3, Some(row(1)))));
    let table = Table::new(&[-9]);
    let disk = table.open(true).unwrap();
    assert_eq!(fetch(&disk, &[0, -9, 5]).0, BTreeMap::from([(-9, (0, Some(row(0))))]));
}

#[test]
fn of_several_rows_of_a_key_the_last_counts() {
    let folder = Folder::new();
    let path = folder.path().join("table.pgt");
    let keys = [4, 4, 7, 4, -1, 7];
    let built = build(&source(folder.path(), &keys), &path, RowType::F32).unwrap();
    assert_eq!((built.keys, built.duplicates, built.bytes), (3, 3, fs::metadata(&path).unwrap().len()));
    let disk = DiskTier::open(&TableFileOptions { path, read_only: true }).unwrap();
    assert_eq!((disk.keys(), disk.records()), (3, 6));
    let right = [(4, 3), (7, 5), (-1, 4)].map(|(key, seed)| (key, (0, Some(row(seed)))));
    assert_eq!(fetch(&disk, &[4, 7, -1]).0, BTreeMap::from(right));
}

#[test]
fn rows_are_converted_when_a_table_is_built() {
    let folder = Folder::new();
    let source = source(folder.path(), &(0..300).collect::<Vec<_>>());
    for row_type in [RowType::F32, RowType::F16, RowType::I8] {
        let path = folder.path().join("table.pgt");
        build(&source, &path, row_type).unwrap();
        let disk = DiskTier::open(&TableFileOptions { path, read_only: true }).unwrap();
        assert_eq!(disk.layout(), Layout::new(DIM as u32, row_type).unwrap());
        for (key, (_, row)) in fetch(&disk, &(0..300).collect::<Vec<_>>()).0 {
            let mut found = [0.0; DIM];
            disk.layout().decode(&row.unwrap(), &mut found);
            assert_eq!(found, numbers(key as u64), "{row_type:?}");
        }
    }
}

#[test]
fn no_damage_of_a_table_file_gives_a_wrong_row() {
    let keys = [1, -2, 1 << 40, 4, 5, 6, 7, 1];
    let table = Table::new(&keys);
    let good = fs::read(&table.path).unwrap();
    let right = fetch(&table.open(true).unwrap(), &keys[1..]).0;
    let absent = [100, -100, 0];
    let asked: Vec<i64> = keys[1..].iter().chain(&absent).copied().collect();
    let check = |what: &dyn Fn() -> String| {
        let Ok(disk) = table.open(true) else { return false };
        for cold in [false, true] {
            disk.cold.store(cold, Relaxed);
            // One by one, so that an error says which.
            for key in &asked {
                match fetch(&disk, &[*key]) {
                    (known, Ok(())) => assert_eq!(known.get(key), right.get(key), "{} key {key}", what()),
                    (known, Err(_)) => assert!(known.is_empty() && disk.damaged() > 0, "{} key {key}", what()),
                }
            }
            let (known, outcome) = fetch(&disk, &asked);
            assert!(known.iter().all(|(key, known)| right.get(key) == Some(known)), "{}", what());
            assert!(outcome.is_err() || known == right, "{}", what());
        }
        disk.damaged() == 0
    };
    assert!(check(&|| "untouched".into()));
    let mut harmless = 0;
    for (at, &byte) in good.iter().enumerate() {
        let empty = (80..128).contains(&at) || (144..4096).contains(&at);
        let flips = if empty { times(1, 9) } else { 9 };
        for flip in [255, 1, 2, 4, 8, 16, 32, 64, 128].into_iter().take(flips) {
            let file = fs::OpenOptions::new().write(true).open(&table.path).unwrap();
            file.write_all_at(&[byte ^ flip], at as u64).unwrap();
            let unseen = check(&|| format!("byte {at} ^ {flip}"));
            file.write_all_at(&[byte], at as u64).unwrap();
            harmless += usize::from(unseen && !empty);
        }
    }
    // No lookup reads the first of the two rows of key 1, and there are two markers.
    assert_eq!(harmless, 9 * (24 + 16), "everything else that means something is checked");
    for length in 0..good.len() {
        fs::write(&table.path, &good[..length]).unwrap();
        assert!(table.open(true).is_err(), "cut to {length}");
    }
    fs::write(&table.path, [&good[..], &[0]].concat()).unwrap();
    assert!(table.open(true).is_err());
}

#[test]
fn a_damaged_row_fails_its_own_key_alone() {
    let table = Table::new(&(0..1000).collect::<Vec<_>>());
    let file = fs::OpenOptions::new().write(true).open(&table.path).unwrap();
    file.write_all_at(&[0xEE], fs::metadata(&table.path).unwrap().len() - 24).unwrap();
    let disk = table.open(true).unwrap();
    let (known, outcome) = fetch(&disk, &(0..1000).collect::<Vec<_>>());
    assert_eq!((known.len(), disk.damaged()), (999, 1));
    let message = outcome.unwrap_err();
    assert!(message.message().contains("999: the row is damaged"), "{message}");
}

#[test]
fn a_file_that_is_cut_is_an_error_not_a_signal() {
    let table = Table::new(&(0..1000).collect::<Vec<_>>());
    let disk = table.open(true).unwrap();
    fs::OpenOptions::new().write(true).open(&table.path).unwrap().set_len(4096).unwrap();
    let error = fetch(&disk, &[1]).1.unwrap_err();
    assert!(error.message().contains("and now 4096 bytes"), "{error}");
}

#[test]
fn what_is_late_is_an_error() {
    let table = Table::new(&[1, 2]);
    let disk = table.open(true).unwrap();
    let past = Some(Instant::now());
    let error = disk.fetch(&[1, 2], past, &mut |_, _, _| panic!("nothing is told")).unwrap_err();
    assert_eq!(error.status(), Status::Capacity);
    let later = Some(Instant::now() + Duration::from_secs(3600));
    disk.fetch(&[1, 2], later, &mut |_, _, _| ()).unwrap();
}

#[test]
fn a_table_that_is_read_only_is_not_updated() {
    let table = Table::new(&[1]);
    let disk = table.open(true).unwrap();
    let error = update(&disk, 1, &[1], Some(2)).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
    assert!(error.message().contains("without `read_only`"));
    assert!(!table.updates().exists());
    let found = Rows { keys: &[1], versions: &[Version(5)], rows: &row(9), deleted: &[false] };
    disk.put(&found, &|_| true).unwrap();
    assert_eq!(get(&disk, 1), Some((0, Some(row(0)))));
}

#[test]
fn many_read_or_one_writes() {
    let table = Table::new(&[1]);
    let source = source(table.folder.path(), &[1]);
    let busy = |outcome: Result<()>| assert_eq!(outcome.unwrap_err().status(), Status::Busy);
    let readers = [table.open(true).unwrap(), table.open(true).unwrap()];
    busy(table.open(false).map(drop));
    busy(build(&source, &table.path, RowType::F32).map(drop));
    drop(readers);
    let writer = table.open(false).unwrap();
    busy(table.open(false).map(drop));
    busy(table.open(true).map(drop));
    busy(build(&source, &table.path, RowType::F32).map(drop));
    drop(writer);
    build(&source, &table.path, RowType::F32).unwrap();
    table.open(false).unwrap();
}

#[test]
fn what_is_no_table_is_not_replaced_by_one() {
    let folder = Folder::new();
    let path = folder.path().join("table.pgt");
    fs::write(&path, "letters from home").unwrap();
    let error = build(&source(folder.path(), &[1]), &path, RowType::F32).unwrap_err();
    assert!(error.argument() == Some("path") && error.message().contains("no table"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"letters from home");
    let open = |path: PathBuf| DiskTier::open(&TableFileOptions { path, read_only: true }).err().unwrap();
    assert!(open(path).message().contains("PAGODATB"));
    assert_eq!(open(folder.path().join("missing")).status(), Status::NotFound);
}

#[test]
fn a_build_that_fails_leaves_what_was_there() {
    let table = Table::new(&[1, 2]);
    let source = source(table.folder.path(), &[1, 2, 3]);
    let rows = table.folder.path().join("source").join("emb_vector");
    fs::OpenOptions::new().write(true).open(rows).unwrap().set_len(12).unwrap();
    assert!(build(&source, &table.path, RowType::F32).is_err());
    assert!(!table.folder.path().join("table.pgt.new").exists());
    assert_eq!(table.open(true).unwrap().keys(), 2);
    // The rest of a killed build does no harm.
    fs::write(table.folder.path().join("table.pgt.new"), vec![1; 100_000]).unwrap();
    build(&self::source(table.folder.path(), &[1, 2, 3]), &table.path, RowType::F32).unwrap();
    let disk = table.open(true).unwrap();
    assert_eq!((disk.keys(), fetch(&disk, &[1, 2, 3]).0.len()), (3, 3));
}
