//! A table file, mapped: looking keys up in it.

use std::fs::OpenOptions;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap, MmapOptions};

use super::format::{BUCKET_BYTES, Bucket, HEADER_BYTES, Header, Marker, Slot, find, is_whole};
use super::lock::open_locked;
use crate::error::{Error, Result, Status};
use crate::files::Locked;

pub(super) struct TableFile {
    file: Locked,
    path: PathBuf,
    header: Header,
    length: u64,
    /// Everything after the header, whose marker changes.
    map: Mmap,
}

/// Where a key is.
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
        // SAFETY: nobody writes to these bytes: the file was renamed into place when it was complete, and what changes
        // later is in the header alone, which is not mapped. Others are kept away by the lock, as far as they ask for it;
        // whatever they wrote is read as bytes, and every byte is checked.
        let map = unsafe { MmapOptions::new().offset(HEADER_BYTES as u64).map(&*file) }.map_err(failed)?;
        // Rows are asked for in no order: reading on after each would fetch what nobody wants. It is but advice.
        let _ = map.advise(Advice::Random);
        Ok((Self { file, path: path.to_owned(), header, length, map }, marker))
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Reading what is no longer in the file would end the process. This tells, a moment before.
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

    /// The row of a record, if that is whole and the one of this key.
    pub(super) fn row(&self, record: u64, key: i64) -> Option<&[u8]> {
        self.key_and_row(record).filter(|(of, _)| *of == key).map(|(_, row)| row)
    }

    pub(super) fn key_and_row(&self, record: u64) -> Option<(i64, &[u8])> {
        self.header.decode_record(record, self.record(record))
    }

    /// The bucket where looking for a key begins.
    pub(super) fn home(&self, key: i64) -> &Bucket {
        self.bucket(self.header.home(key))
    }

    pub(super) fn record(&self, record: u64) -> &[u8] {
        self.records(record..record + 1)
    }

    /// Records that lie one after the other.
    pub(super) fn records(&self, records: Range<u64>) -> &[u8] {
        let bytes = self.header.record_bytes();
        let at = self.header.records_at() as usize - HEADER_BYTES + records.start as usize * bytes;
        &self.map[at..][..records.end.saturating_sub(records.start) as usize * bytes]
    }

    fn bucket(&self, number: u64) -> &Bucket {
        self.map[number as usize * BUCKET_BYTES..].first_chunk().expect("the file is as long as its header says")
    }

    /// Has the disk begin to read bytes of the map.
    pub(super) fn begin_to_read(&self, bytes: &[u8]) {
        let _ = self.map.advise_range(Advice::WillNeed, self.place(bytes), bytes.len());
    }

    /// Waits until bytes of the map are in memory. Where the disk can not give them, reading them would end the process;
    /// this is false.
    pub(super) fn can_be_read(&self, bytes: &[u8]) -> bool {
        match self.map.advise_range(Advice::PopulateRead, self.place(bytes), bytes.len()) {
            // A kernel before 5.14 does not know this advice.
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
