//! Updates: none is lost, by whatever end of the process, and none that is damaged counts.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use super::*;

#[test]
fn updates_count_by_their_version_and_survive() {
    let table = Table::new(&[1, 2, 3, 4]);
    let disk = table.open(false).unwrap();
    assert!(!table.updates().exists(), "nothing is made before it is needed");
    update(&disk, 0, &[4], Some(10)).unwrap();
    update(&disk, 5, &[1, 2, 99], Some(20)).unwrap();
    update(&disk, 4, &[1], Some(30)).unwrap();
    update(&disk, 5, &[2], Some(40)).unwrap();
    update(&disk, 6, &[3], None).unwrap();
    update(&disk, 5, &[3], Some(50)).unwrap();
    update(&disk, 9, &[], None).unwrap();
    let right = [
        (1, (5, Some(row(20)))),
        (2, (5, Some(row(40)))),
        (3, (6, None)),
        (4, (0, Some(row(10)))),
        (99, (5, Some(row(20)))),
    ];
    let right = BTreeMap::from(right);
    let asked = [1, 2, 3, 4, 5, 99];
    assert_eq!(fetch(&disk, &asked).0, right);
    assert!(disk.memory() > 0);
    drop(disk);
    for read_only in [false, true, true] {
        let disk = table.open(read_only).unwrap();
        assert_eq!(fetch(&disk, &asked).0, right, "read-only: {read_only}");
    }
    let disk = table.open(false).unwrap();
    update(&disk, 7, &[3], Some(60)).unwrap();
    assert_eq!(get(&disk, 3), Some((7, Some(row(60)))));
}

#[test]
fn a_new_table_replaces_the_old_one_with_its_updates() {
    let table = Table::new(&[1, 2]);
    let disk = table.open(false).unwrap();
    update(&disk, 5, &[1], Some(9)).unwrap();
    drop(disk);
    // As a build leaves it that is ended before it has removed the updates.
    let aside = table.folder.path().join("aside");
    copy_folder(&table.updates(), &aside);
    build(&source(table.folder.path(), &[1, 2]), &table.path, RowType::F32).unwrap();
    assert!(!table.updates().exists() && !table.folder.path().join("table.pgt.new").exists());
    fs::rename(&aside, table.updates()).unwrap();
    assert_eq!(get(&table.open(true).unwrap(), 1), Some((0, Some(row(0)))));
    assert_eq!(get(&table.open(false).unwrap(), 1), Some((0, Some(row(0)))));
    assert!(!table.updates().exists());
    // The table of someone else under the same name.
    let disk = table.open(false).unwrap();
    update(&disk, 5, &[1], Some(9)).unwrap();
    drop(disk);
    let other = Table::new(&[1]);
    fs::rename(&other.path, &table.path).unwrap();
    let error = table.open(false).err().unwrap();
    assert!(error.message().contains("table.pgt.updates") && error.message().contains("another table"), "{error}");
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for item in fs::read_dir(from).unwrap() {
        let item = item.unwrap();
        let to = to.join(item.file_name());
        if item.path().is_dir() {
            copy_folder(&item.path(), &to);
        } else {
            fs::copy(item.path(), to).unwrap();
        }
    }
}

#[test]
fn updates_that_are_lost_are_missed() {
    let table = Table::new(&[1, 2]);
    let disk = table.open(false).unwrap();
    update(&disk, 1, &[1], Some(9)).unwrap();
    drop(disk);
    let aside = table.folder.path().join("aside");
    copy_folder(&table.updates(), &aside);
    let disk = table.open(false).unwrap();
    update(&disk, 2, &[2], Some(9)).unwrap();
    drop(disk);
    fs::remove_dir_all(table.updates()).unwrap();
    for (what, found) in
        [("gone", "is not there; it had 0 updates of at least 2"), ("old", "has 1 updates of at least 2")]
    {
        for read_only in [true, false] {
            let error = table.open(read_only).err().unwrap();
            assert!(error.message().contains(found) && error.message().contains(".updates"), "{what}: {error}");
        }
        if what == "gone" {
            copy_folder(&aside, &table.updates());
        }
    }
    fs::remove_dir_all(table.updates()).unwrap();
    fs::write(table.updates(), "no folder").unwrap();
    let error = table.open(false).err().unwrap();
    assert!(error.message().contains("table.pgt.updates"), "{error}");
}

#[test]
fn damaged_updates_are_an_error_and_never_an_old_row() {
    let table = Table::new(&[1, 2, 3]);
    let disk = table.open(false).unwrap();
    for version in 1..20 {
        update(&disk, version, &[1, 2, version as i64 + 100], Some(version)).unwrap();
    }
    let asked: Vec<i64> = (1..4).chain(101..120).collect();
    let right = fetch(&disk, &asked).0;
    drop(disk);
    let good = table.folder.path().join("good");
    fs::rename(table.updates(), &good).unwrap();
    let length = fs::metadata(good.join("db")).unwrap().len();
    let (mut random, mut refused) = (Random(3), 0);
    for _ in 0..150 {
        copy_folder(&good, &table.updates());
        let file = fs::OpenOptions::new().read(true).write(true).open(table.updates().join("db")).unwrap();
        let at = random.below_u64(length.min(8192));
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << random.below(8)], at).unwrap();
        drop(file);
        match table.open(false) {
            Ok(disk) => {
                let (known, outcome) = fetch(&disk, &asked);
                assert!(outcome.is_err() || known == right, "byte {at}");
                assert!(known.iter().all(|(key, known)| right.get(key) == Some(known)), "byte {at}");
            }
            Err(error) => {
                assert!(error.message().contains("table.pgt.updates"), "{error}");
                refused += 1;
            }
        }
        fs::remove_dir_all(table.updates()).unwrap();
    }
    assert!(refused > 0);
}

const CHILD: &str = "PAGODA_TEST_UPDATES";

#[test]
fn nothing_acknowledged_is_lost_when_the_process_is_killed() {
    let table = Table::new(&(0..100).collect::<Vec<_>>());
    let (mut acknowledged, mut random) = (0_u64, Random(5));
    for round in 0..8 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "embedding::disk::tests::updates::child", "--ignored", "--nocapture"])
            .env(CHILD, &table.path)
            .env("PAGODA_TEST_FROM", (acknowledged + 1).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 3 + random.below(40);
        for line in lines {
            // Whatever was said before it was killed counts, though nobody had read it yet.
            if let Some(version) = line.unwrap().strip_prefix("done ") {
                acknowledged = version.parse().unwrap();
                if left > 0 {
                    let error = table.open(acknowledged % 2 == 0).err().expect("the other process has it");
                    assert_eq!(error.status(), Status::Busy);
                    left -= 1;
                    if left == 0 {
                        child.kill().unwrap();
                    }
                }
            }
        }
        child.wait().unwrap();
        let disk = table.open(round % 2 == 0).unwrap();
        let (known, outcome) = fetch(&disk, &(0..100).collect::<Vec<_>>());
        outcome.unwrap();
        for (key, (version, found)) in known {
            // The last version that this key got and that was acknowledged.
            let least = acknowledged.saturating_sub((acknowledged + 100 - key as u64) % 100);
            assert!(
                version >= least && version <= acknowledged + 1,
                "key {key}: {version}, {acknowledged} was written"
            );
            assert_eq!(found, Some(if version == 0 { row(key as u64) } else { row(version) }), "key {key}");
        }
    }
    assert!(acknowledged > 8);
}

#[test]
#[ignore = "the process that is killed in the test above"]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    let from: u64 = std::env::var("PAGODA_TEST_FROM").unwrap().parse().unwrap();
    let disk = Disk::open(&DiskOptions { path: path.into(), read_only: false }).unwrap();
    println!();
    for version in from.. {
        update(&disk, version, &[version as i64 % 100], Some(version)).unwrap();
        writeln!(std::io::stdout().lock(), "done {version}").unwrap();
    }
}

#[test]
fn lookups_go_on_while_rows_change() {
    let keys: Vec<i64> = (0..500).collect();
    let table = Table::new(&keys);
    let disk = table.open(false).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for version in 1..100 {
                let some: Vec<i64> = (0..50).map(|key| key * 10).collect();
                update(&disk, version, &some, Some(version)).unwrap();
            }
        });
        let mut newest = 0;
        while !writer.is_finished() {
            let (known, outcome) = fetch(&disk, &keys);
            outcome.unwrap();
            assert_eq!(known.len(), keys.len());
            for (key, (version, found)) in known {
                assert_eq!(found, Some(row(if version == 0 { key as u64 } else { version })), "key {key}");
                if key == 0 {
                    assert!(version >= newest, "versions do not go back");
                    newest = version;
                }
            }
        }
    });
    assert_eq!(get(&disk, 490), Some((99, Some(row(99)))));
}
