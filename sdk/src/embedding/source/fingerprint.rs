//! Fingerprints of a source: they tell whether its files have changed.

use std::fmt::Write;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use super::files::files;
use crate::checksum::Xxh3;
use crate::error::{Error, Result, Status};

/// A hash of the whole contents of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::embedding) struct ContentHash(pub(in crate::embedding) u64);

/// The number of bytes that are read at a time.
const CHUNK: usize = 4 << 20;
/// The number of blocks of each file that a sample reads, and their size.
const BLOCKS: u64 = 64;
const BLOCK: u64 = 64 << 10;

/// The names, sizes and modification times of the files of a source.
pub(in crate::embedding) fn names(path: &Path) -> Result<String> {
    attempt(path, || {
        let mut text = String::new();
        for file in files(path) {
            let about = fs::metadata(&file)?;
            // Relative to the source: a source that was moved with its folder keeps its fingerprint.
            let name = file.strip_prefix(path).unwrap_or(&file);
            // As the system returns it: it may be before 1970.
            let _ = writeln!(text, "{name:?} {} {}.{:09}", about.len(), about.mtime(), about.mtime_nsec());
        }
        Ok(text)
    })
}

/// A hash of the whole contents of the files of a source.
pub(in crate::embedding) fn content(path: &Path) -> Result<ContentHash> {
    attempt(path, || {
        let mut hasher = Xxh3::new();
        let mut chunk = vec![0; CHUNK];
        for file in files(path) {
            let mut file = File::open(file)?;
            hasher.write_u64(file.metadata()?.len());
            loop {
                let read = file.read(&mut chunk)?;
                if read == 0 {
                    break;
                }
                hasher.write(&chunk[..read]);
            }
        }
        Ok(ContentHash(hasher.finish()))
    })
}

/// A hash of the sizes of the files of a source and of some blocks of each. It tells apart tables that were trained
/// separately, and does not read whole files.
pub(in crate::embedding) fn sample(path: &Path) -> Result<u64> {
    attempt(path, || {
        let mut hasher = Xxh3::new();
        for file in files(path) {
            let file = File::open(file)?;
            let length = file.metadata()?.len();
            hasher.write_u64(length);
            for block in 0..BLOCKS {
                let at = (length.saturating_sub(BLOCK) as u128 * u128::from(block) / u128::from(BLOCKS - 1)) as u64;
                let mut bytes = vec![0; (length - at).min(BLOCK) as usize];
                file.read_exact_at(&mut bytes, at)?;
                hasher.write(&bytes);
            }
        }
        Ok(hasher.finish())
    })
}

/// The content hash of a source from which a table was just built. `names` are the names, sizes and times from before
/// the source was opened.
///
/// # Errors
/// `BUSY` if the source has changed since: the table is then not built from its present contents. It would be rebuilt
/// at the next open, and its updates would be lost.
pub(in crate::embedding) fn unchanged(path: &Path, names: &str) -> Result<ContentHash> {
    let content = content(path)?;
    // Compared after the contents were read, so that a replacement before the last read is noticed.
    if self::names(path)? != names {
        let message = format!("{} was changed while a table was built from it", path.display());
        return Err(Error::new(Status::Busy, format!("{message}: open it again when nothing writes there")));
    }
    Ok(content)
}

fn attempt<T>(path: &Path, work: impl FnOnce() -> io::Result<T>) -> Result<T> {
    work().map_err(|error| {
        let status = if error.kind() == io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be read: {error}", path.display()))
    })
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    #[test]
    fn only_what_a_table_is_read_from_counts() {
        let folder = Folder::new();
        let source = folder.path();
        fs::write(source.join("key"), "12345678").unwrap();
        fs::write(source.join("emb_vector"), "1234").unwrap();
        let all = || (names(source).unwrap(), content(source).unwrap(), sample(source).unwrap());
        let before = all();
        fs::write(source.join("t-0123.table"), "built").unwrap();
        assert_eq!(all(), before);
        fs::write(source.join("emb_vector"), "12345678").unwrap();
        let now = all();
        assert!(now.0 != before.0 && now.1 != before.1 && now.2 != before.2);
    }
}
