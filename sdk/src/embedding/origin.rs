//! From which files a table was made, and whether they are still the same.
//!
//! Beside a table file lies a note with the number of the table, a checksum of all that was in its source, and the names,
//! sizes and times of the source's files. While those are the same nothing is read; when only they have changed, the
//! checksum tells whether the rows have too.

use std::fmt::Write;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use twox_hash::xxhash3_64;

use super::source::files;
use crate::error::{Error, Result, Status};

/// How many bytes are read at a time.
const CHUNK: usize = 4 << 20;
/// How many blocks of a file are looked at to tell it from others, and how large they are.
const BLOCKS: u64 = 64;
const BLOCK: u64 = 64 << 10;

/// The names, sizes and times of a source's files.
pub(super) fn names(path: &Path) -> Result<String> {
    attempt(path, || {
        let mut text = String::new();
        for file in files(path) {
            let about = fs::metadata(&file)?;
            let time = about.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
            let _ = writeln!(text, "{} {} {}", file.display(), about.len(), time.as_nanos());
        }
        Ok(text)
    })
}

/// A checksum of all that is in a source's files.
fn content(path: &Path) -> Result<u64> {
    attempt(path, || {
        let mut hasher = xxhash3_64::Hasher::new();
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
        Ok(hasher.finish())
    })
}

/// A checksum of the sizes of a source's files and of some of what is in them: enough to tell tables that were trained
/// apart from each other, and to be had at once.
pub(super) fn sample(path: &Path) -> Result<u64> {
    attempt(path, || {
        let mut hasher = xxhash3_64::Hasher::new();
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

/// Whether the table with this number was made from what is at `path` now, according to the note `note`, which is brought
/// up to date if it may be.
pub(super) fn is_current(note: &Path, table: u64, path: &Path, names: &str, read_only: bool) -> Result<bool> {
    let Ok(text) = fs::read_to_string(note) else { return Ok(false) };
    let mut lines = text.splitn(3, '\n');
    let mut number = || lines.next().and_then(|line| u64::from_str_radix(line, 16).ok());
    let (Some(of), Some(was)) = (number(), number()) else { return Ok(false) };
    if of != table {
        return Ok(false);
    }
    if lines.next() == Some(names) {
        return Ok(true);
    }
    if content(path)? != was {
        return Ok(false);
    }
    if !read_only {
        self::note(note, table, was, names)?;
    }
    Ok(true)
}

/// The checksum of a source from which a table was just built; `names` are from before it was opened. If something else is there
/// now no one can tell from what the table was made, and it is of no use: it would count as made from something else, and what it
/// was given be dropped with it.
pub(super) fn unchanged(path: &Path, names: &str) -> Result<u64> {
    let content = content(path)?;
    // Looked at after the contents, so that whatever was replaced before the last byte was read is noticed.
    if self::names(path)? != names {
        let message = format!("{} was changed while a table was built from it", path.display());
        return Err(Error::new(Status::Busy, format!("{message}: open it again when no one writes there")));
    }
    Ok(content)
}

/// Notes from what a table was made: a source with this checksum, and these names.
pub(super) fn note(note: &Path, table: u64, content: u64, names: &str) -> Result<()> {
    let beside = note.with_extension("source.new");
    attempt(note, || {
        fs::write(&beside, format!("{table:016x}\n{content:016x}\n{names}"))?;
        File::open(&beside)?.sync_all()?;
        fs::rename(&beside, note)
    })
}

fn attempt<T>(path: &Path, work: impl FnOnce() -> io::Result<T>) -> Result<T> {
    work().map_err(|error| {
        let status = if error.kind() == io::ErrorKind::NotFound { Status::NotFound } else { Status::Io };
        Error::new(status, format!("{} can not be read or written: {error}", path.display()))
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
