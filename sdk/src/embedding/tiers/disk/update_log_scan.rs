//! Reads an update log from its beginning: finds the newest entry of each key and the end of the intact part.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::update_log_format::{BATCH_BYTES, BATCH_MAGIC, BatchHeader, HEADER_BYTES, LogHeader, Update};

/// The number of bytes that are searched at a time.
const CHUNK: usize = 1 << 20;

/// The contents of a log.
#[derive(Debug, Default)]
pub(super) struct Scanned {
    /// The offset of the newest entry of each key.
    pub(super) places: HashMap<i64, u64>,
    /// The number of updates.
    pub(super) updates: u64,
    /// The end of the log. Bytes behind it belong to an update that was not written completely.
    pub(super) end: u64,
}

/// Why a log is refused.
#[derive(Debug)]
pub(super) enum Refused {
    Io(io::Error),
    /// It does not begin with the header of a log.
    NoLog,
    /// It belongs to the table with this id.
    OfTable(u64),
    Damaged(String),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Reads the log of a table.
pub(super) fn scan(file: &File, table: u64, row_bytes: usize) -> Result<Scanned, Refused> {
    let length = file.metadata()?.len();
    let mut bytes = [0; HEADER_BYTES];
    if length < HEADER_BYTES as u64 {
        return Err(Refused::NoLog);
    }
    file.read_exact_at(&mut bytes, 0)?;
    let header = LogHeader::decode(&bytes).ok_or(Refused::NoLog)?;
    if header.table != table {
        return Err(Refused::OfTable(header.table));
    }
    if header.row_bytes as usize != row_bytes {
        let message = format!("it has rows of {} bytes, and the table of {row_bytes}", header.row_bytes);
        return Err(Refused::Damaged(message));
    }
    Scan { file, length, table, row_bytes, body: Vec::new() }.run(&header)
}

struct Scan<'a> {
    file: &'a File,
    length: u64,
    table: u64,
    row_bytes: usize,
    body: Vec<u8>,
}

impl Scan<'_> {
    fn run(mut self, header: &LogHeader) -> Result<Scanned, Refused> {
        let mut found = Scanned { updates: header.base, end: HEADER_BYTES as u64, ..Scanned::default() };
        let mut folded = 0;
        while found.end < self.length {
            let batch = self.batch(found.end)?;
            let folds = |batch: &BatchHeader| batch.update == header.base && folded < header.folded;
            let next = |batch: &BatchHeader| batch.update == found.updates + 1 && folded == header.folded;
            let Some(batch) = batch.filter(|batch| folds(batch) || next(batch)) else {
                // Only the last update of a log may be incomplete.
                if self.another_after(found.end)? {
                    return Err(Refused::Damaged(format!("it is not what was written at byte {}", found.end)));
                }
                break;
            };
            folded += if batch.update == header.base { batch.entries } else { 0 };
            if !self.entries(&batch, found.end + BATCH_BYTES as u64, &mut found.places) {
                return Err(Refused::Damaged(format!("the update at byte {} holds what was not written", found.end)));
            }
            (found.updates, found.end) = (batch.update, found.end + BATCH_BYTES as u64 + batch.bytes);
        }
        if folded != header.folded {
            return Err(Refused::Damaged(format!("{folded} of {} entries are there", header.folded)));
        }
        Ok(found)
    }

    /// Reads the batch at an offset, with its entries in `body`; `None` if it is not intact.
    fn batch(&mut self, at: u64) -> io::Result<Option<BatchHeader>> {
        let Some(header) = self.header(at)? else { return Ok(None) };
        if header.bytes > self.length - at - BATCH_BYTES as u64 {
            return Ok(None);
        }
        self.body.resize(header.bytes as usize, 0);
        self.file.read_exact_at(&mut self.body, at + BATCH_BYTES as u64)?;
        Ok((BatchHeader::new(header.update, header.entries, &self.body) == header).then_some(header))
    }

    fn header(&self, at: u64) -> io::Result<Option<BatchHeader>> {
        if self.length - at < BATCH_BYTES as u64 {
            return Ok(None);
        }
        let mut bytes = [0; BATCH_BYTES];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(BatchHeader::decode(&bytes, self.table, at))
    }

    /// Adds the offsets of the entries in `body`, which begins at `at`. Returns false if they are damaged.
    fn entries(&self, batch: &BatchHeader, at: u64, places: &mut HashMap<i64, u64>) -> bool {
        let (mut rest, mut count) = (&self.body[..], 0);
        while let Some((update, length)) = Update::decode(rest, self.table, self.row_bytes) {
            places.insert(update.key, at + (self.body.len() - rest.len()) as u64);
            rest = &rest[length..];
            count += 1;
        }
        rest.is_empty() && count == batch.entries
    }

    /// Whether a batch begins behind an offset.
    fn another_after(&self, place: u64) -> io::Result<bool> {
        let mut chunk = vec![0; CHUNK + BATCH_MAGIC.len()];
        let mut at = place + 1;
        while at < self.length {
            let count = chunk.len().min((self.length - at) as usize);
            self.file.read_exact_at(&mut chunk[..count], at)?;
            let windows = chunk[..count].windows(BATCH_MAGIC.len()).enumerate();
            for (found, _) in windows.filter(|(_, window)| window == BATCH_MAGIC) {
                if self.header(at + found as u64)?.is_some() {
                    return Ok(true);
                }
            }
            at += CHUNK as u64;
        }
        Ok(false)
    }
}
