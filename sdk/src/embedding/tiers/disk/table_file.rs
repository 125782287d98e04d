//! Lookups in a mapped table file.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, MmapOptions};

use super::file_lock::open_locked;
use super::table_format::{BUCKET_BYTES, Bucket, HEADER_BYTES, Header, Marker, Slot, find, is_whole};
use crate::error::{Error, Result, Status};
use crate::files::Locked;

pub(super) struct TableFile {
    file: Locked,
    path: PathBuf,
    header: Header,
    length: u64,
    /// Everything after the header. The header is not mapped, because its marker changes.
    map: Mmap,
}

/// The result of a search for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Record(u64),
    Absent,
    /// The index is damaged where the key would be.
    Damaged,
}

impl TableFile {
    pub(super) fn open(path: &Path, read_only: bool) -> Result<(Self, Option<Marker>)> {
        let file = open_locked(path, OpenOptions::new().read(true).write(!read_only), !read_only)?;
        let failed =
            |error: io::Error| Error::new(Status::Io, format!("the table {} can not be read: {error}", path.display()));
        let length = file.metadata().map_err(failed)?.len();
        let mut bytes = [0; HEADER_BYTES];
        let bytes = &mut bytes[..length.min(HEADER_BYTES as u64) as usize];
        file.read_exact_at(bytes, 0).map_err(failed)?;
        let refused = |what: &str| {
            Error::new(Status::Io, format!("the table {} {what}. Build it again from its source", path.display()))
        };
        let header = Header::decode(bytes, length).map_err(|what| refused(&what))?;
        let marker = Marker::decode(bytes, header.id);
        // SAFETY: nothing writes to these bytes. The file was complete when it was renamed into place, and later only
        // the header changes, which is not mapped. The lock excludes other processes, as far as they respect it. Their
        // writes would be read as bytes, and every byte is checked.
        let map = unsafe { MmapOptions::new().offset(HEADER_BYTES as u64).map(&*file) }.map_err(failed)?;
        // Rows are read in random order: readahead would fetch rows that are not needed. A failure is harmless.
        let _ = map.advise(Advice::Random);
        Ok((Self { file, path: path.to_owned(), header, length, map }, marker))
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Checks the length of the file. A read of a mapped page behind the end of the file would kill the process.
    pub(super) fn check_length(&self) -> Result<()> {
        let now = self.file.metadata().map(|facts| facts.len());
        match now {
            Ok(now) if now == self.length => Ok(()),
            now => {
                let now = now.map_or_else(|error| error.to_string(), |now| format!("{now} bytes"));
                let path = self.path.display();
                let message = format!("the table {path} had {} bytes when it was opened, and now {now}", self.length);
                Err(Error::new(Status::Io, message))
            }
        }
    }

    pub(super) fn find(&self, key: i64) -> Found {
        let mut number = self.header.home(key);
        for _ in 0..self.header.buckets {
            let bucket = self.bucket(number);
            if !is_whole(&self.header, number, bucket) {
                return Found::Damaged;
            }
            match find(bucket, key) {
                Slot::Record(record) if record < self.header.records => return Found::Record(record),
                Slot::Record(_) => return Found::Damaged,
                Slot::Free(_) => return Found::Absent,
                Slot::Full => number = self.header.next(number),
            }
        }
        Found::Absent
    }

    /// The row of a record, if the record is intact and belongs to this key.
    pub(super) fn row(&self, record: u64, key: i64) -> Option<&[u8]> {
        self.key_and_row(record).filter(|(of, _)| *of == key).map(|(_, row)| row)
    }

    pub(super) fn key_and_row(&self, record: u64) -> Option<(i64, &[u8])> {
        self.header.decode_record(record, self.record(record))
    }

    /// The first bucket of the probe sequence of a key.
    pub(super) fn home(&self, key: i64) -> &Bucket {
        self.bucket(self.header.home(key))
    }

    pub(super) fn record(&self, record: u64) -> &[u8] {
        self.records(record..record + 1)
    }

    /// Consecutive records.
    pub(super) fn records(&self, records: Range<u64>) -> &[u8] {
        let bytes = self.header.record_bytes();
        let at = self.header.records_at() as usize - HEADER_BYTES + records.start as usize * bytes;
        &self.map[at..][..records.end.saturating_sub(records.start) as usize * bytes]
    }

    fn bucket(&self, number: u64) -> &Bucket {
        self.map[number as usize * BUCKET_BYTES..].first_chunk().expect("the file is as long as its header says")
    }

    /// Asks the system to read bytes of the map from the disk.
    pub(super) fn begin_to_read(&self, bytes: &[u8]) {
        let _ = self.map.advise_range(Advice::WillNeed, self.place(bytes), bytes.len());
    }

    /// Waits until bytes of the map are in memory. Returns false if the disk can not read them: an access would kill
    /// the process.
    pub(super) fn can_be_read(&self, bytes: &[u8]) -> bool {
        match self.map.advise_range(Advice::PopulateRead, self.place(bytes), bytes.len()) {
            // Kernels before 5.14 do not have this advice.
            Err(error) => error.kind() == io::ErrorKind::InvalidInput,
            Ok(()) => true,
        }
    }

    fn place(&self, bytes: &[u8]) -> usize {
        bytes.as_ptr().addr() - self.map.as_ptr().addr()
    }

    /// Writes the marker.
    pub(super) fn mark(&self, marker: Marker, durably: bool) -> Result<()> {
        let written = self.file.write_all_at(&marker.encode(self.header.id), marker.place());
        let written = written.and_then(|()| if durably { self.file.sync_data() } else { Ok(()) });
        written.map_err(|error| {
            Error::new(Status::Io, format!("the table {} can not be written to: {error}", self.path.display()))
        })
    }
}
