//! Eight threads look up, change, delete and evict at once; every row carries its key and its version.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagoda::embedding::{EmbeddingTable, Miss, Reach};
use pagoda_test_support::{Folder, Random};

use crate::files::{DEFAULT, DIM, config, open, row};

const KEYS: usize = 4000;

/// How long, in seconds.
fn seconds() -> u64 {
    std::env::var("PAGODA_EMBEDDING_SECONDS").map_or(4, |text| text.parse().expect("a number of seconds"))
}

#[test]
fn no_torn_or_foreign_row_is_ever_seen() {
    let folder = Folder::new();
    let keys: Vec<i64> = (0..KEYS as i64).map(|key| key.wrapping_mul(0x0123_4567_89AB_CDEF)).collect();
    // Small, so that rows come and go on every tier.
    let model = r#", "gpucache": true, "cache_rows": 500, "hit_rate_threshold": 0.5, "refresh_interval": 0.05"#;
    let tiers = r#", "volatile_db": {"type": "hash_map", "num_partitions": 4, "overflow_margin": 200,
        "overflow_policy": "evict_oldest"}, "persistent_db": {"type": "disk", "path": "disk"}"#;
    let (_embeddings, table) = open(&config(&folder, &keys, model, tiers));
    let until = Instant::now() + Duration::from_secs(seconds());
    // The version that later lookups must see, or a later one; and the version of the next update.
    let newest: Vec<AtomicU64> = keys.iter().map(|_| AtomicU64::new(0)).collect();
    let (next, looked, changed) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0));
    // On a machine that is busy with something else it takes longer.
    let late = until + Duration::from_secs(60);
    let enough = |looked: u64, changed: u64| looked > 1000 && changed > 100;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (table, keys, newest, next, looked, changed) = (&table, &keys, &newest, &next, &looked, &changed);
            let goes_on = move || {
                let done = enough(looked.load(Ordering::Relaxed), changed.load(Ordering::Relaxed));
                Instant::now() < if done { until } else { late }
            };
            scope.spawn(move || {
                let mut random = Random(thread);
                while goes_on() {
                    if thread < 2 {
                        change(table, keys, newest, next, &mut random, thread as usize);
                        changed.fetch_add(1, Ordering::Relaxed);
                    } else {
                        look(table, keys, newest, &mut random);
                        looked.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let (looked, changed) = (looked.into_inner(), changed.into_inner());
    assert!(enough(looked, changed), "{looked} lookups and {changed} changes");
    println!("{looked} lookups, {changed} changes, {:?}", table.stats());
}

/// Changes or deletes some keys; each of the two threads that do has half of them.
fn change(
    table: &EmbeddingTable,
    keys: &[i64],
    newest: &[AtomicU64],
    next: &AtomicU64,
    random: &mut Random,
    thread: usize,
) {
    let places: Vec<usize> = (0..16).map(|_| random.below(KEYS / 2) * 2 + thread).collect();
    let changed: Vec<i64> = places.iter().map(|&place| keys[place]).collect();
    // An f32 holds every whole number up to this.
    let version = next.fetch_add(1, Ordering::Relaxed).min(1 << 24);
    if random.below(8) == 0 {
        table.delete(version, &changed, Reach::AtOnce).unwrap();
    } else {
        let numbers: Vec<f32> = changed.iter().flat_map(|&key| row(key, version)).collect();
        table.upsert(version, &changed, &numbers, Reach::AtOnce).unwrap();
    }
    for place in places {
        newest[place].fetch_max(version, Ordering::SeqCst);
    }
}

fn look(table: &EmbeddingTable, keys: &[i64], newest: &[AtomicU64], random: &mut Random) {
    // Some keys much more often than others.
    let mut draw = || {
        let most = random.pick(&[20, 400, KEYS]);
        random.below(most)
    };
    let places: Vec<usize> = (0..256).map(|_| draw()).collect();
    let asked: Vec<i64> = places.iter().map(|&place| keys[place]).collect();
    let oldest: Vec<u64> = places.iter().map(|&place| newest[place].load(Ordering::SeqCst)).collect();
    let (mut numbers, mut found) = (vec![f32::NAN; asked.len() * DIM], vec![false; asked.len()]);
    let miss = random.pick(&[Miss::ByHitRate, Miss::Wait, Miss::Default, Miss::Within(Duration::from_micros(200))]);
    table.lookup(&asked, &mut numbers, &mut found, miss).unwrap();
    for (place, got) in numbers.chunks_exact(DIM).enumerate() {
        if !found[place] {
            assert_eq!(got, DEFAULT);
            continue;
        }
        let version = got[1] as u64;
        assert_eq!(got, row(asked[place], version), "key {}", asked[place]);
        assert!(version >= oldest[place], "key {}: version {version} after {}", asked[place], oldest[place]);
    }
}
