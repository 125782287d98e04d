//! Tables whose every number tells its key, as files and configurations.

use std::path::PathBuf;

use pagoda::embedding::{EmbeddingOptions, EmbeddingTable, Embeddings, PsJson};
use pagoda_test_support::Folder;

pub const DIM: usize = 4;

/// What the row of a key holds, in every place another number; `version` 0 is what the table was loaded with.
pub fn row(key: i64, version: u64) -> [f32; DIM] {
    // Whole numbers that an f32 holds exactly.
    let number = (key.rem_euclid(1 << 20)) as f32;
    [number, version as f32, -number, (key >> 40) as f32]
}

/// The rows of keys, one after the other.
pub fn rows(keys: &[i64], version: u64) -> Vec<f32> {
    keys.iter().flat_map(|&key| row(key, version)).collect()
}

/// Writes a table as HugeCTR does; gives its folder.
pub fn write(folder: &Folder, name: &str, keys: &[i64]) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::create_dir_all(&path).unwrap();
    let keys_as_bytes: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
    let rows_as_bytes: Vec<u8> = rows(keys, 0).iter().flat_map(|number| number.to_le_bytes()).collect();
    for (name, bytes) in [("key", keys_as_bytes), ("emb_vector", rows_as_bytes)] {
        let path = path.join(name);
        // Files that are written anew count as another table.
        if std::fs::read(&path).ok().as_ref() != Some(&bytes) {
            std::fs::write(path, bytes).unwrap();
        }
    }
    path
}

/// A configuration with one model `m`, whose one table `t` has these keys. `model` and `top` are more members of the
/// JSON objects, each with a comma before it.
pub fn config(folder: &Folder, keys: &[i64], model: &str, top: &str) -> EmbeddingOptions {
    ps_json(folder, keys, model, top).options
}

/// As [`config`], with what only HugeCTR uses.
pub fn ps_json(folder: &Folder, keys: &[i64], model: &str, top: &str) -> PsJson {
    write(folder, "t", keys);
    let json = format!(
        r#"{{"supportlonglong": true, "models": [{{
            "model": "m", "sparse_files": ["t"], "embedding_table_names": ["t"],
            "embedding_vecsize_per_table": [{DIM}], "maxnum_catfeature_query_per_table_per_sample": [1],
            "default_value_for_each_table": [[-1, -2, -3, -4]], "deployed_device_list": [0], "max_batch_size": 64
            {model}
        }}] {top} }}"#
    );
    PsJson::from_json(&json, Some(folder.path())).unwrap()
}

/// The default vector of those tables.
pub const DEFAULT: [f32; DIM] = [-1.0, -2.0, -3.0, -4.0];

/// Opens a configuration and gives its table `t`, when everything is loaded.
pub fn open(config: &EmbeddingOptions) -> (Embeddings, EmbeddingTable) {
    let embeddings = Embeddings::open(config).unwrap();
    embeddings.wait();
    let table = embeddings.table("t").unwrap();
    (embeddings, table)
}
