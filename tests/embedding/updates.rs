//! Rows that change: at once, by refresh, by version; deleted ones; models that come and go.

use pagoda::Status;
use pagoda::embedding::{EmbeddingTable, Embeddings, Miss, Reach};
use pagoda_test_support::Folder;

use crate::files::{DEFAULT, DIM, config, open, ps_json, row, rows, write};

const CACHE: &str = r#", "gpucache": true, "cache_rows": 64, "hit_rate_threshold": 1.0"#;
const DISK: &str = r#", "persistent_db": {"type": "disk", "path": "disk"}"#;
/// Each combination of tiers that runs without a server.
const TIERS: [&str; 3] = [
    "",
    DISK,
    r#", "volatile_db": {"type": "parallel_hash_map", "num_partitions": 4, "initial_cache_rate": 0.2},
         "persistent_db": {"type": "rocksdb", "path": "disk"}"#,
];

fn look(table: &EmbeddingTable, keys: &[i64]) -> Vec<f32> {
    let (mut numbers, mut found) = (vec![f32::NAN; keys.len() * DIM], vec![false; keys.len()]);
    table.lookup(keys, &mut numbers, &mut found, Miss::Wait).unwrap();
    for (row, found) in numbers.chunks_exact(DIM).zip(found) {
        assert_eq!(row != DEFAULT, found);
    }
    numbers
}

#[test]
fn changes_are_seen_at_once_on_every_tier() {
    for tiers in TIERS {
        let folder = Folder::new();
        let keys: Vec<i64> = (0..200).map(|key| key << 35).collect();
        let (embeddings, table) = open(&config(&folder, &keys, CACHE, tiers));
        assert_eq!(look(&table, &keys), rows(&keys, 0));
        let (changed, kept) = keys.split_at(100);
        table.upsert(5, changed, &rows(changed, 5), Reach::AtOnce).unwrap();
        table.delete(6, &changed[..10], Reach::AtOnce).unwrap();
        table.upsert(7, &[-1], &row(-1, 7), Reach::AtOnce).unwrap();
        let expected = |table: &EmbeddingTable| {
            assert_eq!(look(table, &changed[10..]), rows(&changed[10..], 5), "{tiers}");
            assert_eq!(look(table, &changed[..10]), DEFAULT.repeat(10), "{tiers}");
            assert_eq!(look(table, &[-1]), row(-1, 7), "{tiers}");
            assert_eq!(look(table, kept), rows(kept, 0), "{tiers}");
        };
        expected(&table);
        // An older change comes too late; the same version again counts.
        table.upsert(4, &changed[..20], &rows(&changed[..20], 4), Reach::AtOnce).unwrap();
        table.delete(3, changed, Reach::AtOnce).unwrap();
        table.upsert(5, changed, &rows(changed, 5), Reach::AtOnce).unwrap();
        expected(&table);
        drop((embeddings, table));
        if tiers.contains("disk") {
            let (_embeddings, table) = open(&config(&folder, &keys, CACHE, tiers));
            expected(&table);
        }
    }
}

#[test]
fn a_new_table_file_replaces_the_old_one_and_its_updates() {
    let folder = Folder::new();
    let (embeddings, table) = open(&config(&folder, &[1, 2, 3], CACHE, DISK));
    table.upsert(9, &[1, 4], &rows(&[1, 4], 9), Reach::AtOnce).unwrap();
    drop((embeddings, table));
    let ps_json = ps_json(&folder, &[1, 2, 5], CACHE, DISK);
    let refused = Embeddings::open_ps_json(&ps_json).err().expect("updates would be lost");
    assert_eq!(refused.argument(), Some("persistent_db.drop_updates_on_source_change"), "{refused}");
    let refused = Embeddings::open(&ps_json.options).err().expect("updates would be lost");
    let option = "EmbeddingOptions.tiers.disk.drop_updates_on_source_change";
    assert_eq!(refused.argument(), Some(option), "without a file the option itself is named: {refused}");
    let allowed = r#", "persistent_db": {"type": "disk", "path": "disk", "drop_updates_on_source_change": true}"#;
    let (_embeddings, table) = open(&config(&folder, &[1, 2, 5], CACHE, allowed));
    assert_eq!(look(&table, &[1, 2, 5]), rows(&[1, 2, 5], 0));
    assert_eq!(look(&table, &[3, 4]), DEFAULT.repeat(2));
}

#[test]
fn changes_by_refresh_are_seen_when_the_cache_is_refreshed() {
    let folder = Folder::new();
    let (_embeddings, table) = open(&config(&folder, &[1, 2, 3], CACHE, DISK));
    assert_eq!(look(&table, &[1, 2]), rows(&[1, 2], 0));
    table.upsert(1, &[1, 3], &rows(&[1, 3], 1), Reach::ByRefresh).unwrap();
    table.delete(1, &[2], Reach::ByRefresh).unwrap();
    assert_eq!(look(&table, &[1, 2]), rows(&[1, 2], 0), "the cache knows nothing yet");
    table.refresh();
    assert_eq!(look(&table, &[1, 3]), rows(&[1, 3], 1));
    assert_eq!(look(&table, &[2]), DEFAULT);
}

#[test]
fn a_cache_refreshes_itself() {
    let folder = Folder::new();
    let refresh = r#", "refresh_delay": 0.05, "refresh_interval": 0.1, "cache_refresh_percentage_per_iteration": 0.5"#;
    let (_embeddings, table) = open(&config(&folder, &[1, 2, 3], &format!("{CACHE}{refresh}"), DISK));
    assert_eq!(look(&table, &[1]), row(1, 0));
    table.upsert(1, &[1], &row(1, 1), Reach::ByRefresh).unwrap();
    for _ in 0..1000 {
        if look(&table, &[1]) == row(1, 1) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(look(&table, &[1]), row(1, 1));
    assert!((0..10).contains(&table.stats().stale_seconds), "{:?}", table.stats());
}

#[test]
fn a_cache_is_refreshed_as_often_as_any_of_its_models_wants() {
    let often = r#", "refresh_interval": 0.1, "cache_refresh_percentage_per_iteration": 0.5"#;
    let seldom = r#", "refresh_interval": 3600"#;
    for (first, second) in [(often, seldom), (seldom, often)] {
        let folder = Folder::new();
        let config = |refresh: &str| config(&folder, &[1, 2, 3], &format!("{CACHE}{refresh}"), DISK);
        let (embeddings, table) = open(&config(first));
        let mut model = config(second).models.remove(0);
        model.name = "n".into();
        embeddings.add(&model).unwrap();
        assert_eq!(look(&table, &[1]), row(1, 0));
        table.upsert(1, &[1], &row(1, 1), Reach::ByRefresh).unwrap();
        for _ in 0..1000 {
            if look(&table, &[1]) == row(1, 1) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(look(&table, &[1]), row(1, 1), "{first}, then {second}");
    }
}

#[test]
fn read_only_tables_do_not_change() {
    let folder = Folder::new();
    let read_only = r#", "volatile_db": {"type": "disabled"},
        "persistent_db": {"type": "disk", "path": "disk", "read_only": true}"#;
    let refused = Embeddings::open(&config(&folder, &[1], CACHE, read_only)).err().expect("it was not built");
    assert!(refused.message().contains("open it once without"), "{refused}");
    drop(open(&config(&folder, &[1], CACHE, DISK)));
    let (_embeddings, table) = open(&config(&folder, &[1], CACHE, read_only));
    assert_eq!(look(&table, &[1]), row(1, 0));
    let refused = table.upsert(1, &[1], &row(1, 1), Reach::AtOnce).unwrap_err();
    assert_eq!(refused.status(), Status::Unsupported);
    assert_eq!(look(&table, &[1]), row(1, 0));
    // With a tier above that takes it, it is seen; until it leaves there.
    let (_embeddings, table) = open(&config(&folder, &[1], CACHE, &read_only.replace("disabled", "hash_map")));
    table.upsert(1, &[1], &row(1, 1), Reach::AtOnce).unwrap();
    assert_eq!(look(&table, &[1]), row(1, 1));
}

#[test]
fn models_share_tables_and_come_and_go() {
    let folder = Folder::new();
    write(&folder, "u", &[7, 8]);
    let config = config(&folder, &[1, 2], CACHE, DISK);
    let (embeddings, table) = open(&config);
    let mut second = config.models[0].clone();
    second.name = "n".into();
    second.tables[0].default_row = vec![9.0; DIM];
    let mut other = second.tables[0].clone();
    (other.name, other.path) = ("u".into(), folder.path().join("u"));
    second.tables.push(other);
    embeddings.add(&second).unwrap();
    assert_eq!(embeddings.add(&second).unwrap_err().argument(), Some("model"));
    assert_eq!(embeddings.models(), ["m", "n"]);
    let shared = embeddings.table("n/t").unwrap();
    table.upsert(1, &[1], &row(1, 1), Reach::AtOnce).unwrap();
    assert_eq!(look(&shared, &[1]), row(1, 1), "one table");
    let mut numbers = [0.0; DIM];
    shared.lookup(&[55], &mut numbers, &mut [true], Miss::Wait).unwrap();
    assert_eq!(numbers, [9.0; DIM], "each model has a default of its own");
    assert_eq!(look(&embeddings.table("u").unwrap(), &[7, 8]), rows(&[7, 8], 0));
    embeddings.retire("m").unwrap();
    assert_eq!(embeddings.retire("m").unwrap_err().status(), Status::NotFound);
    assert_eq!(embeddings.table("m/t").err().unwrap().status(), Status::NotFound);
    assert_eq!(look(&table, &[1]), row(1, 1), "the handle stays valid");
    assert_eq!(look(&embeddings.table("t").unwrap(), &[1, 2])[..DIM], row(1, 1));
    embeddings.retire("n").unwrap();
    assert_eq!(embeddings.table("t").err().unwrap().status(), Status::NotFound);
    drop((table, shared));
    // All of it is closed: it can be opened again.
    embeddings.add(&second).unwrap();
}

#[test]
fn metrics_tell_of_tables_that_are_open() {
    let folder = Folder::new();
    let mut config = config(&folder, &[1, 2], CACHE, "");
    config.models[0].name = "told".into();
    let (embeddings, table) = open(&config);
    look(&table, &[1, 2]);
    assert!(pagoda::metrics::text().contains(r#"pagoda_embedding_lookups_total{table="told/t"} 1"#));
    embeddings.retire("told").unwrap();
    assert!(pagoda::metrics::text().contains("told/t"), "a handle is open");
    drop((embeddings, table));
    assert!(!pagoda::metrics::text().contains("told/t"));
}

#[test]
fn an_older_change_never_hides_a_newer_one() {
    let folder = Folder::new();
    let keys: Vec<i64> = (0..200).collect();
    // Host memory that holds some of the rows, or hardly any.
    let tiers = r#", "volatile_db": {"type": "hash_map", "num_partitions": 1, "initial_cache_rate": 0.1,
        "overflow_margin": 20}, "persistent_db": {"type": "disk", "path": "disk"}"#;
    let (embeddings, table) = open(&config(&folder, &keys, CACHE, tiers));
    table.upsert(5, &keys, &rows(&keys, 5), Reach::AtOnce).unwrap();
    drop((embeddings, table));
    let (_embeddings, table) = open(&config(&folder, &keys, CACHE, tiers));
    table.upsert(3, &keys[..100], &rows(&keys[..100], 3), Reach::AtOnce).unwrap();
    table.delete(4, &keys[100..], Reach::AtOnce).unwrap();
    assert_eq!(look(&table, &keys), rows(&keys, 5));
}

#[test]
fn the_same_table_is_the_same_however_it_is_written_down() {
    let folder = Folder::new();
    let (embeddings, table) = open(&config(&folder, &[1, 2], CACHE, DISK));
    table.upsert(5, &[1], &row(1, 5), Reach::AtOnce).unwrap();
    drop((embeddings, table));
    // The files are written anew with what was in them.
    for name in ["key", "emb_vector"] {
        let path = folder.path().join("t").join(name);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
    }
    let mut config = config(&folder, &[1, 2], CACHE, DISK);
    config.models[0].tables[0].path = folder.path().join("disk/../t/.");
    let (embeddings, table) = open(&config);
    assert_eq!(look(&table, &[1, 2]), [row(1, 5), row(2, 0)].concat());
    // A model that is added later shares a table that a handle keeps open.
    embeddings.retire("m").unwrap();
    embeddings.add(&config.models[0]).unwrap();
    embeddings.table("t").unwrap().upsert(6, &[2], &row(2, 6), Reach::AtOnce).unwrap();
    assert_eq!(look(&table, &[2]), row(2, 6));
    assert_eq!(embeddings.tables("nothing").err().unwrap().status(), Status::NotFound);
}

#[test]
fn a_table_whose_file_was_replaced_is_not_shared_any_more() {
    for tiers in TIERS {
        let folder = Folder::new();
        let config = config(&folder, &[1, 2], CACHE, tiers);
        let (embeddings, old) = open(&config);
        let add = |embeddings: &Embeddings| {
            embeddings.add(&config.models[0])?;
            embeddings.wait();
            embeddings.table("t")
        };
        embeddings.retire("m").unwrap();
        write(&folder, "t", &[1, 3, 4]);
        if tiers.is_empty() {
            let new = add(&embeddings).unwrap();
            assert_eq!(look(&new, &[1, 2, 3]), [row(1, 0), DEFAULT, row(3, 0)].concat());
            assert_eq!(look(&old, &[1, 2, 3]), [row(1, 0), row(2, 0), DEFAULT].concat(), "the handle stays valid");
            // The new one is shared again.
            embeddings.retire("m").unwrap();
            new.upsert(1, &[1], &row(1, 1), Reach::AtOnce).unwrap();
            assert_eq!(look(&add(&embeddings).unwrap(), &[1]), row(1, 1));
            continue;
        }
        let refused = add(&embeddings).err().expect("the old table file is being written to");
        assert_eq!(refused.status(), Status::Busy);
        assert!(refused.message().contains("was replaced"), "{refused}");
        assert!(embeddings.models().is_empty());
        drop(old);
        // The thread that looks after tables may have it for a moment.
        let mut new = add(&embeddings);
        for _ in 0..100 {
            if new.as_ref().err().is_none_or(|error| error.status() != Status::Busy) {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
            new = add(&embeddings);
        }
        let new = new.unwrap();
        assert_eq!(look(&new, &[1, 2, 3]), [row(1, 0), DEFAULT, row(3, 0)].concat());
        // Another time of the same contents is no other table.
        embeddings.retire("m").unwrap();
        let file = std::fs::File::options().append(true).open(folder.path().join("t/key")).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        new.upsert(1, &[1], &row(1, 1), Reach::AtOnce).unwrap();
        assert_eq!(look(&add(&embeddings).unwrap(), &[1]), row(1, 1));
    }
}

#[test]
fn numbers_that_a_row_can_not_hold_are_refused() {
    let folder = Folder::new();
    for (kept, number) in [("f16", 1e6), ("i8", f32::INFINITY), ("f16", f32::NAN)] {
        let kept = format!(r#"{CACHE}, "row_type_per_table": ["{kept}"]"#);
        let (_embeddings, table) = open(&config(&folder, &[1], &kept, ""));
        let refused = table.upsert(1, &[1], &[0.0, number, 0.0, 0.0], Reach::AtOnce).unwrap_err();
        assert_eq!(refused.argument(), Some("numbers"));
    }
    // Nor are they loaded.
    for tiers in TIERS {
        for (kept, number) in [("f16", 1e6), ("i8", f32::INFINITY), ("f16", f32::NAN)] {
            let folder = Folder::new();
            let kept_so = format!(r#"{CACHE}, "row_type_per_table": ["{kept}"]"#);
            let config = config(&folder, &[1, 2, 77], &kept_so, tiers);
            let rows: Vec<u8> = [0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0, 0.0, number, 2.0, 3.0_f32]
                .iter()
                .flat_map(|number| number.to_le_bytes())
                .collect();
            std::fs::write(folder.path().join("t/emb_vector"), rows).unwrap();
            let refused = Embeddings::open(&config).err().expect("a row can not be kept");
            assert_eq!(refused.status(), Status::InvalidArgument);
            for part in ["t/emb_vector", "key 77", &number.to_string(), kept, "row_type_per_table"] {
                assert!(refused.message().contains(part), "{part} in {refused}");
            }
        }
    }
}
