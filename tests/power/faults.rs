//! Full and failing disks: each call that writes an update is made to fail in turn. The caller gets an error, nothing
//! acknowledged is lost, and the table works again when the disk does.

use std::collections::BTreeMap;

use pagoda::Status;
use pagoda_test_support::Random;

use crate::recorder::{Fault, Recording};
use crate::tables::{Change, Place};

/// The versions that a key may have: the last acknowledged one, and later ones that failed.
type Allowed = BTreeMap<i64, Vec<Option<u64>>>;

#[test]
fn a_full_disk_at_each_write_of_an_update() {
    campaign(libc::ENOSPC, 1);
}

#[test]
fn a_disk_that_stays_full() {
    campaign(libc::ENOSPC, u64::MAX);
}

#[test]
fn a_failing_disk_at_each_write_of_an_update() {
    campaign(libc::EIO, 1);
}

fn campaign(errno: i32, count: u64) {
    let mut runs = 0;
    for from in 0.. {
        // The first update creates the log.
        let happened = [0, 2].map(|before| run(Fault { from, count, errno }, before));
        runs += 2;
        if happened == [false; 2] {
            break;
        }
    }
    assert!(runs > 20, "{runs} runs");
    println!("{runs} runs");
}

/// Returns whether the fault happened, after some successful updates.
fn run(fault: Fault, before: u64) -> bool {
    let place = Place::new(4, 20);
    let recording = place.record();
    let (embeddings, table) = place.open().unwrap();
    let mut random = Random(fault.from);
    let mut allowed: Allowed = (0..place.keys).map(|key| (key, vec![Some(0)])).collect();
    let mut version = 0;
    let mut try_one = |recording: &Recording, allowed: &mut Allowed, must: bool| {
        version += 1;
        let change = Change::random(&place, version, 5, &mut random);
        let outcome = change.apply(&place, &table);
        assert!(!must || outcome.is_ok(), "fault at call {}: {outcome:?}", fault.from);
        for key in &change.keys {
            let versions = allowed.get_mut(key).unwrap();
            if outcome.is_ok() {
                versions.clear();
            }
            versions.push((!change.deleted).then_some(version));
        }
        match outcome {
            Ok(()) => recording.acknowledge(version),
            Err(error) => {
                assert_eq!(error.status(), Status::Io, "{error}");
                assert!(error.message().contains("disk"), "{error}");
            }
        }
    };
    for _ in 0..before {
        try_one(&recording, &mut allowed, true);
    }
    recording.set_fault(Some(fault));
    for _ in 0..5 {
        try_one(&recording, &mut allowed, false);
    }
    let happened = recording.calls().1 > 0;
    recording.set_fault(None);
    // The disk works again: so does the table, without a reopen.
    try_one(&recording, &mut allowed, true);
    compare(&place.versions(&table).unwrap(), &allowed, fault);
    drop((embeddings, table));
    let (_embeddings, table) = place.open().unwrap();
    compare(&place.versions(&table).unwrap(), &allowed, fault);
    happened
}

fn compare(found: &BTreeMap<i64, Option<u64>>, allowed: &Allowed, fault: Fault) {
    for (key, version) in found {
        let allowed = &allowed[key];
        assert!(allowed.contains(version), "fault at call {}: key {key} has {version:?}, not {allowed:?}", fault.from);
    }
}

#[test]
fn a_read_only_table_changes_nothing() {
    let place = Place::new(4, 20);
    let (embeddings, table) = place.open().unwrap();
    Change { version: 1, keys: vec![3], deleted: false }.apply(&place, &table).unwrap();
    drop((embeddings, table));
    let recording = place.record();
    // As on a disk that is mounted read-only.
    recording.set_fault(Some(Fault { from: 0, count: u64::MAX, errno: libc::EROFS }));
    let (_embeddings, table) = place.open_with(r#", "read_only": true"#).unwrap();
    assert_eq!(place.versions(&table).unwrap()[&3], Some(1));
    assert_eq!(recording.calls(), (0, 0), "nothing was to be changed");
    let refused = Change { version: 2, keys: vec![3], deleted: false }.apply(&place, &table).unwrap_err();
    assert_eq!(refused.status(), Status::Unsupported);
}
