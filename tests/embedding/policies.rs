//! What a lookup does about keys that the cache does not have.

use std::time::Duration;

use pagoda::embedding::{EmbeddingTable, Embeddings, LookupStats, Miss};
use pagoda_test_support::Folder;

use crate::files::{DEFAULT, DIM, config, open, row, rows};

/// An empty cache for 1,000 rows over a table of 100 keys, and the threshold.
fn with_threshold(folder: &Folder, threshold: &str) -> (Embeddings, EmbeddingTable) {
    let keys: Vec<i64> = (0..100).collect();
    let cache =
        format!(r#", "gpucache": true, "cache_rows": 1000, "init_ec": false, "hit_rate_threshold": {threshold}"#);
    open(&config(folder, &keys, &cache, ""))
}

fn look(table: &EmbeddingTable, keys: &[i64], miss: Miss) -> (Vec<f32>, Vec<bool>, LookupStats) {
    let (mut numbers, mut found) = (vec![f32::NAN; keys.len() * DIM], vec![false; keys.len()]);
    let looked = table.lookup(keys, &mut numbers, &mut found, miss).unwrap();
    (numbers, found, looked)
}

#[test]
fn below_the_threshold_rows_are_waited_for_and_from_it_on_they_are_not() {
    // 7 of 10 different keys are cached.
    for (threshold, waits) in [("0.71", true), ("0.7", false), ("0.69", false), ("1.0", true), ("0.0", false)] {
        let folder = Folder::new();
        let (embeddings, table) = with_threshold(&folder, threshold);
        let cached: Vec<i64> = (0..7).collect();
        assert_eq!(look(&table, &cached, Miss::Wait).0, rows(&cached, 0));
        // Keys that come often count once.
        let mut keys: Vec<i64> = (0..10).collect();
        keys.extend([9, 9, 9, 9, 8, 0]);
        let (numbers, found, looked) = look(&table, &keys, Miss::ByHitRate);
        let defaults = if waits { 0 } else { 3 };
        assert_eq!(looked, LookupStats { keys: 10, hits: 7, defaults }, "threshold {threshold}");
        for (place, &key) in keys.iter().enumerate() {
            let expected = if waits || key < 7 { row(key, 0) } else { DEFAULT };
            assert_eq!(numbers[place * DIM..][..DIM], expected, "key {key}, threshold {threshold}");
            assert_eq!(found[place], waits || key < 7, "key {key}, threshold {threshold}");
        }
        // Either way they are in the cache afterwards.
        embeddings.wait();
        let (numbers, found, looked) = look(&table, &keys, Miss::Default);
        assert_eq!((numbers, looked.defaults), (rows(&keys, 0), 0), "threshold {threshold}");
        assert!(found.iter().all(|&found| found));
    }
}

#[test]
fn a_request_can_have_it_otherwise() {
    let folder = Folder::new();
    let (embeddings, table) = with_threshold(&folder, "1.0");
    let (numbers, found, looked) = look(&table, &[1, 2], Miss::Default);
    assert_eq!((numbers, found), ([DEFAULT, DEFAULT].concat(), vec![false; 2]));
    assert_eq!(looked, LookupStats { keys: 2, hits: 0, defaults: 2 });
    embeddings.wait();
    assert_eq!(look(&table, &[1, 2], Miss::Default).0, rows(&[1, 2], 0));
    let patient = Miss::Within(Duration::from_secs(60));
    assert_eq!(look(&table, &[1, 3, 3], patient).0, rows(&[1, 3, 3], 0));
    assert_eq!(look(&table, &[4], Miss::Within(Duration::MAX)).0, rows(&[4], 0));
    // What is in host memory takes no time.
    assert_eq!(look(&table, &[3, 5], Miss::Within(Duration::ZERO)).0, rows(&[3, 5], 0));
    drop((embeddings, table));
    // No time at all is too little for the disk, but what was asked for arrives.
    let disk = r#", "volatile_db": {"type": "disabled"}, "persistent_db": {"type": "disk", "path": "disk"}"#;
    let cache = r#", "cache_rows": 1000, "init_ec": false"#;
    let (embeddings, table) = open(&config(&folder, &[3, 5], cache, disk));
    assert_eq!(look(&table, &[5], Miss::Within(Duration::ZERO)).0, DEFAULT);
    embeddings.wait();
    assert_eq!(look(&table, &[5], Miss::Default).0, rows(&[5], 0));
}

#[test]
fn a_key_that_is_nowhere_is_never_stored() {
    let folder = Folder::new();
    let (embeddings, table) = with_threshold(&folder, "1.0");
    for _ in 0..3 {
        let (numbers, found, looked) = look(&table, &[7, 1000, 1000, -1], Miss::Wait);
        assert_eq!(numbers, [row(7, 0), DEFAULT, DEFAULT, DEFAULT].concat());
        assert_eq!((found, looked.defaults), (vec![true, false, false, false], 2));
        assert_eq!(table.stats().cached_rows, 1);
    }
    // Remembered as absent, and no longer when it is there.
    table.upsert(1, &[1000], &row(1000, 1), pagoda::embedding::Reach::AtOnce).unwrap();
    assert_eq!(look(&table, &[1000], Miss::Wait).0, row(1000, 1));
    drop(embeddings);
}

#[test]
fn without_a_cache_every_lookup_goes_below() {
    let folder = Folder::new();
    let keys = [i64::MIN, -5, 0, 1 << 33, i64::MAX];
    let (embeddings, table) = open(&config(&folder, &keys, r#", "gpucache": false"#, ""));
    let asked = [keys[3], keys[0], 17, keys[3]];
    let (numbers, found, looked) = look(&table, &asked, Miss::ByHitRate);
    assert_eq!(numbers, [row(keys[3], 0), row(keys[0], 0), DEFAULT, row(keys[3], 0)].concat());
    assert_eq!(found, [true, true, false, true]);
    assert_eq!(looked, LookupStats { keys: 3, hits: 0, defaults: 1 });
    assert_eq!((table.stats().cache_rows, table.stats().stale_seconds), (0, 0));
    drop(embeddings);
}

#[test]
fn what_does_not_fit_is_refused() {
    let folder = Folder::new();
    let (_embeddings, table) = with_threshold(&folder, "1.0");
    let error = table.lookup(&[1, 2], &mut [0.0; 7], &mut [false; 2], Miss::Wait).unwrap_err();
    assert_eq!(error.argument(), Some("numbers"));
    let error = table.lookup(&[1, 2], &mut [0.0; 8], &mut [false; 3], Miss::Wait).unwrap_err();
    assert_eq!(error.argument(), Some("found"));
    assert_eq!(table.lookup(&[], &mut [], &mut [], Miss::Wait).unwrap(), LookupStats::default());
}

#[test]
fn expected_keys_are_there_before_they_are_asked_for() {
    let folder = Folder::new();
    let (embeddings, table) = with_threshold(&folder, "1.0");
    assert_eq!(table.prefetch(&[1, 2, 2, 3]), 3);
    embeddings.wait();
    assert_eq!(table.prefetch(&[1, 2, 2, 3]), 0);
    assert_eq!(look(&table, &[1, 2, 3], Miss::Default).0, rows(&[1, 2, 3], 0));
}
