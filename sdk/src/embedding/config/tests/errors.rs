//! What each error says, word for word.

use super::*;

fn error(text: &str) -> String {
    PsJson::from_json(text, None).unwrap_err().to_string()
}

/// Of a configuration that is fine but for one key of its model, or beside it.
fn of(model: &str, beside: &str) -> String {
    error(&with(model, beside))
}

#[test]
fn unknown_keys() {
    assert_eq!(
        of("", r#", "peristent_db": {"type": "rocksdb", "path": "d"}"#),
        "peristent_db: unknown key; did you mean `persistent_db`?"
    );
    assert_eq!(of(r#", "gpucachper": 0.1"#, ""), "models[0].gpucachper: unknown key; did you mean `gpucacheper`?");
    assert_eq!(
        of("", r#", "kafka": 1"#),
        "kafka: unknown key; known here are supportlonglong, fuse_embedding_table, models, volatile_db, persistent_db, \
         update_source"
    );
    assert_eq!(
        of("", r#", "volatile_db": [{"type": "disabled"}, {"tpye": "redis_cluster"}]"#),
        "volatile_db[1].tpye: unknown key; did you mean `type`?"
    );
}

#[test]
fn keys_that_are_there_twice() {
    assert_eq!(error(r#"{"models": [], "models": []}"#), "models: is there twice; keep one");
    assert_eq!(of(r#", "model": "n""#, ""), "models[0].model: is there twice; keep one");
}

#[test]
fn wrong_types() {
    assert_eq!(error("[1, 2]"), "configuration: expected an object, found a list of 2");
    assert_eq!(error("{}"), "models: is missing: the models, a list");
    assert_eq!(error(r#"{"models": {}}"#), "models: expected a list of models, found an object");
    assert_eq!(error(r#"{"models": [null]}"#), "models[0]: expected an object, found null");
    assert_eq!(of("", r#", "supportlonglong": 1"#), "supportlonglong: expected true or false, found 1");
    assert_eq!(
        error(r#"{"models": [{"model": "m", "sparse_files": ["a", 3], "embedding_vecsize_per_table": [1, 1]}]}"#),
        "models[0].sparse_files[1]: expected a text that is not empty, found 3"
    );
    assert_eq!(
        of(r#", "max_batch_size": "64""#, ""),
        r#"models[0].max_batch_size: expected a whole number, 1 or more, found "64""#
    );
    assert_eq!(
        of(r#", "maxnum_catfeature_query_per_table_per_sample": [2.5]"#, ""),
        "models[0].maxnum_catfeature_query_per_table_per_sample[0]: expected a whole number, 0 or more, found 2.5"
    );
}

#[test]
fn values_out_of_range() {
    assert_eq!(of(r#", "gpucacheper": 10"#, ""), "models[0].gpucacheper: expected a number from 0 to 1, found 10");
    assert_eq!(
        of(r#", "gpucacheper": 0"#, ""),
        "models[0].gpucacheper: 0 leaves no room for any row; for no cache say \"gpucache\": false"
    );
    assert_eq!(
        of(r#", "hit_rate_threshold": -0.1"#, ""),
        "models[0].hit_rate_threshold: expected a number, 0 or more, found -0.1"
    );
    assert_eq!(
        of(r#", "refresh_interval": -1e300"#, ""),
        "models[0].refresh_interval: expected a number from 0 to 1000000000, found -1e300"
    );
    assert_eq!(
        error(r#"{"models": [{"model": "m", "sparse_files": ["t"], "embedding_vecsize_per_table": [0]}]}"#),
        "models[0].embedding_vecsize_per_table[0]: 0 numbers a row are not between 1 and 65536"
    );
    assert_eq!(
        of("", r#", "volatile_db": {"num_partitions": 0}"#),
        "volatile_db.num_partitions: expected a whole number from 1 to 4096, found 0"
    );
    assert_eq!(
        of("", r#", "volatile_db": {"overflow_resolution_target": 1.0}"#),
        "volatile_db.overflow_resolution_target: expected a number between 0 and 1, neither of them, found 1.0"
    );
    assert_eq!(
        of(r#", "default_value_for_each_table": [1e39]"#, ""),
        "models[0].default_value_for_each_table[0]: expected a number that an f32 can hold, found 1e39"
    );
}

#[test]
fn words_that_are_not_known() {
    assert_eq!(
        of("", r#", "volatile_db": {"overflow_policy": "evict_oldst"}"#),
        "volatile_db.overflow_policy: expected \"evict_random\", \"evict_oldest\" or \"evict_least_used\", \
         found \"evict_oldst\"; did you mean \"evict_oldest\"?"
    );
    assert_eq!(
        of("", r#", "persistent_db": {"type": "leveldb"}"#),
        "persistent_db.type: expected \"rocksdb\", \"disk\" or \"disabled\", found \"leveldb\""
    );
    assert_eq!(
        of(r#", "row_type_per_table": ["bf16"]"#, ""),
        "models[0].row_type_per_table[0]: expected \"f32\", \"f16\" or \"i8\", found \"bf16\"; did you mean \"f16\"?"
    );
}

#[test]
fn lists_of_different_lengths() {
    assert_eq!(
        of(r#", "embedding_table_names": ["a", "b"]"#, ""),
        "models[0].embedding_table_names: has 2 entries, but models[0].sparse_files has 1; each table needs one in both"
    );
    assert_eq!(
        of(r#", "default_value_for_each_table": []"#, ""),
        "models[0].default_value_for_each_table: has 0 entries, but models[0].sparse_files has 1; each table needs one \
         in both"
    );
    assert_eq!(
        of(r#", "default_value_for_each_table": [[1, 2, 3]]"#, ""),
        "models[0].default_value_for_each_table[0]: has 3 numbers, but a row of this table has 2"
    );
    assert_eq!(
        error(r#"{"models": [{"model": "m", "sparse_files": [], "embedding_vecsize_per_table": []}]}"#),
        "models[0].sparse_files: is empty; name at least one table"
    );
}

#[test]
fn names_that_are_taken() {
    let one = r#"{"model": "m", "sparse_files": ["t"], "embedding_vecsize_per_table": [1]}"#;
    assert_eq!(
        error(&format!(r#"{{"models": [{one}, {one}]}}"#)),
        "models[1].model: \"m\" is the name of models[0] too; each model needs its own"
    );
    let two = r#"{"model": "m", "sparse_files": ["t", "u"], "embedding_vecsize_per_table": [1, 1],
        "embedding_table_names": ["x", "x"]}"#;
    assert_eq!(
        error(&format!(r#"{{"models": [{two}]}}"#)),
        "models[0].embedding_table_names[1]: \"x\" is the name of table 0 of this model too; each needs its own"
    );
    assert_eq!(
        error(&format!(r#"{{"models": [{}]}}"#, one.replace("\"m\"", "\"m/n\""))),
        "models[0].model: expected a name without /, which stands between a model and its table, found \"m/n\""
    );
}

#[test]
fn what_does_not_go_together() {
    assert_eq!(
        of(r#", "gpucacheper": 0.5, "cache_bytes": 1"#, ""),
        "models[0].cache_bytes: models[0].gpucacheper says how large the cache is too; keep one of them"
    );
    assert_eq!(
        of("", r#", "volatile_db": [{"type": "redis_cluster"}, {"type": "hash_map"}]"#),
        "volatile_db[1]: is a tier in memory; there can be one, above \"redis_cluster\""
    );
    assert_eq!(
        of("", r#", "volatile_db": [{"type": "redis_cluster"}, {"type": "redis_cluster"}]"#),
        "volatile_db[1]: is a second \"redis_cluster\"; there can be one, name all its nodes in `address`"
    );
    assert_eq!(of("", r#", "volatile_db": []"#), "volatile_db: is empty; for no tier say {\"type\": \"disabled\"}");
    assert_eq!(
        of("", r#", "volatile_db": {"tls_client_key": "k"}"#),
        "volatile_db.tls_client_key: is of no use without `tls_client_certificate`; give both or none"
    );
    assert_eq!(
        of("", r#", "persistent_db": {"path": "d"}"#),
        "persistent_db.type: is missing: say \"rocksdb\", \"disk\" or \"disabled\""
    );
    assert_eq!(
        of("", r#", "persistent_db": {"type": "rocksdb"}"#),
        "persistent_db.path: is missing: the folder of the tier on disk"
    );
}

#[test]
fn what_there_is_none_of() {
    let unsupported = |model: &str, beside: &str| {
        let error = PsJson::from_json(&with(model, beside), None).unwrap_err();
        assert_eq!(error.status(), Status::Unsupported);
        error.to_string()
    };
    assert_eq!(
        unsupported("", r#", "update_source": {"type": "kafka_message_queue", "brokers": "a:1"}"#),
        "update_source.type: Kafka is not read: call upsert and delete with what your own consumer receives, and leave \
         `update_source` out"
    );
    assert_eq!(
        unsupported("", r#", "fuse_embedding_table": true"#),
        "fuse_embedding_table: true is not supported: tables are not fused, each has keys of its own; say false"
    );
    assert_eq!(
        unsupported("", r#", "volatile_db": {"type": "multi_process_hash_map"}"#),
        "volatile_db.type: \"multi_process_hash_map\" is not supported: memory is not shared between processes; use \
         \"parallel_hash_map\" in each, or \"redis_cluster\""
    );
    assert_eq!(
        unsupported(r#", "embedding_cache_type": "uvm""#, ""),
        "models[0].embedding_cache_type: \"uvm\" is not supported: there is one cache, which keeps what is used; say \
         \"dynamic\", and `gpucacheper` 1 to hold every row"
    );
    assert_eq!(
        unsupported(r#", "fp8_quant": true"#, ""),
        "models[0].fp8_quant: true is not supported: rows of 8-bit floats are not kept; say false, and \
         `row_type_per_table` \"i8\" or \"f16\" for small rows"
    );
    assert!(unsupported(r#", "use_static_table": true"#, "").starts_with("models[0].use_static_table: true is not"));
    assert_eq!(
        unsupported(r#", "dense_file": "s3://bucket/model.onnx""#, ""),
        "models[0].dense_file: \"s3://bucket/model.onnx\" is on another machine, which is not read from: copy it here"
    );
}

#[test]
fn addresses() {
    assert_eq!(
        of("", r#", "volatile_db": {"address": "a:1;b:x"}"#),
        "volatile_db.address: expected host:port, several with ; between them, found \"a:1;b:x\""
    );
    assert_eq!(of("", r#", "volatile_db": {"address": []}"#), "volatile_db.address: is empty; name at least one node");
    assert_eq!(
        of("", r#", "volatile_db": {"address": ["a:1", 2]}"#),
        "volatile_db.address[1]: expected a text, found 2"
    );
}

#[test]
fn secrets_are_not_in_errors() {
    assert_eq!(
        of("", r#", "volatile_db": {"password": 271828}"#),
        "volatile_db.password: expected a text; what was found is not shown, it may be a secret"
    );
    assert_eq!(
        of("", r#", "volatile_db": {"address": "me:271828@host:1"}"#),
        "volatile_db.address: expected host:port, found an @; the user and the password belong under `user_name` and \
         `password`"
    );
    assert!(!of("", r#", "volatile_db": {"pasword": "271828"}"#).contains("271828"));
}
