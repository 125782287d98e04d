mod errors;
mod mutations;

use std::time::Duration;

use super::*;
use crate::embedding::eviction::Eviction;
use crate::embedding::options::{
    Address, CacheOptions, CacheSize, DiskOptions, OverflowOptions, Preload, RedisOptions, Secret, TableSpec,
    TlsOptions,
};
use crate::embedding::row::RowType;

const DOCS: &str = include_str!("../../../docs/embedding-config.md");

/// The smallest configuration, with more keys for the model and beside `models`.
fn with(model: &str, beside: &str) -> String {
    let model = format!(r#""model": "m", "sparse_files": ["t"], "embedding_vecsize_per_table": [2]{model}"#);
    format!(r#"{{"models": [{{{model}}}]{beside}}}"#)
}

fn read(text: &str) -> PsJson {
    PsJson::from_json(text, None).unwrap()
}

/// Every key of a HugeCTR configuration.
const FULL: &str = r#"{
    "supportlonglong": false,
    "fuse_embedding_table": false,
    "models": [
        {
            "model": "wide_and_deep",
            "sparse_files": ["wide.model", "/data/deep.model"],
            "dense_file": "dense.onnx",
            "network_file": "network.json",
            "num_of_worker_buffer_in_pool": 4,
            "num_of_refresher_buffer_in_pool": 2,
            "deployed_device_list": [0, 3],
            "max_batch_size": 64,
            "default_value_for_each_table": [0.5, [1, 2.5, -3]],
            "maxnum_des_feature_per_sample": 13,
            "maxnum_catfeature_query_per_table_per_sample": [2, 26],
            "embedding_vecsize_per_table": [1, 3],
            "embedding_table_names": ["wide", "deep"],
            "row_type_per_table": ["f16", "i8"],
            "refresh_delay": 1.5,
            "refresh_interval": 0.25,
            "hit_rate_threshold": 0.75,
            "gpucacheper": 0.1,
            "embedding_cache_type": "dynamic",
            "gpucache": true,
            "cache_refresh_percentage_per_iteration": 0.2,
            "label_dim": 2,
            "slot_num": 28,
            "use_context_stream": false,
            "fuse_embedding_table": false,
            "use_static_table": false,
            "use_hctr_cache_implementation": false,
            "thread_pool_size": 8,
            "init_ec": false,
            "enable_pagelock": true,
            "fp8_quant": false
        }
    ],
    "volatile_db": {
        "type": "redis_cluster",
        "address": "127.0.0.1:7003,127.0.0.1:7004; redis.example",
        "user_name": "reader",
        "password": "hunter2",
        "num_partitions": 12,
        "allocation_rate": 1048576,
        "shared_memory_size": 17179869184,
        "shared_memory_name": "shared",
        "shared_memory_auto_remove": true,
        "num_node_connections": 3,
        "max_batch_size": 1000,
        "max_set_batch_size": 500,
        "enable_tls": true,
        "tls_ca_certificate": "ca.crt",
        "tls_client_certificate": "client.pem",
        "tls_client_key": "/keys/client.pem",
        "overflow_margin": 10000000,
        "overflow_policy": "evict_least_used",
        "overflow_resolution_target": 0.6,
        "initialize_after_startup": false,
        "initial_cache_rate": 0.5,
        "cache_missed_embeddings": false,
        "update_filters": [".+"],
        "timeout_ms": 20,
        "breaker_failures": 3,
        "breaker_open_ms": 250
    },
    "persistent_db": {
        "type": "rocks_db",
        "path": "rows",
        "num_threads": 4,
        "read_only": true,
        "drop_updates_on_source_change": true,
        "max_batch_size": 2000,
        "max_get_batch_size": 100,
        "initialize_after_startup": false,
        "update_filters": ["^hps_.+$"]
    },
    "update_source": {
        "type": "null",
        "brokers": "127.0.0.1:9092",
        "metadata_refresh_interval_ms": 30000,
        "receive_buffer_size": 262144,
        "poll_timeout_ms": 500,
        "max_batch_size": 8192,
        "failure_backoff_ms": 50,
        "max_commit_interval": 32
    }
}"#;

#[test]
fn every_key_arrives() {
    let table = |name: &str, path: &str, default: &[f32], row_type| TableSpec {
        name: name.into(),
        path: path.into(),
        dim: default.len() as u32,
        default_row: default.into(),
        row_type: Some(row_type),
    };
    let node = |host: &str, port| Address { host: host.into(), port };
    let model = ModelTables {
        name: "wide_and_deep".into(),
        tables: vec![
            table("wide", "/etc/pagoda/wide.model", &[0.5], RowType::F16),
            table("deep", "/data/deep.model", &[1.0, 2.5, -3.0], RowType::I8),
        ],
        cache: Some(CacheOptions {
            size: CacheSize::Share(0.1),
            hit_rate_threshold: 0.75,
            refresh_delay: Duration::from_millis(1500),
            refresh_interval: Duration::from_millis(250),
            refresh_share: 0.2,
            fill_at_start: false,
            fetch_threads: Some(8),
        }),
        devices: vec![0, 3],
    };
    let hugectr_model = HugeCtrModel {
        max_batch: Some(64),
        dense_file: Some("/etc/pagoda/dense.onnx".into()),
        network_file: Some("/etc/pagoda/network.json".into()),
        max_dense_features: 13,
        labels: 2,
        slots: 28,
        max_keys_per_sample: Some(vec![2, 26]),
        gpu: HugeCtrGpuCache {
            worker_buffers: 4,
            refresh_buffers: 2,
            context_stream: false,
            page_locked: true,
            own_implementation: false,
        },
    };
    let redis = RedisOptions {
        nodes: vec![node("127.0.0.1", 7003), node("127.0.0.1", 7004), node("redis.example", 6379)],
        user: "reader".into(),
        password: Secret::new("hunter2"),
        partitions: 12,
        connections_per_node: 3,
        tls: Some(TlsOptions {
            authorities: Some("/etc/pagoda/ca.crt".into()),
            client: Some(("/etc/pagoda/client.pem".into(), "/keys/client.pem".into())),
        }),
        overflow: OverflowOptions { max_rows: Some(10_000_000), eviction: Eviction::LeastUsed, keep: 0.6 },
        preload: Preload { load: false, share: 0.5 },
        stores_fetched: false,
        timeout: Duration::from_millis(20),
        breaker_failures: 3,
        breaker_pause: Duration::from_millis(250),
    };
    let disk = DiskOptions {
        path: "/etc/pagoda/rows".into(),
        read_only: true,
        build: false,
        drop_updates_on_source_change: true,
    };
    let tiers = TierOptions { memory: None, redis: Some(redis), disk: Some(disk) };
    let expected = PsJson {
        options: EmbeddingOptions { models: vec![model], tiers, long_keys: false },
        hugectr: HugeCtrFields {
            models: vec![hugectr_model],
            memory: None,
            redis: Some(Batch { get: 1000, set: 500 }),
            disk: Some(HugeCtrDisk { threads: 4, batch: Batch { get: 100, set: 2000 } }),
        },
    };
    assert_eq!(PsJson::from_json(FULL, Some(Path::new("/etc/pagoda"))), Ok(expected));
}

#[test]
fn what_is_not_said_has_a_default() {
    let PsJson { options: config, hugectr } = read(&with("", ""));
    assert!(config.long_keys && config.tiers.redis.is_none() && config.tiers.disk.is_none());
    assert_eq!(config.tiers, TierOptions::default(), "the defaults are those of the options");
    let (model, hugectr_model) = (&config.models[0], &hugectr.models[0]);
    let table = TableSpec {
        name: "sparse_embedding0".into(),
        path: "t".into(),
        dim: 2,
        default_row: vec![0.0, 0.0],
        row_type: None,
    };
    assert_eq!(hugectr_model.max_keys_per_sample, None);
    assert_eq!(model.tables, [table]);
    let cache = CacheOptions {
        size: CacheSize::Share(0.2),
        hit_rate_threshold: 0.9,
        refresh_delay: Duration::ZERO,
        refresh_interval: Duration::ZERO,
        refresh_share: 0.0,
        fill_at_start: true,
        fetch_threads: None,
    };
    assert_eq!(cache, CacheOptions::default());
    assert_eq!(model.cache, Some(cache));
    assert_eq!((hugectr_model.max_batch, model.devices.as_slice()), (None, &[0][..]));
    assert_eq!((hugectr_model.max_dense_features, hugectr_model.labels, hugectr_model.slots), (26, 1, 10));
    let (memory, hugectr_memory) = (config.tiers.memory.unwrap(), hugectr.memory.unwrap());
    assert!((1..=16).contains(&memory.partitions));
    assert_eq!(
        (hugectr_memory.allocation_bytes, hugectr_memory.batch),
        (256 << 20, Batch { get: 65_536, set: 65_536 })
    );
    assert_eq!(memory.overflow, OverflowOptions { max_rows: None, eviction: Eviction::Random, keep: 0.8 });
    assert_eq!((memory.preload, memory.stores_fetched), (Preload { load: true, share: 1.0 }, true));

    let redis = read(&with("", r#", "volatile_db": {"type": "redis"}"#)).options.tiers.redis.unwrap();
    assert_eq!(redis.nodes, [Address { host: "127.0.0.1".into(), port: 7000 }]);
    assert_eq!((redis.user.as_str(), redis.password.reveal()), ("default", ""));
    assert_eq!((redis.partitions, redis.connections_per_node, redis.tls), (8, 5, None));
    assert_eq!((redis.timeout, redis.breaker_pause), (Duration::from_millis(100), Duration::from_secs(1)));
    assert_eq!(redis.breaker_failures, 5);

    let disk = read(&with("", r#", "persistent_db": {"type": "disk", "path": "d"}"#));
    let (disk, hugectr_disk) = (disk.options.tiers.disk.unwrap(), disk.hugectr.disk.unwrap());
    assert_eq!((disk.read_only, hugectr_disk.threads, disk.build), (false, 16, true));
}

#[test]
fn memory_can_stand_above_redis() {
    let both = r#", "volatile_db": [{"type": "hash_map", "num_partitions": 3, "overflow_margin": 18446744073709551615},
        {"type": "redis_cluster", "address": ["a:1", "b:2;c:3"], "num_partitions": 9}]"#;
    let config = read(&with("", both));
    let TierOptions { memory, redis, .. } = config.options.tiers;
    let (memory, redis) = (memory.unwrap(), redis.unwrap());
    assert_eq!((memory.partitions, redis.partitions), (3, 9));
    assert_eq!(memory.overflow.max_rows, None);
    assert_eq!(redis.nodes.iter().map(ToString::to_string).collect::<Vec<_>>(), ["a:1", "b:2", "c:3"]);
}

#[test]
fn tiers_can_be_switched_off() {
    let off = r#", "volatile_db": {"type": "disabled", "num_partitions": 2}, "persistent_db": {"type": "disabled"}"#;
    let config = read(&with("", off));
    assert_eq!(config.options.tiers, TierOptions { memory: None, redis: None, disk: None });
}

#[test]
fn a_cache_has_one_size_or_is_switched_off() {
    let size = |keys| read(&with(keys, "")).options.models[0].cache.as_ref().map(|cache| cache.size);
    assert_eq!(size(r#", "cache_rows": 1e6"#), Some(CacheSize::Rows(1_000_000)));
    assert_eq!(size(r#", "cache_bytes": 4096"#), Some(CacheSize::Bytes(4096)));
    assert_eq!(size(r#", "gpucacheper": 1"#), Some(CacheSize::Share(1.0)));
    assert_eq!(size(r#", "gpucache": false, "gpucacheper": 0"#), None);
}

#[test]
fn a_cache_that_is_switched_off_is_still_checked() {
    let error = PsJson::from_json(&with(r#", "gpucache": false, "refresh_delay": "1""#, ""), None).unwrap_err();
    assert_eq!(error.argument(), Some("models[0].refresh_delay"));
}

#[test]
fn two_models_of_hugectrs_without_tiers_are_kept_in_memory() {
    let options = read(
        r#"{"supportlonglong": true, "models": [
            {"model": "one", "sparse_files": ["one_0.model"], "num_of_worker_buffer_in_pool": 3,
             "embedding_table_names": ["sparse_embedding0"], "embedding_vecsize_per_table": [16],
             "maxnum_catfeature_query_per_table_per_sample": [10], "default_value_for_each_table": [1.0],
             "deployed_device_list": [0], "max_batch_size": 16384, "cache_refresh_percentage_per_iteration": 0.2,
             "hit_rate_threshold": 1.0, "gpucacheper": 1.0, "gpucache": true},
            {"model": "two", "sparse_files": ["two_0.model", "two_1.model"], "num_of_worker_buffer_in_pool": 3,
             "embedding_table_names": ["sparse_embedding0", "sparse_embedding1"], "embedding_vecsize_per_table": [64, 32],
             "maxnum_catfeature_query_per_table_per_sample": [3, 5], "default_value_for_each_table": [1.0, 1.0],
             "deployed_device_list": [0], "max_batch_size": 1024, "cache_refresh_percentage_per_iteration": 0.2,
             "hit_rate_threshold": 1.0, "gpucacheper": 1.0, "gpucache": true}
        ]}"#,
    )
    .options;
    assert!(options.tiers.memory.is_some_and(|memory| memory.preload == Preload { load: true, share: 1.0 }));
    let dims: Vec<Vec<_>> =
        options.models.iter().map(|model| model.tables.iter().map(|table| table.dim).collect()).collect();
    assert_eq!(dims, [vec![16], vec![64, 32]]);
    assert_eq!(options.models[1].tables[1].default_row, [1.0; 32]);
    assert!(!options.models[0].tables[0].is_same_table(&options.models[1].tables[0]));
}

#[test]
fn a_threshold_above_one_is_hugectrs_word_for_always_waiting() {
    assert_eq!(
        read(&with(r#", "hit_rate_threshold": 1.1"#, "")).options.models[0].cache.as_ref().unwrap().hit_rate_threshold,
        1.1
    );
}

#[test]
fn models_share_tables_of_the_same_name_and_file() {
    let model = |name, table, file, dim| {
        format!(
            r#"{{"model": "{name}", "sparse_files": ["{file}"], "embedding_table_names": ["{table}"],
                "embedding_vecsize_per_table": [{dim}]}}"#
        )
    };
    let models = [model("a", "t", "f", 2), model("b", "t", "f", 2), model("c", "t", "g", 2), model("d", "t", "f", 3)];
    let config = read(&format!(r#"{{"models": [{}]}}"#, models.join(",")));
    let tables: Vec<_> = config.options.models.iter().map(|model| &model.tables[0]).collect();
    assert!(tables[0].is_same_table(tables[1]));
    assert!(!tables[0].is_same_table(tables[2]));
    assert!(!tables[0].is_same_table(tables[3]));
}

#[test]
fn a_password_is_not_shown() {
    let config = PsJson::from_json(FULL, None).unwrap();
    let shown = format!("{config:?} {config:#?}");
    assert!(shown.contains("(not shown)") && !shown.contains("hunter2"), "{shown}");
}

#[test]
fn paths_in_a_file_are_relative_to_it() {
    let folder = std::env::temp_dir().join(format!("pagoda-embedding-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("ps.json");
    std::fs::write(&file, FULL).unwrap();
    let config = PsJson::from_file(&file).unwrap();
    assert_eq!(config.options.models[0].tables[0].path, folder.join("wide.model"));
    assert_eq!(config.options.models[0].tables[1].path, Path::new("/data/deep.model"));

    std::fs::write(&file, r#"{"models": 1}"#).unwrap();
    let error = PsJson::from_file(&file).unwrap_err();
    assert_eq!(error.to_string(), format!("{}: models: expected a list of models, found 1", file.display()));

    std::fs::remove_dir_all(&folder).unwrap();
    let error = PsJson::from_file(&file).unwrap_err();
    assert_eq!((error.status(), error.argument()), (Status::NotFound, file.to_str()));
}

type WithKey = fn(&str, &str) -> String;

/// Every object there can be, with the place of a key in it and the configuration that has a value under that key.
fn objects() -> [(&'static Keys, &'static str, WithKey); 5] {
    // The smallest model is in the way of a wrong value under one of its own keys; so it begins without them.
    fn in_model(key: &str, value: &str) -> String {
        let needed = [("model", r#""m""#), ("sparse_files", r#"["t"]"#), ("embedding_vecsize_per_table", "[2]")];
        let others = needed.iter().filter(|(name, _)| *name != key);
        let members: String = others.map(|(name, value)| format!(r#""{name}": {value}, "#)).collect();
        format!(r#"{{"models": [{{{members}"{key}": {value}}}]}}"#)
    }
    [
        (&KEYS, "", |key, value| format!(r#"{{"{key}": {value}}}"#)),
        (&models::KEYS, "models[0].", in_model),
        (&tiers::VOLATILE, "volatile_db.", |key, value| with("", &format!(r#", "volatile_db": {{"{key}": {value}}}"#))),
        (&tiers::PERSISTENT, "persistent_db.", |key, value| {
            with("", &format!(r#", "persistent_db": {{"{key}": {value}}}"#))
        }),
        (&tiers::UPDATE_SOURCE, "update_source.", |key, value| {
            with("", &format!(r#", "update_source": {{"{key}": {value}}}"#))
        }),
    ]
}

#[test]
fn no_known_key_is_passed_over() {
    for (keys, place, config) in objects() {
        for key in keys.known {
            // No key takes a null.
            let error = PsJson::from_json(&config(key, "null"), None).unwrap_err();
            assert_eq!(error.argument(), Some(format!("{place}{key}").as_str()), "{error}");
            assert!(error.message().starts_with("expected "), "{error}");
        }
    }
}

#[test]
fn refused_keys_say_what_to_do_instead() {
    for (keys, place, config) in objects() {
        for (key, reason) in keys.refused {
            let error = PsJson::from_json(&config(key, "1"), None).unwrap_err();
            assert_eq!(error.status(), Status::Unsupported);
            assert_eq!(error.to_string(), format!("{place}{key}: is not supported: {reason}"));
        }
    }
}

#[test]
fn errors_about_options_name_their_keys() {
    for (number, (option, key)) in keys::KEYS.iter().enumerate() {
        let error = PsJson::name_keys(Error::invalid(*option, format!("set {option}")));
        assert_eq!(error.to_string(), format!("{key}: set {key}"), "an option before it hides {option}");
        let known = |keys: &Keys, place: &str| key.strip_prefix(place).is_some_and(|key| keys.known.contains(&key));
        let objects = [(&models::KEYS, "models."), (&tiers::VOLATILE, "volatile_db."), (&KEYS, "")];
        let there =
            objects.iter().any(|(keys, place)| known(keys, place)) || known(&tiers::PERSISTENT, "persistent_db.");
        assert!(there, "there is no key {key}, in line {number}");
    }
    let node = PsJson::name_keys(Error::invalid("EmbeddingOptions.tiers.redis.nodes[1]", "has no host"));
    assert_eq!(node.argument(), Some("volatile_db.address[1]"));
    let other = Error::new(Status::Io, "the disk is full");
    assert_eq!(PsJson::name_keys(other.clone()), other);
}

#[test]
fn every_key_is_documented() {
    for (keys, place, _) in objects() {
        for key in keys.known.iter().chain(keys.refused.iter().map(|(key, _)| key)) {
            assert!(DOCS.contains(&format!("`{key}`")), "{place}{key} is not in embedding-config.md");
        }
    }
}
