//! The note beside a table file: from which source the table was built.
//!
//! The table file itself holds a hash of the contents of its source. The note saves reading the source at every open:
//! it has the names, sizes and times of the files of the source, and while these are the same, the contents count as
//! unchanged. It also has the path of the source, by which a table is found again after its folders were moved. A note
//! that is missing or damaged is written again.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::checksum::xxh3;
use crate::embedding::source::fingerprint::ContentHash;
use crate::embedding::tiers::disk::TableId;
use crate::error::{Error, Result, Status};
use crate::files::replace;

/// The first bytes of a note. Its checksum follows.
const MAGIC: &str = "pagoda-source 1 ";

/// What the note of a table file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceNote {
    /// The id of the table.
    pub(super) table: TableId,
    /// The hash of the contents of its source.
    pub(super) content: ContentHash,
    /// The row type of the options; `source` if they name none.
    pub(super) kept: String,
    /// The path of its source, relative to the folder of the table file.
    pub(super) source: String,
    /// The names, sizes and times of the files of the source.
    pub(super) names: String,
}

impl SourceNote {
    /// The path of the note of a table file.
    pub(super) fn beside(table_file: &Path) -> PathBuf {
        table_file.with_extension("source")
    }

    /// Reads the note of a table file; `None` if there is none or it is damaged. A note that can not be read is an
    /// error.
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

    /// Writes the note of a table file. A failure is logged only: the note just saves time.
    pub(super) fn write(&self, table_file: &Path) {
        let path = Self::beside(table_file);
        if let Err(error) = replace(&path, self.encode().as_bytes()) {
            log::warn!("{} can not be written: {error}. The source is read at the next open", path.display());
        }
    }

    fn encode(&self) -> String {
        let source = serde_json::Value::from(self.source.as_str());
        let body = format!("{:016x} {:016x} {}\n{source}\n{}", self.table.0, self.content.0, self.kept, self.names);
        format!("{MAGIC}{:016x}\n{body}", xxh3(body.as_bytes()))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (sum, body) = std::str::from_utf8(bytes).ok()?.strip_prefix(MAGIC)?.split_once('\n')?;
        if u64::from_str_radix(sum, 16).ok()? != xxh3(body.as_bytes()) {
            return None;
        }
        let mut lines = body.splitn(3, '\n');
        let mut first = lines.next()?.splitn(3, ' ');
        let mut number = || u64::from_str_radix(first.next()?, 16).ok();
        let (table, content) = (number()?, number()?);
        let source: serde_json::Value = serde_json::from_str(lines.next()?).ok()?;
        Some(Self {
            table: TableId(table),
            content: ContentHash(content),
            kept: first.next()?.to_owned(),
            source: source.as_str()?.to_owned(),
            names: lines.next()?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    #[test]
    fn a_note_comes_back_and_no_damaged_one_does() {
        let folder = Folder::new();
        let table = folder.path().join("t.table");
        let note = SourceNote {
            table: TableId(1),
            content: ContentHash(u64::MAX),
            kept: "f32".into(),
            source: "../new\nline \"and\" more".into(),
            names: "\"key\" 8 9\n\"emb_vector\" 4 9\n".into(),
        };
        assert_eq!(SourceNote::read(&table).unwrap(), None);
        note.write(&table);
        assert_eq!(SourceNote::read(&table).unwrap(), Some(note.clone()));
        let bytes = fs::read(SourceNote::beside(&table)).unwrap();
        for end in 0..bytes.len() {
            assert_eq!(SourceNote::decode(&bytes[..end]), None, "{end} bytes");
            for bit in 0..8 {
                let mut bytes = bytes.clone();
                bytes[end] ^= 1 << bit;
                // The checksum may be written in capitals.
                assert!(SourceNote::decode(&bytes).is_none_or(|read| read == note), "bit {bit} of byte {end}");
            }
        }
    }
}
