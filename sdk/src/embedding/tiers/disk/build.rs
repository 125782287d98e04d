//! Builds a table file from a source: the records in the order of the source, then the index, which is held in memory
//! during the build.

use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::SystemTime;

use super::file_lock::open_locked;
use super::prefetch::prefetch;
use super::table_format::{BUCKET_BYTES, Bucket, Content, HEADER_BYTES, Header, MAX_RECORDS, insert, is_table, seal};
use super::update_log;
use crate::embedding::row::{Layout, RowType};
use crate::embedding::source::fingerprint::ContentHash;
use crate::embedding::source::{Chunk, Source};
use crate::error::{Error, Result, Status};
use crate::files::{Locked, beside, sync_parent};

/// The approximate number of bytes that are read and written at a time.
const CHUNK_BYTES: usize = 4 << 20;
/// The prefetch distance in keys.
const AHEAD: usize = 16;

/// What a build has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Built {
    /// Keys in the table.
    pub keys: u64,
    /// Rows of the source that a later row of the same key replaced.
    pub duplicates: u64,
    /// Bytes of the file.
    pub bytes: u64,
}

/// Builds the table file `path` from a source, with rows of any type. An existing table and its updates are replaced
/// when the new file is complete and durable. No process may have it open.
///
/// The build takes 16 bytes of memory for each row. A table has at most 4,294,967,295 rows.
pub fn build(source: &Source, path: impl AsRef<Path>, row_type: RowType) -> Result<Built> {
    build_if(source, path.as_ref(), row_type, || Ok(()), || Ok(None))
}

/// As [`build`]. If `allow` or `check` fails, the existing table stays. `allow` is called while the existing table is
/// locked, `check` when the new file is complete. `check` returns the content hash of the source, if the file shall
/// hold it.
pub(in crate::embedding) fn build_if(
    source: &Source,
    path: &Path,
    row_type: RowType,
    allow: impl FnOnce() -> Result<()>,
    check: impl FnOnce() -> Result<Option<ContentHash>>,
) -> Result<Built> {
    if source.len() > MAX_RECORDS {
        let message = format!("{} rows are more than the {MAX_RECORDS} of one table: split them", source.len());
        return Err(Error::new(Status::Capacity, message));
    }
    let new = beside(path, ".new");
    // Locked before the existing table: another build may be about to replace that.
    let file = open_locked(&new, OpenOptions::new().read(true).write(true).create(true).truncate(false), true)?;
    let built = Before::look(path).and_then(|before| {
        allow()?;
        let layout = Layout::new(source.layout().dim() as u32, row_type)?;
        let header = Header::new(layout, source.len(), new_id(), before.id);
        let built = Builder { source, file: &file, path: &new, header }.run()?;
        if let Some(content) = check()? {
            let bytes = Content(content.0).encode(header.id);
            file.write_all_at(&bytes, Content::AT).map_err(|error| cannot("written", &new, &error))?;
        }
        let failed = |error| cannot("put in place", path, &error);
        file.sync_all().map_err(failed)?;
        fs::rename(&new, path).map_err(failed)?;
        sync_parent(path).map_err(failed)?;
        // While the old table is locked. If the process ends before this, the new table ignores them: its header has
        // the id of the old table.
        update_log::remove(path)?;
        Ok(built)
    });
    if built.is_err() {
        drop(fs::remove_file(&new));
    }
    built
}

/// The existing table, locked until the new one has replaced it.
struct Before {
    id: u64,
    _lock: Option<Locked>,
}

impl Before {
    fn look(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Ok(Self { id: 0, _lock: None });
        }
        let file = open_locked(path, OpenOptions::new().read(true), true)?;
        let mut bytes = [0; HEADER_BYTES];
        let length = file.metadata().map_err(|error| cannot("read", path, &error))?.len();
        let known = &mut bytes[..length.min(HEADER_BYTES as u64) as usize];
        file.read_exact_at(known, 0).map_err(|error| cannot("read", path, &error))?;
        if !is_table(known) && !known.is_empty() {
            let message = format!("{} is there and no table: name another file, or remove it", path.display());
            return Err(Error::invalid("path", message));
        }
        Ok(Self { id: Header::decode(known, length).map_or(0, |header| header.id), _lock: Some(file) })
    }
}

struct Builder<'a> {
    source: &'a Source,
    file: &'a File,
    path: &'a Path,
    header: Header,
}

impl Builder<'_> {
    fn run(mut self) -> Result<Built> {
        // An interrupted build leaves a part of a file.
        let written = |error| cannot("written", self.path, &error);
        self.file.set_len(0).map_err(written)?;
        let mut buckets = vec![[0; BUCKET_BYTES]; self.header.buckets as usize];
        let duplicates = self.write_records(&mut buckets)?;
        self.header.keys = self.header.records - duplicates;
        for (number, bucket) in buckets.iter_mut().enumerate() {
            seal(&self.header, number as u64, bucket);
        }
        self.file.write_all_at(buckets.as_flattened(), HEADER_BYTES as u64).map_err(written)?;
        self.file.write_all_at(&self.header.encode(), 0).map_err(written)?;
        let bytes = self.header.file_bytes().expect("it was written");
        Ok(Built { keys: self.header.keys, duplicates, bytes })
    }

    fn write_records(&self, buckets: &mut [Bucket]) -> Result<u64> {
        let header = &self.header;
        let at_a_time = (CHUNK_BYTES / header.record_bytes()).max(1);
        let mut converter = Converter { source: self.source, to: header.layout, numbers: Vec::new() };
        let (mut number, mut duplicates, mut records) = (0, 0, Vec::new());
        for chunk in self.source.chunks(at_a_time) {
            let Chunk { keys, rows } = chunk?;
            let rows = converter.convert(&keys, rows)?;
            let at = header.records_at() + number * header.record_bytes() as u64;
            records.resize(keys.len() * header.record_bytes(), 0);
            let parts =
                rows.chunks_exact(header.layout.row_bytes()).zip(records.chunks_exact_mut(header.record_bytes()));
            for (place, (row, record)) in parts.enumerate() {
                if let Some(&soon) = keys.get(place + AHEAD) {
                    prefetch(&buckets[header.home(soon) as usize]);
                }
                header.encode_record(number, keys[place], row, record);
                duplicates += u64::from(insert(header, buckets, keys[place], number));
                number += 1;
            }
            self.file.write_all_at(&records, at).map_err(|error| cannot("written", self.path, &error))?;
        }
        Ok(duplicates)
    }
}

struct Converter<'a> {
    source: &'a Source,
    to: Layout,
    numbers: Vec<f32>,
}

impl Converter<'_> {
    fn convert(&mut self, keys: &[i64], rows: Vec<u8>) -> Result<Vec<u8>> {
        let from = self.source.layout();
        if from == self.to {
            return Ok(rows);
        }
        self.numbers.resize(keys.len() * from.dim(), 0.0);
        let parts = rows.chunks_exact(from.row_bytes()).zip(self.numbers.chunks_exact_mut(from.dim()));
        for (&key, (row, numbers)) in keys.iter().zip(parts) {
            self.source.decode_for(self.to, key, row, numbers)?;
        }
        let mut converted = vec![0; keys.len() * self.to.row_bytes()];
        self.to.encode(&self.numbers, &mut converted);
        Ok(converted)
    }
}

/// A random id.
fn new_id() -> u64 {
    // 0 stands for no table.
    RandomState::new().hash_one((SystemTime::now(), std::process::id())).max(1)
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> Error {
    let hint = if error.kind() == io::ErrorKind::StorageFull { ". Make room on the disk" } else { "" };
    Error::new(Status::Io, format!("the table {} can not be {what}: {error}{hint}", path.display()))
}
