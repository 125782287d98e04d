//! Whether the files of a folder are those that were exported.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use super::json::damaged;
use super::{FolderFile, ModelFolder};
use crate::checksum::{Sha256, sha256_hex};
use crate::error::{Error, Result, Status};

/// Checks that `version` is the hash of the text of pagoda.json with zeros in the version's place.
pub(super) fn version(text: &str, version: &str) -> Result<()> {
    if version.len() != 64 || !version.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return Err(damaged(format!("`version`: expected 64 hexadecimal digits, found {version:?}")));
    }
    let hash = sha256_hex(text.replacen(version, &"0".repeat(64), 1).as_bytes());
    if hash != version {
        let message = format!("it was changed after it was exported: its hash is {hash} and its version {version}");
        return Err(damaged(format!("{message}. Export the model again")));
    }
    Ok(())
}

/// Checks the size and the hash of every file.
pub(super) fn files(folder: &ModelFolder) -> Result<()> {
    folder.files.iter().try_for_each(|file| check(&folder.file(&file.name), file))
}

fn check(path: &Path, file: &FolderFile) -> Result<()> {
    let name = &file.name;
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::NotFound => Error::new(Status::NotFound, format!("{name} is missing; copy the whole folder")),
        _ => Error::new(Status::Io, format!("{name} can not be read: {error}")),
    };
    let mut opened = File::open(path).map_err(failed)?;
    let bytes = opened.metadata().map_err(failed)?.len();
    if bytes != file.bytes {
        let what = if bytes < file.bytes { "was cut" } else { "is not the one that was exported" };
        let message = format!("{name} {what}: it has {bytes} bytes and pagoda.json says {}", file.bytes);
        return Err(Error::new(Status::Model, format!("{message}. Copy the whole folder again")));
    }
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match opened.read(&mut buffer).map_err(failed)? {
            0 => break,
            count => hash.update(&buffer[..count]),
        }
    }
    let hash = hash.hex();
    if hash != file.sha256.to_ascii_lowercase() {
        let message = format!("{name} was changed: its SHA-256 is {hash} and pagoda.json says {}", file.sha256);
        return Err(Error::new(Status::Model, format!("{message}. Copy the whole folder again")));
    }
    Ok(())
}
