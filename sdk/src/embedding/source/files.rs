//! The files of a source.

use std::path::{Path, PathBuf};

/// The files of a table that comes as a folder.
const PARTS: [&str; 5] = ["emb_vector", "key", "keys.npy", "rows.npy", "scales.npy"];

/// The files that the table at a path is read from, in order. Other files of a folder are ignored.
pub(super) fn files(path: &Path) -> Vec<PathBuf> {
    if !path.is_dir() {
        return vec![path.to_owned()];
    }
    PARTS.iter().map(|name| path.join(name)).filter(|file| file.exists()).collect()
}
