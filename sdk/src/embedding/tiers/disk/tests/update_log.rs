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
    fs::copy(table.updates(), &aside).unwrap();
    build(&source(table.folder.path(), &[1, 2]), &table.path, RowType::F32).unwrap();
    assert!(!table.updates().exists() && !table.folder.path().join("table.pgt.new").exists());
    fs::rename(&aside, table.updates()).unwrap();
    assert_eq!(get(&table.open(true).unwrap(), 1), Some((0, Some(row(0)))));
    assert_eq!(get(&table.open(false).unwrap(), 1), Some((0, Some(row(0)))));
    assert!(!table.updates().exists());
    // Another table under the same name.
    let disk = table.open(false).unwrap();
    update(&disk, 5, &[1], Some(9)).unwrap();
    drop(disk);
    let other = Table::new(&[1]);
    fs::rename(&other.path, &table.path).unwrap();
    let error = table.open(false).err().unwrap();
    assert!(error.message().contains("table.pgt.updates") && error.message().contains("another table"), "{error}");
}

#[test]
fn updates_that_are_lost_are_missed() {
    let table = Table::new(&[1, 2]);
    let disk = table.open(false).unwrap();
    update(&disk, 1, &[1], Some(9)).unwrap();
    drop(disk);
    let aside = table.folder.path().join("aside");
    fs::copy(table.updates(), &aside).unwrap();
    let disk = table.open(false).unwrap();
    update(&disk, 2, &[2], Some(9)).unwrap();
    drop(disk);
    fs::remove_file(table.updates()).unwrap();
    for (what, found) in
        [("gone", "is not there; it had 0 updates of at least 2"), ("old", "has 1 updates of at least 2")]
    {
        for read_only in [true, false] {
            let error = table.open(read_only).err().unwrap();
            assert!(error.message().contains(found) && error.message().contains(".updates"), "{what}: {error}");
        }
        if what == "gone" {
            fs::copy(&aside, table.updates()).unwrap();
        }
    }
    fs::write(table.updates(), "no log").unwrap();
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
    let good = fs::read(table.updates()).unwrap();
    let mut random = Random(3);
    for _ in 0..400 {
        let (mut bytes, at) = (good.clone(), random.below(good.len()));
        bytes[at] ^= 1 << random.below(8);
        // Cut, too, and with more behind it.
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.extend(vec![bytes[at]; at]),
            _ => {}
        }
        fs::write(table.updates(), &bytes).unwrap();
        let error = table.open(random.once_in(2)).err().expect("the marker tells that an update is missing");
        assert!(error.message().contains("table.pgt.updates"), "byte {at}: {error}");
    }
    fs::write(table.updates(), &good).unwrap();
    let disk = table.open(false).unwrap();
    assert_eq!(fetch(&disk, &asked).0, right);
    // Damage while it is open.
    let file = fs::OpenOptions::new().write(true).open(table.updates()).unwrap();
    file.write_all_at(&vec![0x55; good.len() - 64], 64).unwrap();
    let (known, outcome) = fetch(&disk, &asked);
    assert!(outcome.unwrap_err().message().contains("was not written"));
    assert_eq!(known, BTreeMap::from([(3, (0, Some(row(2))))]), "what was not updated is known");
    // A change sets it right.
    update(&disk, 3, &[1], Some(7)).unwrap();
    assert_eq!(get(&disk, 1), Some((3, Some(row(7)))));
}

#[test]
fn a_log_that_is_mostly_garbage_is_written_anew() {
    let keys: Vec<i64> = (0..2000).collect();
    let table = Table::new(&keys);
    let disk = table.open(false).unwrap();
    let mut longest = 0;
    for version in 1..=200 {
        // Half of them each time, and some are deleted.
        let some: Vec<i64> = keys.iter().copied().filter(|key| (key + version as i64) % 2 == 0).collect();
        update(&disk, version, &some, (version % 7 != 0).then_some(version)).unwrap();
        longest = longest.max(fs::metadata(table.updates()).unwrap().len());
    }
    let now = fs::metadata(table.updates()).unwrap().len();
    // 200 updates of 1000 keys are 7 MB; twice 2000 keys and 8 MiB are not reached.
    assert_eq!(now, longest);
    for version in 201..=500 {
        update(&disk, version, &keys, Some(version)).unwrap();
        longest = longest.max(fs::metadata(table.updates()).unwrap().len());
    }
    let now = fs::metadata(table.updates()).unwrap().len();
    assert!(now < longest && longest < 9 << 20, "{now} of {longest}");
    update(&disk, 499, &[1], None).unwrap();
    let all_are_newest = |disk: &DiskTier| fetch(disk, &keys).0.values().all(|known| *known == (500, Some(row(500))));
    assert!(all_are_newest(&disk));
    drop(disk);
    assert!(all_are_newest(&table.open(true).unwrap()) && all_are_newest(&table.open(false).unwrap()));
}

const CHILD: &str = "PAGODA_TEST_UPDATES";

#[test]
fn nothing_acknowledged_is_lost_when_the_process_is_killed() {
    let table = Table::new(&(0..100).collect::<Vec<_>>());
    let (mut acknowledged, mut random) = (0_u64, Random(5));
    for round in 0..8 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "embedding::tiers::disk::tests::update_log::child", "--ignored", "--nocapture"])
            .env(CHILD, &table.path)
            .env("PAGODA_TEST_FROM", (acknowledged + 1).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut left = 3 + random.below(40);
        for line in lines {
            // Every acknowledgement before the kill counts, even if it was not read yet.
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
    let disk = DiskTier::open(&TableFileOptions { path: path.into(), read_only: false }).unwrap();
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
