//! Tables from files of every kind, small ones too, and what is said of their size before they are opened.

use pagoda::embedding::{
    Address, DiskOptions, EmbeddingOptions, Embeddings, MemoryOptions, Miss, ModelTables, RedisOptions, RowType,
    TableSpec, TierOptions,
};
use pagoda_test_support::Folder;

use crate::files::{DEFAULT, DIM, config, open, ps_json, row, rows, write};

const TIERS: [&str; 4] = [
    "",
    r#", "volatile_db": {"type": "hash_map", "num_partitions": 2}"#,
    r#", "persistent_db": {"type": "rocksdb", "path": "disk"}"#,
    r#", "volatile_db": {"type": "parallel_hash_map", "overflow_margin": 3, "num_partitions": 1,
        "overflow_policy": "evict_least_used"}, "persistent_db": {"type": "disk", "path": "disk"}"#,
];

#[test]
fn tables_of_no_row_and_of_one() {
    for tiers in TIERS {
        for cache in [r#", "gpucache": false"#, r#", "gpucacheper": 0.5"#, r#", "gpucacheper": 1.0"#] {
            let folder = Folder::new();
            let (_embeddings, table) = open(&config(&folder, &[], cache, tiers));
            let (mut numbers, mut found) = ([0.0; 2 * DIM], [true; 2]);
            table.lookup(&[0, -7], &mut numbers, &mut found, Miss::Wait).unwrap();
            assert_eq!((numbers.to_vec(), found), (DEFAULT.repeat(2), [false; 2]), "{tiers}");
            let folder = Folder::new();
            let (_embeddings, table) = open(&config(&folder, &[-7], cache, tiers));
            table.lookup(&[0, -7], &mut numbers, &mut found, Miss::Wait).unwrap();
            assert_eq!((numbers.to_vec(), found), ([DEFAULT, row(-7, 0)].concat(), [false, true]), "{tiers}");
        }
    }
}

#[test]
fn tables_are_opened_from_options_without_a_configuration_file() {
    let folder = Folder::new();
    let spec = TableSpec::new("t", write(&folder, "t", &[1, 2]), DIM as u32);
    let spec = TableSpec { default_row: DEFAULT.to_vec(), ..spec };
    let disk = Some(DiskOptions::new(folder.path().join("disk")));
    for tiers in [TierOptions::default(), TierOptions { disk, ..TierOptions::default() }] {
        let models = vec![ModelTables::new("m", vec![spec.clone()])];
        let (_embeddings, table) = open(&EmbeddingOptions { models, tiers, ..EmbeddingOptions::default() });
        let (mut numbers, mut found) = ([0.0; 2 * DIM], [false; 2]);
        table.lookup(&[2, 3], &mut numbers, &mut found, Miss::Wait).unwrap();
        assert_eq!((numbers.to_vec(), found), ([row(2, 0), DEFAULT].concat(), [true, false]));
    }
}

#[test]
fn errors_name_the_option_or_the_key_that_sets_it() {
    let folder = Folder::new();
    let none = TierOptions { memory: None, redis: None, disk: None };
    let memory = MemoryOptions { partitions: 0, ..MemoryOptions::default() };
    let node = Address { host: "a".into(), port: 1 };
    let redis = RedisOptions { connections_per_node: 65, nodes: vec![node], ..RedisOptions::default() };
    let disk = DiskOptions { read_only: true, ..DiskOptions::new(folder.path().join("disk")) };
    let cases = [
        (none.clone(), "m/t", "", "volatile_db"),
        (
            TierOptions { memory: Some(memory), ..none.clone() },
            "m/t: 0",
            ".memory.partitions",
            "volatile_db.num_partitions",
        ),
        (
            TierOptions { redis: Some(RedisOptions::default()), ..none.clone() },
            "none",
            ".redis.nodes",
            "volatile_db.address",
        ),
        (
            TierOptions { redis: Some(redis), ..none.clone() },
            "65",
            ".redis.connections_per_node",
            "volatile_db.num_node_connections",
        ),
        (TierOptions { disk: Some(disk), ..none }, "table t: ", ".disk.read_only", "persistent_db.read_only"),
    ];
    for (tiers, value, option, key) in cases {
        let mut ps_json = ps_json(&folder, &[1], "", "");
        ps_json.options.tiers = tiers;
        let error = Embeddings::open(&ps_json.options).err().expect(key);
        assert_eq!(error.argument(), Some(format!("EmbeddingOptions.tiers{option}").as_str()), "{error}");
        assert!(error.message().contains(value) && !error.message().contains("_db"), "{error}");
        let error = Embeddings::open_ps_json(&ps_json).err().expect(key);
        assert_eq!(error.argument(), Some(key), "{error}");
        assert!(error.message().contains(value) && !error.message().contains("EmbeddingOptions"), "{error}");
    }
}

#[test]
fn every_row_is_found_whatever_the_tiers() {
    let keys: Vec<i64> = (0..5000).map(|key| (key - 2500) * ((1 << 34) + 7)).collect();
    for tiers in TIERS {
        let folder = Folder::new();
        let cache = r#", "gpucacheper": 0.1, "hit_rate_threshold": 1.0"#;
        let (_embeddings, table) = open(&config(&folder, &keys, cache, tiers));
        let stats = table.stats();
        assert!((500..1000).contains(&stats.cache_rows), "{stats:?}");
        assert!(stats.cached_rows > 250, "it is filled at the start: {stats:?}");
        for _ in 0..2 {
            let (mut numbers, mut found) = (vec![0.0; keys.len() * DIM], vec![false; keys.len()]);
            table.lookup(&keys, &mut numbers, &mut found, Miss::Wait).unwrap();
            assert!(numbers == rows(&keys, 0), "{tiers}");
            assert!(found.iter().all(|&found| found));
        }
    }
}

#[test]
fn rows_can_be_kept_smaller() {
    for (name, row_type, close) in [("f16", RowType::F16, 1e-3), ("i8", RowType::I8, 8e-3)] {
        for tiers in TIERS {
            let folder = Folder::new();
            let keys: Vec<i64> = (1..100).collect();
            let kept = format!(r#", "gpucacheper": 0.5, "row_type_per_table": ["{name}"]"#);
            let (_embeddings, table) = open(&config(&folder, &keys, &kept, tiers));
            assert_eq!(table.row_type(), row_type);
            let (mut numbers, mut found) = (vec![0.0; keys.len() * DIM], vec![false; keys.len()]);
            table.lookup(&keys, &mut numbers, &mut found, Miss::Wait).unwrap();
            for (got, expected) in numbers.chunks_exact(DIM).zip(rows(&keys, 0).chunks_exact(DIM)) {
                for (got, wanted) in got.iter().zip(expected) {
                    assert!((got - wanted).abs() <= close * expected[0], "{got} for {wanted} as {name}");
                }
            }
        }
    }
}

#[test]
fn the_memory_is_known_before_it_is_taken() {
    let keys: Vec<i64> = (0..20_000).collect();
    for tiers in TIERS {
        let folder = Folder::new();
        let config = config(&folder, &keys, r#", "gpucacheper": 0.3"#, tiers);
        let estimate = Embeddings::estimate(&config).unwrap();
        assert_eq!((estimate.len(), &*estimate[0].table, estimate[0].rows), (1, "m/t", 20_000));
        assert!(!folder.path().join("disk").exists(), "nothing is made");
        let (_embeddings, table) = open(&config);
        let (said, is) = (estimate[0].memory as f64, table.stats().memory as f64);
        assert!(said / is > 0.5 && said / is < 2.0, "{said} was said and {is} it is, with {tiers}");
        let on_disk: u64 = std::fs::read_dir(folder.path().join("disk")).map_or(0, |files| {
            let tables =
                files.map(Result::unwrap).filter(|file| file.path().extension().is_some_and(|end| end == "table"));
            tables.map(|file| file.metadata().unwrap().len()).sum()
        });
        let (said, is) = (estimate[0].disk as f64, on_disk as f64);
        assert!(said == is || said / is > 0.5 && said / is < 2.0, "{said} was said and {is} it is, with {tiers}");
    }
}
