//! Partitions that are full.

use super::*;

fn full(servers: &Servers, policy: Eviction, target: f64) -> RedisTier {
    let overflow = OverflowOptions { max_rows: Some(1000), keep: target, eviction: policy };
    let options = RedisOptions { partitions: 1, overflow, ..servers.options() };
    open(options, &format!("{policy:?}"))
}

fn some(keys: std::ops::Range<i64>) -> Vec<i64> {
    keys.collect()
}

#[test]
fn rows_leave_a_few_at_a_time_until_the_target() {
    let servers = Servers::start();
    for policy in [Eviction::Random, Eviction::Oldest, Eviction::LeastUsed] {
        let cluster = full(&servers, policy, 0.5);
        put(&cluster, 0..1000).unwrap();
        assert_eq!(fetch(&cluster, &some(0..1000)).len(), 1000, "as many as it may have");
        let mut left = 1000;
        let mut calls = 0;
        for key in 1000.. {
            put(&cluster, [key]).unwrap();
            let now = fetch(&cluster, &some(0..key + 1)).len();
            assert!(now + 17 >= left, "{policy:?}: not many at once");
            if now > left {
                break;
            }
            (left, calls) = (now, calls + 1);
        }
        assert_eq!(left, 500, "{policy:?}: down to the target, then no further");
        assert!(calls >= 500 / 17, "{policy:?}: over many calls");
        // However fast they come, there are not many more than there may be.
        put(&cluster, 10_000..20_000).unwrap();
        let count = fetch(&cluster, &some(0..20_000)).len();
        assert!((500..=1000 + MAX_WRITE).contains(&count), "{policy:?}: {count}");
    }
}

#[test]
fn what_is_used_stays() {
    let servers = Servers::start();
    for policy in [Eviction::Oldest, Eviction::LeastUsed] {
        let cluster = full(&servers, policy, 0.7);
        put(&cluster, 0..900).unwrap();
        let used = some(0..300);
        for _ in 0..3 {
            fetch(&cluster, &used);
        }
        // Lookups do not wait for the notes of uses; all are there when the last ones are.
        let uses = &cluster.partitions[0].uses;
        let number = (0..3).find(|&number| has(&servers, number, &cluster.partitions[0])).unwrap();
        eventually("the uses are noted", || {
            let mut noted: Vec<u64> = servers.ask(number, &["HVALS", uses]);
            noted.sort_unstable();
            match policy {
                Eviction::LeastUsed => noted[600..].iter().all(|&count| count == 4),
                _ => noted[600] > noted[599],
            }
        });
        // Updates and deletions count as rows, and fill it.
        for key in 900..1200 {
            update(&cluster, &[(key, 1, key % 2 == 0)]).unwrap();
        }
        let kept = fetch(&cluster, &used).len();
        let others = fetch(&cluster, &some(300..900)).len();
        assert!(others < 400, "{policy:?}: {others} of 600 unused ones are left");
        assert!(kept > 280, "{policy:?}: only {kept} of 300 that were used are left");
        assert_eq!(cluster.stats().evicted as usize, 1200 - fetch(&cluster, &some(0..1200)).len());
        // Nothing is noted of rows that have left.
        let noted: u64 = servers.ask(number, &["HLEN", uses]);
        assert_eq!(noted as usize, fetch(&cluster, &some(0..1200)).len());
    }
}
