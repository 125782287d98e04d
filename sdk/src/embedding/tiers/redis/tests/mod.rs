//! The tier as a whole, on a real cluster.

mod faults;
mod limits;
mod servers;
mod whole;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use pagoda_test_support::Folder;

use self::servers::{Servers, Setup, certificates, eventually};
use super::*;
use crate::embedding::options::{Address, RedisOptions, Secret, TlsOptions};

/// A row that says which key and version it is of.
fn row(key: i64, version: u64) -> Vec<u8> {
    [key.to_le_bytes(), version.to_le_bytes()].concat()
}

fn layout() -> Layout {
    Layout::new(4, RowType::F32).unwrap()
}

fn open(options: RedisOptions, table: &str) -> RedisTier {
    RedisTier::open(Cluster::open(options).unwrap(), table, layout()).unwrap()
}

/// What the tier holds: a version, and whether there is a row. Every row is checked.
type Known = HashMap<i64, (u64, bool)>;

/// Looks up, and gives what was found before an error too.
fn fetch_until(cluster: &RedisTier, keys: &[i64], deadline: Option<Instant>) -> (Known, Result<()>) {
    let mut known = Known::new();
    let outcome = cluster.fetch(keys, deadline, &mut |place, Version(version), found| {
        if let Some(found) = found {
            assert_eq!(found, row(keys[place], version));
        }
        let before = known.insert(keys[place], (version, found.is_some()));
        assert_eq!(before, None, "once for each key");
    });
    (known, outcome)
}

fn fetch(cluster: &RedisTier, keys: &[i64]) -> Known {
    let (known, outcome) = fetch_until(cluster, keys, None);
    outcome.unwrap();
    known
}

/// Calls something with rows: a key, a version, and whether there is a row.
fn with_rows<T>(rows: &[(i64, u64, bool)], call: impl FnOnce(&Rows<'_>) -> T) -> T {
    let keys: Vec<_> = rows.iter().map(|row| row.0).collect();
    let versions: Vec<_> = rows.iter().map(|row| Version(row.1)).collect();
    let deleted: Vec<_> = rows.iter().map(|row| !row.2).collect();
    let bytes: Vec<_> = rows.iter().flat_map(|&(key, version, _)| row(key, version)).collect();
    call(&Rows { keys: &keys, versions: &versions, rows: &bytes, deleted: &deleted })
}

fn put(cluster: &RedisTier, keys: impl IntoIterator<Item = i64>) -> Result<()> {
    let rows: Vec<_> = keys.into_iter().map(|key| (key, 0, true)).collect();
    with_rows(&rows, |rows| cluster.put(rows, &|_| true))
}

fn update(cluster: &RedisTier, rows: &[(i64, u64, bool)]) -> Result<()> {
    with_rows(rows, |rows| cluster.update(rows))
}

#[test]
fn rows_are_put_updated_and_deleted_by_version() {
    let servers = Servers::start();
    let cluster = open(servers.options(), "t");
    let keys = [0, -1, i64::MIN, i64::MAX, 1 << 40];
    assert_eq!(fetch(&cluster, &keys), Known::new());
    assert_eq!(fetch(&cluster, &[]), Known::new());
    put(&cluster, []).unwrap();

    put(&cluster, keys).unwrap();
    assert_eq!(fetch(&cluster, &keys), keys.map(|key| (key, (0, true))).into());
    // What is there stays; what was updated meanwhile is not put.
    with_rows(&[(0, 9, true), (7, 9, true), (8, 9, true)], |rows| cluster.put(rows, &|place| place != 1)).unwrap();
    assert_eq!(fetch(&cluster, &[0, 7, 8]), [(0, (0, true)), (8, (9, true))].into());

    // Versions whose bytes compare in different ways; the last is the highest.
    for version in [1, 255, 256, 1 << 31, 1 << 63, u64::MAX] {
        update(&cluster, &[(0, version, true), (5, version, false)]).unwrap();
        update(&cluster, &[(0, version - 1, false), (5, version - 1, true)]).unwrap();
        assert_eq!(fetch(&cluster, &[0, 5]), [(0, (version, true)), (5, (version, false))].into());
    }
    // The same version is replaced, and a deleted key is not put again.
    update(&cluster, &[(0, u64::MAX, false), (5, u64::MAX, true)]).unwrap();
    put(&cluster, [0]).unwrap();
    assert_eq!(fetch(&cluster, &[0, 5]), [(0, (u64::MAX, false)), (5, (u64::MAX, true))].into());
    assert_eq!(cluster.stats(), RedisStats::default());
    assert_eq!((cluster.name(), cluster.memory()), ("redis", 0));
}

#[test]
fn many_keys_at_once_spread_over_the_nodes_and_are_seen_by_others() {
    let servers = Servers::start();
    let cluster = open(RedisOptions { partitions: 24, ..servers.options() }, "many");
    let keys: Vec<i64> = (0..10_000).map(|number| number * 0x1234_5678_9abc - 5_000_000).collect();
    put(&cluster, keys.iter().copied()).unwrap();
    let start = Instant::now();
    let known = fetch(&cluster, &keys);
    println!("10,000 keys, rows of 16 bytes: {:?}", start.elapsed());
    assert!(known.len() == keys.len() && known.values().all(|&found| found == (0, true)));
    for number in 0..3 {
        assert!(servers.ask::<u64>(number, &["DBSIZE"]) > 1, "node {number} has its share of the partitions");
    }

    // Another process has connections of its own, and knows only one address.
    let mut options = RedisOptions { partitions: 24, ..servers.options() };
    options.nodes.truncate(1);
    let other = open(options, "many");
    update(&other, &[(keys[1], 1, true), (keys[2], 1, false)]).unwrap();
    assert_eq!(fetch(&cluster, &keys[..3]), [(keys[0], (0, true)), (keys[1], (1, true)), (keys[2], (1, false))].into());
    // Other tables of the same connections are their own.
    let table = RedisTier::open(other.cluster.clone(), "another", layout()).unwrap();
    assert_eq!(fetch(&table, &keys), Known::new());

    let threads = 8;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (cluster, other, keys) = (&cluster, &other, &keys);
            scope.spawn(move || {
                for round in 0..20 {
                    let some = &keys[1000 * thread..][..1000];
                    assert_eq!(fetch(if round % 2 == 0 { cluster } else { other }, some).len(), some.len());
                }
            });
        }
    });
}

#[test]
fn a_table_has_one_layout_and_an_address_has_to_be_right() {
    let servers = Servers::start();
    let nodes = Cluster::open(servers.options()).unwrap();
    let cluster = RedisTier::open(nodes.clone(), "t", layout()).unwrap();
    put(&cluster, [1]).unwrap();
    let other = Layout::new(8, RowType::F16).unwrap();
    let error = RedisTier::open(nodes.clone(), "t", other).err().unwrap();
    assert!(error.message().contains("4 x f32 in 8 partitions"), "{error}");
    assert!(error.message().contains("8 x f16 in 8 partitions"), "{error}");
    let fewer = Cluster::open(RedisOptions { partitions: 3, ..servers.options() }).unwrap();
    let error = RedisTier::open(fewer, "t", layout()).err().unwrap();
    assert!(error.message().contains("4 x f32 in 3 partitions"), "{error}");
    for name in ["", "a{b", "}"] {
        assert_eq!(RedisTier::open(nodes.clone(), name, layout()).err().unwrap().argument(), Some("table"));
    }

    // Another layout in one partition, after all have opened the table.
    let partition = &cluster.partitions[cluster.partition(1)];
    let number =
        (0..3).find(|&node| servers.ask::<u64>(node, &["DBSIZE"]) > 0 && has(&servers, node, partition)).unwrap();
    let _: () = servers.ask(number, &["HSET", &partition.rows, "layout", "9 x i8 in 8 partitions"]);
    let (known, outcome) = fetch_until(&cluster, &[1], None);
    assert!(known.is_empty() && outcome.unwrap_err().message().contains("9 x i8"));
    assert!(update(&cluster, &[(1, 1, true)]).unwrap_err().message().contains("9 x i8"));
    let _: () = servers.ask(number, &["HDEL", &partition.rows, "layout"]);
    let _: () = servers.ask(number, &["HSET", &partition.rows, "\u{1}\0\0\0\0\0\0\0", "short"]);
    let (known, outcome) = fetch_until(&cluster, &[1], None);
    assert!(known.is_empty() && outcome.unwrap_err().message().contains("key 1"));

    let stopped = Servers::prepare(Setup::default(), 1);
    let error = Cluster::open(stopped.options()).err().unwrap();
    assert!(error.message().contains(&stopped.options().nodes[0].to_string()), "{error}");
    let nowhere = Address { host: "no.such.host.invalid".into(), port: 1 };
    assert!(Cluster::open(RedisOptions { nodes: vec![nowhere], ..servers.options() }).is_err());
    let alone = Servers::prepare(Setup { alone: true, ..Setup::default() }, 1).run();
    let error = Cluster::open(alone.options()).err().unwrap();
    assert!(error.message().contains("cluster support disabled"), "{error}");
}

/// Whether a node has a partition.
fn has(servers: &Servers, number: usize, partition: &Partition) -> bool {
    let ranges: redis::Value = servers.ask(number, &["CLUSTER", "KEYSLOT", &partition.rows]);
    assert_eq!(ranges, redis::Value::Int(partition.slot.into()), "we count slots as Redis does");
    servers.ask::<Vec<String>>(number, &["KEYS", "*"]).contains(&partition.rows)
}

#[test]
fn a_password_is_needed_and_not_shown() {
    let servers = Servers::with(Setup { password: Some("open sesame"), ..Setup::default() });
    put(&open(servers.options(), "t"), [1]).unwrap();
    let wrong = RedisOptions { password: Secret::new("open barley"), ..servers.options() };
    let error = Cluster::open(wrong).err().unwrap();
    assert!(error.message().contains("password") && !error.message().contains("barley"), "{error}");
    assert!(Cluster::open(RedisOptions { password: Secret::default(), ..servers.options() }).is_err());
    for number in 0..3 {
        let _: () = servers.ask(number, &["ACL", "SETUSER", "ali", "on", ">cave", "~pagoda:*", "+@all"]);
    }
    let user = RedisOptions { user: "ali".into(), password: Secret::new("cave"), ..servers.options() };
    assert_eq!(fetch(&open(user, "t"), &[1, 2]), [(1, (0, true))].into());
}

#[test]
fn what_is_sent_is_encrypted() {
    let folder = Folder::new();
    let servers = Servers::with(Setup { tls: Some(certificates(folder.path())), ..Setup::default() });
    let cluster = open(servers.options(), "t");
    put(&cluster, 0..100).unwrap();
    assert_eq!(fetch(&cluster, &(0..100).collect::<Vec<_>>()).len(), 100);
    assert!(Cluster::open(RedisOptions { tls: None, ..servers.options() }).is_err(), "the nodes speak nothing else");
    let tls = servers.options().tls.unwrap();
    let stranger = RedisOptions { tls: Some(TlsOptions { client: None, ..tls.clone() }), ..servers.options() };
    assert!(Cluster::open(stranger).is_err(), "a client without a certificate is refused");
    let elsewhere = Folder::new();
    let trust = TlsOptions { authorities: Some(certificates(elsewhere.path()).ca), ..tls };
    assert!(Cluster::open(RedisOptions { tls: Some(trust), ..servers.options() }).is_err(), "nor do we");
}

#[test]
fn slots_may_move_and_scripts_be_forgotten() {
    let servers = Servers::start();
    let cluster = open(RedisOptions { partitions: 1, ..servers.options() }, "t");
    put(&cluster, [1]).unwrap();
    let partition = &cluster.partitions[0];
    let slot = partition.slot.to_string();
    let from = (0..3).find(|&number| has(&servers, number, partition)).unwrap();
    let to = (from + 1) % 3;
    let [source, target]: [String; 2] = [from, to].map(|number| servers.ask(number, &["CLUSTER", "MYID"]));

    for number in 0..3 {
        let _: () = servers.ask(number, &["SCRIPT", "FLUSH"]);
    }
    update(&cluster, &[(1, 1, true)]).unwrap();

    // During the migration the old node has none of the slot any more and redirects to the new one.
    let _: () = servers.ask(to, &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &source]);
    let _: () = servers.ask(from, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &target]);
    let _: () = servers.ask(from, &["DEL", &partition.rows]);
    put(&cluster, [2]).unwrap();
    assert_eq!(fetch(&cluster, &[1, 2]), [(2, (0, true))].into());
    // There: only the new node knows at first.
    for number in [to, from, 3 - from - to] {
        let _: () = servers.ask(number, &["CLUSTER", "SETSLOT", &slot, "NODE", &target]);
    }
    put(&cluster, [3]).unwrap();
    assert_eq!(fetch(&cluster, &[1, 2, 3]), [(2, (0, true)), (3, (0, true))].into());
    eventually("the map is right", || {
        let map = cluster.cluster.map();
        map.node(partition.slot).unwrap().address.port == servers.servers[to].port
    });
    assert_eq!(cluster.stats(), RedisStats::default());
}

#[test]
fn a_thread_is_not_left_behind() {
    let servers = Servers::start();
    let nodes = Cluster::open(servers.options()).unwrap();
    let node = Arc::downgrade(nodes.map().node(0).unwrap());
    drop(nodes);
    assert!(node.upgrade().is_none(), "its threads held it");
}
