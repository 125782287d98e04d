//! Nodes that die, stall, come late, and are replaced.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use super::*;

/// What a busy machine may add to a time limit.
const SLACK: Duration = Duration::from_millis(400);

/// The keys of a node, and those of the others.
fn split(servers: &Servers, cluster: &RedisTier, number: usize, keys: &[i64]) -> (Vec<i64>, Vec<i64>) {
    let map = cluster.cluster.map();
    keys.iter().partition(|&&key| {
        let slot = cluster.partitions[cluster.partition(key)].slot;
        map.node(slot).unwrap().address.port == servers.servers[number].port
    })
}

#[test]
fn a_node_that_dies_takes_only_its_own_keys_and_comes_back() {
    let mut servers = Servers::start();
    let options = RedisOptions { partitions: 24, timeout: Duration::from_secs(2), ..servers.options() };
    let cluster = open(options, "t");
    let keys: Vec<i64> = (0..3000).collect();
    put(&cluster, keys.iter().copied()).unwrap();
    let (dead, alive) = split(&servers, &cluster, 1, &keys);
    assert!(dead.len() > 100 && alive.len() > 100);

    // Under load: no key of the living nodes is ever missed.
    let (stop, lookups) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let (known, _) = fetch_until(&cluster, &keys, None);
                    assert!(alive.iter().all(|key| known.contains_key(key)));
                    lookups.fetch_add(1, Relaxed);
                }
            });
        }
        eventually("lookups run", || lookups.load(Relaxed) >= 10);
        servers.kill(1);
        eventually("it is left alone", || cluster.stats().trips > 0);
        stop.store(true, Relaxed);
    });
    assert!(cluster.stats().errors > 0);
    let (known, outcome) = fetch_until(&cluster, &keys, None);
    assert_eq!(known.len(), alive.len());
    let error = outcome.unwrap_err();
    assert!(error.message().contains(&format!("{} of 3000 keys", dead.len())), "{error}");
    assert!(error.message().contains(&servers.servers[1].port.to_string()), "{error}");
    assert_eq!(fetch(&cluster, &alive).len(), alive.len(), "no error without its keys");
    assert!(put(&cluster, dead.iter().copied()).is_err());

    // Without its rows, as it kept them in memory only.
    servers.start_one(1);
    eventually("it is asked again", || fetch_until(&cluster, &keys, None).1.is_ok());
    assert_eq!(fetch(&cluster, &dead).len(), 0);
    put(&cluster, dead.iter().copied()).unwrap();
    assert_eq!(fetch(&cluster, &keys).len(), keys.len());
}

#[test]
fn a_node_that_stalls_does_not_delay_lookups() {
    let servers = Servers::start();
    let timeout = Duration::from_millis(300);
    let options = RedisOptions { partitions: 24, timeout, breaker_failures: 4, ..servers.options() };
    let cluster = open(options, "t");
    let keys: Vec<i64> = (0..3000).collect();
    put(&cluster, keys.iter().copied()).unwrap();
    let (stalled, moving) = split(&servers, &cluster, 2, &keys);

    servers.signal(2, libc::SIGSTOP);
    let start = Instant::now();
    let (known, outcome) = fetch_until(&cluster, &keys, None);
    let taken = start.elapsed();
    println!("a limit of {timeout:?} held after {taken:?}");
    assert!(taken >= timeout && taken < timeout + SLACK, "{taken:?}");
    assert_eq!(known.len(), moving.len(), "what arrived was given");
    assert!(outcome.unwrap_err().message().contains("time limit"));
    assert!(cluster.stats().timeouts >= 1, "and counted");

    // A deadline before the limit.
    let start = Instant::now();
    let deadline = start + Duration::from_millis(50);
    assert!(fetch_until(&cluster, &stalled, Some(deadline)).1.is_err());
    assert!(start.elapsed() < timeout.min(SLACK), "{:?}", start.elapsed());
    assert!(fetch_until(&cluster, &keys, Some(start)).1.is_err(), "one that is past");

    eventually("it is left alone", || {
        let _ = fetch_until(&cluster, &stalled, None);
        cluster.stats().trips == 1
    });
    let before = cluster.stats();
    for _ in 0..100 {
        assert!(fetch_until(&cluster, &stalled, None).1.is_err());
    }
    assert_eq!(cluster.stats().timeouts, before.timeouts, "no lookup waits for it");

    // It does not hear of an update, and what it has when it is back is not believed.
    let (key, other) = (stalled[0], stalled[1]);
    assert!(update(&cluster, &[(key, 7, true), (moving[0], 7, true)]).is_err());
    servers.signal(2, libc::SIGCONT);
    eventually("it is asked again", || fetch_until(&cluster, &keys, None).1.is_ok());
    assert_eq!(fetch(&cluster, &[key, other, moving[0]]), [(other, (0, true)), (moving[0], (7, true))].into());
    with_rows(&[(key, 7, true)], |rows| cluster.put(rows, &|_| true)).unwrap();
    assert_eq!(fetch(&cluster, &[key]), [(key, (7, true))].into());
    assert_eq!(cluster.memory(), 0);
}

#[test]
fn a_replica_takes_over() {
    let mut servers = Servers::with(Setup { replica: true, ..Setup::default() });
    let cluster = open(RedisOptions { partitions: 24, ..servers.options() }, "t");
    let keys: Vec<i64> = (0..1000).collect();
    put(&cluster, keys.iter().copied()).unwrap();
    eventually("the replica has it all", || {
        servers.ask::<u64>(0, &["DBSIZE"]) == servers.ask::<u64>(3, &["DBSIZE"])
            && servers.ask::<String>(0, &["INFO", "replication"]).contains("lag=0")
    });
    servers.kill(0);
    eventually("the replica serves", || fetch_until(&cluster, &keys, None).1.is_ok());
    assert_eq!(fetch(&cluster, &keys).len(), keys.len());
    update(&cluster, &keys.iter().map(|&key| (key, 1, true)).collect::<Vec<_>>()).unwrap();
    assert!(fetch(&cluster, &keys).values().all(|&known| known == (1, true)));
}

#[test]
fn a_cluster_may_come_later() {
    let servers = Servers::prepare(Setup::default(), 3);
    let cluster = RedisTier::open(Cluster::open_lazy(servers.options()).unwrap(), "t", layout()).unwrap();
    let start = Instant::now();
    assert!(fetch_until(&cluster, &[1], None).1.unwrap_err().message().contains("no node"));
    assert!(put(&cluster, [1]).is_err());
    assert!(start.elapsed() < Duration::from_secs(2), "no lookup waits for a missing node");
    let _servers = servers.run();
    eventually("it is there", || put(&cluster, [1]).is_ok());
    assert_eq!(fetch(&cluster, &[1]), [(1, (0, true))].into());
}
