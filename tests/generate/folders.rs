//! Folders that differ from the model's.

use std::fs;
use std::path::Path;

use pagoda_test_support::Folder;
use ring::digest::{SHA256, digest};
use serde_json::Value;

/// A copy of a folder.
pub fn copy_of(of: &Path) -> Folder {
    let copy = Folder::new();
    for file in fs::read_dir(of).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

fn hash(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Replaces a file of a folder, and the hashes.
pub fn replace(folder: &Folder, name: &str, with: &[u8]) {
    let path = folder.path().join(name);
    change(folder, |about| about["files"][name]["sha256"] = hash(with).into());
    fs::write(path, with).unwrap();
}

/// Changes the pagoda.json of a folder.
pub fn change(folder: &Folder, edit: impl FnOnce(&mut Value)) {
    let path = folder.path().join("pagoda.json");
    let mut about: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut about);
    // The version is the hash of the text with zeros in its place.
    let zeros = "0".repeat(64);
    about["version"] = zeros.as_str().into();
    let text = about.to_string();
    fs::write(path, text.replace(&zeros, &hash(text.as_bytes()))).unwrap();
}
