//! Tables over a real cluster: what a lookup gives while nodes fail.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use pagoda_test_support::Random;

use super::*;
use crate::embedding::lookup::background_fetch::BackgroundFetch;
use crate::embedding::lookup::tier_result::TierResult;
use crate::embedding::{EmbeddingTable, Embeddings, Miss, PsJson, Reach};

const DIM: usize = 4;
const KEYS: i64 = 2000;

fn row(key: i64, version: u64) -> [f32; DIM] {
    [key as f32, version as f32, -(key as f32), 0.5]
}

/// Tables over a cluster, over disk if there is something to say of it, in a cache that is too small to be of help.
fn tables(servers: &Servers, folder: &Folder, disk: Option<&str>, timeout: u32) -> Embeddings {
    tables_with(servers, folder, "m", "", "", disk, timeout)
}

fn tables_with(
    servers: &Servers,
    folder: &Folder,
    model: &str,
    before: &str,
    after: &str,
    disk: Option<&str>,
    timeout: u32,
) -> Embeddings {
    let keys: Vec<i64> = (0..KEYS).collect();
    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
    let rows: Vec<u8> = keys.iter().flat_map(|&key| row(key, 0)).flat_map(f32::to_le_bytes).collect();
    std::fs::write(folder.path().join("key"), bytes).unwrap();
    std::fs::write(folder.path().join("emb_vector"), rows).unwrap();
    let nodes: Vec<String> = servers.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
    let disk =
        disk.map_or_else(String::new, |more| format!(r#", "persistent_db": {{"type": "disk", "path": "disk"{more}}}"#));
    let json = format!(
        r#"{{"models": [{{"model": "{model}", "sparse_files": ["."], "embedding_table_names": ["t"],
            "embedding_vecsize_per_table": [{DIM}], "cache_rows": 70, "hit_rate_threshold": 1.0}}],
            "volatile_db": {before}{{"type": "redis_cluster", "address": "{}", "num_partitions": 24, "timeout_ms": {timeout},
            "breaker_failures": 3, "breaker_open_ms": 200}}{after} {disk} }}"#,
        nodes.join(";")
    );
    let embeddings = Embeddings::open(&PsJson::from_json(&json, Some(folder.path())).unwrap().options).unwrap();
    embeddings.wait();
    embeddings
}

/// Looks up some of the keys; says how many were found. Each has its own row, of some version.
fn look(table: &EmbeddingTable, random: &mut Random, version: u64) -> (usize, usize) {
    let keys: Vec<i64> = (0..200).map(|_| random.below(KEYS as usize) as i64).collect();
    let (mut numbers, mut found) = (vec![f32::NAN; keys.len() * DIM], vec![false; keys.len()]);
    table.lookup(&keys, &mut numbers, &mut found, Miss::Wait).unwrap();
    for ((key, got), &found) in keys.iter().zip(numbers.chunks_exact(DIM)).zip(&found) {
        let right = if found { row(*key, version) } else { [0.0; DIM] };
        assert_eq!(got, right, "key {key}");
    }
    (found.iter().filter(|&&found| found).count(), keys.len())
}

#[test]
fn a_node_that_dies_costs_no_row_that_lies_below() {
    let (mut servers, folder) = (Servers::start(), Folder::new());
    let embeddings = tables(&servers, &folder, Some(""), 2000);
    let table = embeddings.table("t").unwrap();
    let (done, lookups) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (table, done, lookups) = (&table, &done, &lookups);
            scope.spawn(move || {
                let mut random = Random(seed);
                while !done.load(Relaxed) {
                    let (found, asked) = look(table, &mut random, 0);
                    assert_eq!(found, asked);
                    lookups.fetch_add(1, Relaxed);
                }
            });
        }
        eventually("lookups run", || lookups.load(Relaxed) >= 30);
        servers.kill(1);
        eventually("the node is left alone", || embeddings.redis_stats().unwrap().trips > 0);
        let before = lookups.load(Relaxed);
        eventually("lookups run without the node", || lookups.load(Relaxed) >= before + 30);
        servers.start_one(1);
        servers.wait_until_well();
        done.store(true, Relaxed);
    });
    let mut random = Random(9);
    eventually("the node is used again", || {
        let before = embeddings.redis_stats().unwrap().errors;
        look(&table, &mut random, 0);
        embeddings.redis_stats().unwrap().errors == before
    });
}

#[test]
fn a_node_that_stalls_does_not_hold_up_a_lookup() {
    let (servers, folder) = (Servers::start(), Folder::new());
    let embeddings = tables(&servers, &folder, None, 300);
    let table = embeddings.table("t").unwrap();
    let mut random = Random(5);
    assert_eq!(look(&table, &mut random, 0), (200, 200));
    servers.signal(2, libc::SIGSTOP);
    for _ in 0..10 {
        let start = Instant::now();
        let (found, _) = look(&table, &mut random, 0);
        // What else runs on this machine may take its time; without a limit it would be for ever.
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert!((50..200).contains(&found), "the others' rows are found, and only they: {found}");
    }
    servers.signal(2, libc::SIGCONT);
    // What did not answer was not taken for absent.
    eventually("its rows are back", || look(&table, &mut random, 0).0 == 200);
}

#[test]
fn what_another_process_changes_is_seen_after_a_refresh() {
    let (servers, folder, other) = (Servers::start(), Folder::new(), Folder::new());
    let ours = tables(&servers, &folder, None, 5000);
    let theirs = tables(&servers, &other, None, 5000);
    let (ours, theirs) = (ours.table("t").unwrap(), theirs.table("t").unwrap());
    let keys: Vec<i64> = (0..KEYS).collect();
    let changed: Vec<f32> = keys.iter().flat_map(|&key| row(key, 7)).collect();
    let cached = |table: &EmbeddingTable| {
        let (mut numbers, mut found) = ([0.0; DIM], [false]);
        table.lookup(&[3], &mut numbers, &mut found, Miss::Wait).unwrap();
        numbers
    };
    assert_eq!(cached(&theirs), row(3, 0));
    ours.upsert(7, &keys, &changed, Reach::AtOnce).unwrap();
    assert_eq!(cached(&ours), row(3, 7));
    assert_eq!(cached(&theirs), row(3, 0), "the cache knows nothing of it");
    theirs.refresh();
    assert_eq!(cached(&theirs), row(3, 7));
    let mut random = Random(1);
    assert_eq!(look(&theirs, &mut random, 7), (200, 200));
}

#[test]
fn a_restart_brings_back_nothing_that_was_changed() {
    let (servers, folder) = (Servers::start(), Folder::new());
    let embeddings = tables(&servers, &folder, None, 5000);
    let table = embeddings.table("t").unwrap();
    table.upsert(5, &[1, 2], &[row(1, 5), row(2, 5)].concat(), Reach::AtOnce).unwrap();
    table.delete(5, &[3], Reach::AtOnce).unwrap();
    let expected = |table: &EmbeddingTable| {
        let (mut numbers, mut found) = ([0.0; 4 * DIM], [false; 4]);
        table.lookup(&[1, 2, 3, 4], &mut numbers, &mut found, Miss::Wait).unwrap();
        assert_eq!(found, [true, true, false, true]);
        assert_eq!(numbers[..2 * DIM], [row(1, 5), row(2, 5)].concat());
    };
    expected(&table);
    drop((embeddings, table));
    // Another folder and another model with the same rows is the same table.
    let (other, memory) = (Folder::new(), r#"[{"type": "hash_map"}, "#);
    let embeddings = tables_with(&servers, &other, "another", memory, "]", None, 5000);
    let table = embeddings.table("t").unwrap();
    expected(&table);
    // An older change is refused by all tiers, also by those that do not hold the key.
    table.upsert(4, &[1, 3], &[row(1, 4), row(3, 4)].concat(), Reach::AtOnce).unwrap();
    expected(&table);
}

#[test]
fn an_older_change_hides_nothing_while_the_cluster_is_slow_to_say_what_it_has() {
    let (servers, folder, other) = (Servers::start(), Folder::new(), Folder::new());
    let theirs = tables(&servers, &other, None, 5000);
    let ours = tables_with(&servers, &folder, "m", r#"[{"type": "hash_map"}, "#, "]", None, 2000);
    let (ours, theirs) = (ours.table("t").unwrap(), theirs.table("t").unwrap());
    // Keys that the table was not loaded with, so that host memory does not hold them.
    let (newer, older) = (KEYS + 1, KEYS + 2);
    theirs.upsert(10, &[newer], &row(newer, 10), Reach::AtOnce).unwrap();
    // Past the limit for reading, but not past that for writing, which begins then.
    for node in 0..3 {
        let _: () = servers.ask(node, &["CLIENT", "PAUSE", "3000", "ALL"]);
    }
    let upsert = || ours.upsert(5, &[newer, older], &[row(newer, 5), row(older, 5)].concat(), Reach::AtOnce);
    let error = upsert().unwrap_err();
    assert_eq!(error.status(), Status::Io, "{error}");
    assert!(error.message().contains("could not be told") && error.message().contains("time limit"), "{error}");
    let expected = || {
        let (mut numbers, mut found) = ([0.0; 2 * DIM], [false; 2]);
        ours.lookup(&[newer, older], &mut numbers, &mut found, Miss::Wait).unwrap();
        assert_eq!(numbers[..], [row(newer, 10), row(older, 5)].concat());
    };
    expected();
    upsert().unwrap();
    expected();
}

#[test]
fn an_outage_leaves_no_old_row_behind() {
    let (servers, folder) = (Servers::start(), Folder::new());
    let (theirs, ours) = (tables(&servers, &folder, None, 5000), Folder::new());
    let theirs = theirs.table("t").unwrap();
    let keys: Vec<i64> = (0..KEYS).collect();
    let rows: Vec<f32> = keys.iter().flat_map(|&key| row(key, 5)).collect();
    theirs.upsert(5, &keys, &rows, Reach::AtOnce).unwrap();
    let ours = tables(&servers, &ours, Some(""), 200);
    let ours = ours.table("t").unwrap();
    for node in 0..3 {
        servers.signal(node, libc::SIGSTOP);
    }
    let look = |table: &EmbeddingTable| {
        let (mut numbers, mut found) = ([0.0; DIM], [false]);
        table.lookup(&[1234], &mut numbers, &mut found, Miss::Wait).unwrap();
        (numbers, found)
    };
    let (numbers, found) = look(&ours);
    assert!(
        found[0] && (numbers == row(1234, 0) || numbers == row(1234, 5)),
        "what disk has, or the cache: {numbers:?}"
    );
    for node in 0..3 {
        servers.signal(node, libc::SIGCONT);
    }
    eventually("the newer row is seen", || look(&ours).0 == row(1234, 5));
}

/// The row of one key, if it is found.
fn look_at(table: &EmbeddingTable, key: i64) -> Option<[f32; DIM]> {
    let (mut numbers, mut found) = ([0.0; DIM], [false]);
    table.lookup(&[key], &mut numbers, &mut found, Miss::Wait).unwrap();
    found[0].then_some(numbers)
}

/// Has all nodes miss a change, and waits until they answer for its keys again.
fn miss(servers: &Servers, table: &EmbeddingTable, version: u64, keys: &[i64]) {
    for node in 0..3 {
        servers.signal(node, libc::SIGSTOP);
    }
    let rows: Vec<f32> = keys.iter().flat_map(|&key| row(key, version)).collect();
    assert_eq!(table.upsert(version, keys, &rows, Reach::AtOnce).unwrap_err().status(), Status::Io);
    for node in 0..3 {
        servers.signal(node, libc::SIGCONT);
    }
    let redis = &table.table.tiers[0].tier;
    eventually("the nodes answer", || redis.fetch(keys, None, &mut |_, _, _| ()).is_ok());
    assert!(keys.iter().all(|&key| redis.unsynced_version(key) == Some(Version(version))));
}

#[test]
fn keys_whose_change_the_cluster_missed_are_not_taken_for_absent() {
    let (servers, folder, other) = (Servers::start(), Folder::new(), Folder::new());
    let theirs = tables(&servers, &other, None, 5000);
    let ours = tables(&servers, &folder, None, 300);
    let (ours, theirs) = (ours.table("t").unwrap(), theirs.table("t").unwrap());
    let (cached, other) = (1500, 1501);
    eventually("it is cached", || look_at(&ours, cached) == Some(row(cached, 0)));
    miss(&servers, &ours, 7, &[cached, other]);
    eventually("an older change is refused", || {
        let error = ours.upsert(5, &[other], &row(other, 5), Reach::AtOnce).unwrap_err();
        error.message().contains("a later change of a key has not reached it")
    });
    ours.refresh();
    assert_eq!(look_at(&ours, cached), Some(row(cached, 0)), "it stays in the cache");
    assert_eq!(look_at(&ours, other), None);
    theirs.upsert(8, &[other], &row(other, 8), Reach::AtOnce).unwrap();
    // Sooner than what is remembered as absent is forgotten.
    eventually("the newer row is seen", || look_at(&ours, other) == Some(row(other, 8)));
    eventually("it is repeated", || ours.upsert(7, &[cached], &row(cached, 7), Reach::AtOnce).is_ok());
    theirs.refresh();
    for table in [&ours, &theirs] {
        assert_eq!(look_at(table, cached), Some(row(cached, 7)));
    }
}

#[test]
fn a_row_below_that_is_older_than_a_missed_change_is_read_again() {
    let (servers, folder, other) = (Servers::start(), Folder::new(), Folder::new());
    let theirs = tables(&servers, &other, None, 5000);
    let theirs = theirs.table("t").unwrap();
    drop(tables(&servers, &folder, Some(""), 5000));
    let ours = tables(&servers, &folder, Some(r#", "read_only": true"#), 300);
    let ours = ours.table("t").unwrap();
    let (cached, other) = (1500, 1501);
    theirs.upsert(5, &[cached], &row(cached, 5), Reach::AtOnce).unwrap();
    eventually("it is cached", || look_at(&ours, cached) == Some(row(cached, 5)));
    miss(&servers, &ours, 7, &[cached, other]);
    ours.refresh();
    assert_eq!(look_at(&ours, cached), Some(row(cached, 5)), "not what disk has");
    assert_eq!(look_at(&ours, other), Some(row(other, 0)));
    theirs.upsert(8, &[other], &row(other, 8), Reach::AtOnce).unwrap();
    eventually("the newer row is seen", || look_at(&ours, other) == Some(row(other, 8)));
}

#[test]
fn only_what_the_cluster_does_not_have_is_kept_to_be_put_there() {
    let (servers, folder) = (Servers::start(), Folder::new());
    let embeddings = tables(&servers, &folder, Some(""), 5000);
    let table = embeddings.table("t").unwrap();
    for node in 0..3 {
        let _: () = servers.ask(node, &["FLUSHALL"]);
    }
    let (there, all) = ([1500, 1501], [1500, 1501, 1502, KEYS]);
    let store = |found: &TierResult| table.table.store_above(&there, found, |tier| tier.shared);
    table.table.fetch_rows(&there, None, &mut |_| (), store);
    // Without threads what is queued stays in the queue.
    let background = BackgroundFetch::new(0, 100).unwrap();
    let fetch = |keys: &[i64]| {
        let store = |found: &TierResult| background.store_shared(&table.table, keys, found);
        table.table.fetch_rows(keys, None, &mut |_| (), store);
    };
    fetch(&there);
    assert_eq!(background.stored_keys(), (0, 0), "all of it was found there");
    fetch(&all);
    assert_eq!(background.stored_keys(), (1, DIM * 4), "one was found below, and one nowhere");
    // And with threads it is put.
    assert_eq!(look_at(&table, 1503), Some(row(1503, 0)));
    embeddings.wait();
    let mut found = 0;
    table.table.tiers[0].tier.fetch(&[1500, 1503], None, &mut |_, _, _| found += 1).unwrap();
    assert_eq!(found, 2);
}

fn every_row(version: u64) -> Vec<f32> {
    (0..KEYS).flat_map(|key| row(key, version)).collect()
}

/// Asks for all keys past the cache, of which it has room for a few.
fn all_have(table: &EmbeddingTable, version: u64) -> bool {
    (0..KEYS).all(|key| look_at(table, key) == Some(row(key, version)))
}

#[test]
fn a_cluster_that_forgot_everything_hides_no_row_of_this_disk() {
    let (servers, folder, other) = (Servers::start(), Folder::new(), Folder::new());
    let ours = tables(&servers, &folder, Some(""), 5000);
    let theirs = tables(&servers, &other, Some(""), 5000);
    let (our, their) = (ours.table("t").unwrap(), theirs.table("t").unwrap());
    let keys: Vec<i64> = (0..KEYS).collect();
    our.upsert(5, &keys, &every_row(5), Reach::AtOnce).unwrap();
    for node in 0..3 {
        let _: () = servers.ask(node, &["FLUSHALL"]);
    }
    // The other process puts into the cluster what it has.
    their.refresh();
    assert!(all_have(&their, 0));
    theirs.wait();
    assert!(all_have(&our, 5), "and this one does not believe it");
    // What was found out is set right in the cluster, for others too.
    eventually("all changes are back in the cluster", || {
        their.refresh();
        all_have(&their, 5)
    });
    // Deleted keys stay deleted.
    our.delete(6, &[7], Reach::AtOnce).unwrap();
    for node in 0..3 {
        let _: () = servers.ask(node, &["FLUSHALL"]);
    }
    their.refresh();
    assert_eq!(look_at(&their, 7), Some(row(7, 0)), "what its own disk has");
    theirs.wait();
    our.refresh();
    assert_eq!(look_at(&our, 7), None);
}

#[test]
fn nodes_that_come_back_with_an_older_snapshot_hide_no_row_of_this_disk() {
    for disk in [Some(""), None] {
        let (mut servers, folder) = (Servers::start(), Folder::new());
        let embeddings = tables(&servers, &folder, disk, 5000);
        let table = embeddings.table("t").unwrap();
        let keys: Vec<i64> = (0..KEYS).collect();
        table.upsert(3, &keys, &every_row(3), Reach::AtOnce).unwrap();
        for node in 0..3 {
            let _: () = servers.ask(node, &["SAVE"]);
        }
        table.upsert(5, &keys, &every_row(5), Reach::AtOnce).unwrap();
        for node in 0..3 {
            servers.kill(node);
        }
        for node in 0..3 {
            servers.start_one(node);
        }
        servers.wait_until_well();
        eventually("the nodes answer", || table.table.tiers[0].tier.fetch(&keys, None, &mut |_, _, _| ()).is_ok());
        if disk.is_some() {
            assert!(all_have(&table, 5), "its own disk has it");
            continue;
        }
        // Nothing has it any more: the default vector is given, and never what is older than was acknowledged.
        let mut lost = 0;
        for key in 0..KEYS {
            match look_at(&table, key) {
                Some(found) => assert_eq!(found, row(key, 5), "of the cache"),
                None => lost += 1,
            }
        }
        assert!(lost > KEYS / 2, "{lost}");
        // Nor does a cluster that has nothing at all take away what the cache has.
        let cached = (0..KEYS).find(|&key| look_at(&table, key).is_some()).unwrap();
        for node in 0..3 {
            let _: () = servers.ask(node, &["FLUSHALL"]);
        }
        table.refresh();
        assert_eq!(look_at(&table, cached), Some(row(cached, 5)));
        // Another process does not know better.
        let other = Folder::new();
        let theirs = tables(&servers, &other, None, 5000);
        assert_eq!(look_at(&theirs.table("t").unwrap(), 1), Some(row(1, 0)));
        // Who has the change repeats it.
        table.upsert(5, &keys, &every_row(5), Reach::AtOnce).unwrap();
        assert!(all_have(&table, 5));
    }
}

#[test]
fn a_replica_that_was_behind_hides_no_row_of_this_disk() {
    let (mut servers, folder) = (Servers::with(Setup { replica: true, ..Setup::default() }), Folder::new());
    let embeddings = tables(&servers, &folder, Some(""), 2000);
    let table = embeddings.table("t").unwrap();
    let keys: Vec<i64> = (0..KEYS).collect();
    eventually("the replica has it all", || {
        servers.ask::<String>(0, &["INFO", "replication"]).contains("lag=0")
            && servers.ask::<u64>(0, &["DBSIZE"]) == servers.ask::<u64>(3, &["DBSIZE"])
    });
    // It hears of nothing more, and takes over.
    servers.signal(3, libc::SIGSTOP);
    table.upsert(5, &keys, &every_row(5), Reach::AtOnce).unwrap();
    servers.kill(0);
    servers.signal(3, libc::SIGCONT);
    eventually("the replica serves", || table.table.tiers[0].tier.fetch(&keys, None, &mut |_, _, _| ()).is_ok());
    assert!(all_have(&table, 5));
}
