//! From which source a table file was made, and whether that is still the same.
//!
//! The table file has a checksum of all that was in its source. A note beside it saves reading the source at every open: it
//! has the names, sizes and times of the source's files, and while those are the same nothing is read. It also says where
//! the source lies, from which a table is known again when folders were moved. A note that is missing or damaged is made anew.

use std::fmt::Write;
use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use twox_hash::xxhash3_64;

use super::source::files;
use crate::error::{Error, Result, Status};
use crate::files::replace;
use crate::store::checksum;

/// How many bytes are read at a time.
const CHUNK: usize = 4 << 20;
/// How many blocks of a file are looked at to tell it from others, and how large they are.
const BLOCKS: u64 = 64;
const BLOCK: u64 = 64 << 10;
/// What a note begins with; its checksum follows.
const MAGIC: &str = "pagoda-source 1 ";

/// The names, sizes and times of a source's files.
pub(super) fn names(path: &Path) -> Result<String> {
    attempt(path, || {
        let mut text = String::new();
        for file in files(path) {
            let about = fs::metadata(&file)?;
            // Within the source, so that one that was moved with its folder need not be read.
            let name = file.strip_prefix(path).unwrap_or(&file);
            // As the system has it, which may be before 1970.
            let _ = writeln!(text, "{name:?} {} {}.{:09}", about.len(), about.mtime(), about.mtime_nsec());
        }
        Ok(text)
    })
}

/// A checksum of all that is in a source's files.
pub(super) fn content(path: &Path) -> Result<u64> {
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

/// What is noted of a table file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// The number of the table.
    pub(super) table: u64,
    /// The checksum of all that was in its source.
    pub(super) content: u64,
    /// As what its rows are kept, as far as the configuration says so.
    pub(super) kept: String,
    /// Where its source lies, from the folder of the table file.
    pub(super) source: String,
    /// The names, sizes and times of the source's files.
    pub(super) names: String,
}

impl Note {
    /// Where the note of a table file lies.
    pub(super) fn beside(table_file: &Path) -> PathBuf {
        table_file.with_extension("source")
    }

    /// Reads the note of a table file; `None` if there is none, or it is damaged. One that can not be read is an error.
    pub(super) fn read(table_file: &Path) -> Result<Option<Self>> {
        let path = Self::beside(table_file);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let (path, table) = (path.display(), table_file.display());
                let message = format!("{path}, which says from what the table {table} was built, can not be read");
                let hint = "make it readable, or remove it: it is made anew from the source";
                return Err(Error::new(Status::Io, format!("{message}: {error}. {hint}")));
            }
            Ok(bytes) => bytes,
        };
        let note = Self::decode(&bytes);
        if note.is_none() {
            log::warn!("{} is damaged: the source of the table is read to make it anew", path.display());
        }
        Ok(note)
    }

    /// Writes the note of a table file. It only saves time, so a failure is no error.
    pub(super) fn write(&self, table_file: &Path) {
        let path = Self::beside(table_file);
        if let Err(error) = replace(&path, self.encode().as_bytes()) {
            log::warn!("{} can not be written: {error}. The source is read at the next open", path.display());
        }
    }

    fn encode(&self) -> String {
        let source = serde_json::Value::from(self.source.as_str());
        let body = format!("{:016x} {:016x} {}\n{source}\n{}", self.table, self.content, self.kept, self.names);
        format!("{MAGIC}{:016x}\n{body}", checksum(body.as_bytes()))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (sum, body) = std::str::from_utf8(bytes).ok()?.strip_prefix(MAGIC)?.split_once('\n')?;
        if u64::from_str_radix(sum, 16).ok()? != checksum(body.as_bytes()) {
            return None;
        }
        let mut lines = body.splitn(3, '\n');
        let mut first = lines.next()?.splitn(3, ' ');
        let mut number = || u64::from_str_radix(first.next()?, 16).ok();
        let (table, content) = (number()?, number()?);
        let source: serde_json::Value = serde_json::from_str(lines.next()?).ok()?;
        Some(Self {
            table,
            content,
            kept: first.next()?.to_owned(),
            source: source.as_str()?.to_owned(),
            names: lines.next()?.to_owned(),
        })
    }
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

    #[test]
    fn a_note_comes_back_and_no_damaged_one_does() {
        let folder = Folder::new();
        let table = folder.path().join("t.table");
        let note = Note {
            table: 1,
            content: u64::MAX,
            kept: "f32".into(),
            source: "../new\nline \"and\" more".into(),
            names: "\"key\" 8 9\n\"emb_vector\" 4 9\n".into(),
        };
        assert_eq!(Note::read(&table).unwrap(), None);
        note.write(&table);
        assert_eq!(Note::read(&table).unwrap(), Some(note.clone()));
        let bytes = fs::read(Note::beside(&table)).unwrap();
        for end in 0..bytes.len() {
            assert_eq!(Note::decode(&bytes[..end]), None, "{end} bytes");
            for bit in 0..8 {
                let mut bytes = bytes.clone();
                bytes[end] ^= 1 << bit;
                // The checksum may be written in capitals.
                assert!(Note::decode(&bytes).is_none_or(|read| read == note), "bit {bit} of byte {end}");
            }
        }
    }
}
