//! The format of a table file: a header, the buckets of the index, the records. `sdk/docs/embedding-table.md` describes
//! it.

use crate::checksum::{crc32c_append, xxh3};
use crate::embedding::row::{Layout, RowType};

/// The offset of the buckets. The marker in the header is written while the rest is mapped, so the header has a page of
/// its own.
pub(super) const HEADER_BYTES: usize = 4096;
/// The two offsets of the marker. Writes alternate between two sectors: a torn write leaves the other one intact.
const MARKERS_AT: [usize; 2] = [128, 1024];
/// One cache line.
pub(super) const BUCKET_BYTES: usize = 64;
/// The most records of a table: a bucket has 32 bits for each record number.
pub(super) const MAX_RECORDS: u64 = u32::MAX as u64;

const MAGIC: &[u8; 8] = b"PAGODATB";
const VERSION: u32 = 1;
/// The bytes that the checksum of the header covers.
const HEADER_BODY: usize = 72;
const SLOTS: usize = 5;
/// The bytes of a record beside its row: the key and a checksum.
const RECORD_EXTRA: usize = 12;

/// The header of a table file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) layout: Layout,
    /// Rows in the file. Rows that a later row of the same key replaced are included.
    pub(super) records: u64,
    /// Unique keys.
    pub(super) keys: u64,
    pub(super) buckets: u64,
    /// A random number. The update log has it too: the log of another table is not applied to this one.
    pub(super) id: u64,
    /// The `id` of the table that this one replaced; 0: none.
    pub(super) replaced: u64,
}

impl Header {
    /// A table for this many records, with an index that is four fifths full.
    pub(super) fn new(layout: Layout, records: u64, id: u64, replaced: u64) -> Self {
        let buckets = records.div_ceil(SLOTS as u64 - 1).max(1);
        Self { layout, records, keys: 0, buckets, id, replaced }
    }

    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let row_type: u32 = match self.layout.row_type() {
            RowType::F32 => 0,
            RowType::F16 => 1,
            RowType::I8 => 2,
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        for (place, value) in [VERSION, row_type, self.layout.dim() as u32].iter().enumerate() {
            bytes[8 + 4 * place..][..4].copy_from_slice(&value.to_le_bytes());
        }
        let length = self.file_bytes().expect("a table that is written fits a file");
        for (place, value) in [self.records, self.keys, self.buckets, self.id, self.replaced, length].iter().enumerate()
        {
            bytes[24 + 8 * place..][..8].copy_from_slice(&value.to_le_bytes());
        }
        let sum = xxh3(&bytes[..HEADER_BODY]);
        bytes[HEADER_BODY..][..8].copy_from_slice(&sum.to_le_bytes());
        for at in MARKERS_AT {
            bytes[at..][..Marker::BYTES].copy_from_slice(&Marker { updates: 0 }.encode(self.id));
        }
        bytes
    }

    /// Decodes the first bytes of a file of this length. The error completes the sentence "the table ...".
    pub(super) fn decode(bytes: &[u8], length: u64) -> Result<Self, String> {
        if !is_table(bytes) {
            return Err("is no table file of Pagoda's: it does not begin with PAGODATB".into());
        }
        if bytes.len() < HEADER_BYTES {
            return Err(format!("is damaged: {length} bytes are less than a header"));
        }
        if u64_at(bytes, HEADER_BODY) != xxh3(&bytes[..HEADER_BODY]) {
            return Err("is damaged: its header has not the checksum it names".into());
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(format!("has format {version}, and this version of Pagoda reads format {VERSION}"));
        }
        let row_type = match u32_at(bytes, 12) {
            0 => RowType::F32,
            1 => RowType::F16,
            2 => RowType::I8,
            other => return Err(format!("has rows of type {other}, which this version of Pagoda does not know")),
        };
        let layout = Layout::new(u32_at(bytes, 16), row_type).map_err(|error| format!("is damaged: {error}"))?;
        let [records, keys, buckets, id, replaced] = [24, 32, 40, 48, 56].map(|at| u64_at(bytes, at));
        let header = Self { layout, records, keys, buckets, id, replaced };
        if u64_at(bytes, 64) != length || header.file_bytes() != Some(length) {
            let named = u64_at(bytes, 64);
            return Err(format!("is damaged: it has {length} bytes, and its header names {named}"));
        }
        if buckets == 0 || keys > records || records > MAX_RECORDS {
            return Err(format!("is damaged: {keys} keys, {records} records and {buckets} buckets do not fit"));
        }
        Ok(header)
    }

    pub(super) fn record_bytes(&self) -> usize {
        self.layout.row_bytes() + RECORD_EXTRA
    }

    /// The offset of the records.
    pub(super) fn records_at(&self) -> u64 {
        HEADER_BYTES as u64 + self.buckets * BUCKET_BYTES as u64
    }

    pub(super) fn file_bytes(&self) -> Option<u64> {
        let buckets = self.buckets.checked_mul(BUCKET_BYTES as u64)?;
        let records = self.records.checked_mul(self.record_bytes() as u64)?;
        buckets.checked_add(records)?.checked_add(HEADER_BYTES as u64)
    }

    /// The first bucket of the probe sequence of a key.
    pub(super) fn home(&self, key: i64) -> u64 {
        // The finalizer of MurmurHash3: every bit of the key affects every bit of the result. The random id of the
        // table keeps an attacker from choosing keys that collide.
        let mut bits = key.cast_unsigned() ^ self.id;
        bits = (bits ^ bits >> 33).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        bits = (bits ^ bits >> 33).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        bits ^= bits >> 33;
        ((u128::from(bits) * u128::from(self.buckets)) >> 64) as u64
    }

    /// The next bucket of the probe sequence.
    pub(super) fn next(&self, bucket: u64) -> u64 {
        if bucket + 1 == self.buckets { 0 } else { bucket + 1 }
    }

    /// Encodes a record.
    pub(super) fn encode_record(&self, number: u64, key: i64, row: &[u8], record: &mut [u8]) {
        let body = row.len() + 8;
        record[..row.len()].copy_from_slice(row);
        record[row.len()..body].copy_from_slice(&key.to_le_bytes());
        let sum = self.record_checksum(number, &record[..body]);
        record[body..].copy_from_slice(&sum.to_le_bytes());
    }

    /// The key and the row of a record; `None` if it is damaged, or belongs to another place or table.
    pub(super) fn decode_record<'a>(&self, number: u64, record: &'a [u8]) -> Option<(i64, &'a [u8])> {
        let (body, sum) = record.split_last_chunk()?;
        if self.record_checksum(number, body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (row, key) = body.split_last_chunk()?;
        Some((i64::from_le_bytes(*key), row))
    }

    // The seed depends on the table and the place: a record or a bucket in the wrong place has a wrong checksum.
    fn record_checksum(&self, number: u64, body: &[u8]) -> u32 {
        crc32c_append((self.id as u32).wrapping_add(number as u32), body)
    }

    fn bucket_checksum(&self, number: u64, body: &[u8]) -> u32 {
        crc32c_append(((self.id >> 32) as u32).wrapping_add(number as u32), body)
    }
}

/// Whether a file that begins with these bytes is a table, intact or not.
pub(super) fn is_table(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// A bucket: five keys, then for each key its record number plus 1, or 0 for a free slot, then a checksum. Slots are
/// used in order.
pub(super) type Bucket = [u8; BUCKET_BYTES];
const NUMBERS_AT: usize = 8 * SLOTS;
const SUM_AT: usize = NUMBERS_AT + 4 * SLOTS;

/// The result of a search in one bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// The bucket has the key, with this record number.
    Record(u64),
    /// No bucket has the key. This slot is free.
    Free(usize),
    /// The next bucket may have the key.
    Full,
}

pub(super) fn find(bucket: &Bucket, key: i64) -> Slot {
    for slot in 0..SLOTS {
        let number = u32_at(bucket, NUMBERS_AT + 4 * slot);
        if number == 0 {
            return Slot::Free(slot);
        }
        if u64_at(bucket, 8 * slot) == key.cast_unsigned() {
            return Slot::Record(u64::from(number) - 1);
        }
    }
    Slot::Full
}

/// Sets the record number of a key. Returns whether it replaced another one.
pub(super) fn insert(header: &Header, buckets: &mut [Bucket], key: i64, number: u64) -> bool {
    let mut at = header.home(key);
    loop {
        let bucket = &mut buckets[at as usize];
        let (slot, replaced) = match find(bucket, key) {
            Slot::Full => {
                at = header.next(at);
                continue;
            }
            Slot::Free(slot) => (slot, false),
            Slot::Record(old) => {
                let held = (0..SLOTS).find(|slot| u64::from(u32_at(bucket, NUMBERS_AT + 4 * slot)) == old + 1);
                (held.expect("it was just found"), true)
            }
        };
        bucket[8 * slot..][..8].copy_from_slice(&key.to_le_bytes());
        bucket[NUMBERS_AT + 4 * slot..][..4].copy_from_slice(&(number as u32 + 1).to_le_bytes());
        return replaced;
    }
}

/// Writes the checksum of a finished bucket.
pub(super) fn seal(header: &Header, number: u64, bucket: &mut Bucket) {
    let sum = header.bucket_checksum(number, &bucket[..SUM_AT]);
    bucket[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
}

/// Whether the checksum of a bucket is right.
pub(super) fn is_whole(header: &Header, number: u64, bucket: &Bucket) -> bool {
    header.bucket_checksum(number, &bucket[..SUM_AT]) == u32_at(bucket, SUM_AT)
}

/// The only part of a table file that changes: a lower bound of the number of updates. An update log with fewer updates
/// has lost some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Marker {
    pub(super) updates: u64,
}

impl Marker {
    pub(super) const BYTES: usize = 16;

    pub(super) fn encode(self, table: u64) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.updates.to_le_bytes());
        bytes[8..].copy_from_slice(&xxh3(&[self.updates, table].map(u64::to_le_bytes).concat()).to_le_bytes());
        bytes
    }

    /// The offset at which it is written.
    pub(super) fn place(self) -> u64 {
        MARKERS_AT[self.updates as usize % 2] as u64
    }

    /// Decodes the marker of a header; `None` if both copies are damaged.
    pub(super) fn decode(header: &[u8], table: u64) -> Option<Self> {
        let whole = MARKERS_AT.iter().filter_map(|&at| {
            let marker = Self { updates: u64_at(header, at) };
            (header[at..][..Self::BYTES] == marker.encode(table)).then_some(marker)
        });
        whole.max_by_key(|marker| marker.updates)
    }
}

/// The hash of the contents of the source of a table. It lies behind the marker and has a checksum of its own. Tables
/// that the function `build` has built have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Content(pub(super) u64);

impl Content {
    pub(super) const AT: u64 = 192;

    pub(super) fn encode(self, table: u64) -> [u8; 16] {
        let sum = xxh3(&[self.0, table, Self::AT].map(u64::to_le_bytes).concat());
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.0.to_le_bytes());
        bytes[8..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes it; `None` if the header has none, or it is damaged.
    pub(super) fn decode(header: &[u8], table: u64) -> Option<Self> {
        let content = Self(u64_at(header, Self::AT as usize));
        (header[Self::AT as usize..][..16] == content.encode(table)).then_some(content)
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use pagoda_test_support::Random;

    use super::*;

    fn header(records: u64) -> Header {
        Header::new(Layout::new(3, RowType::F16).unwrap(), records, 0x0123_4567_89AB_CDEF, 7)
    }

    #[test]
    fn a_header_comes_back_and_no_other_length_fits_it() {
        let header = Header { keys: 9, ..header(10) };
        let (bytes, length) = (header.encode(), header.file_bytes().unwrap());
        assert_eq!(Header::decode(&bytes, length), Ok(header));
        assert_eq!(Marker::decode(&bytes, header.id), Some(Marker { updates: 0 }));
        for marker in [1, 2, 3].map(|updates| Marker { updates }) {
            let mut marked = bytes;
            marked[marker.place() as usize..][..Marker::BYTES].copy_from_slice(&marker.encode(header.id));
            assert_eq!(Marker::decode(&marked, header.id), Some(marker));
            marked[marker.place() as usize] ^= 1;
            assert_eq!(Marker::decode(&marked, header.id), Some(Marker { updates: 0 }), "the other one");
        }
        assert_eq!(Content::decode(&bytes, header.id), None);
        let mut with = bytes;
        with[Content::AT as usize..][..16].copy_from_slice(&Content(0).encode(header.id));
        assert_eq!((Content::decode(&with, header.id), Content::decode(&with, 1)), (Some(Content(0)), None));
        assert!(Header::decode(&bytes, length - 1).is_err());
        assert!(Header::decode(&bytes[..100], 100).is_err());
        for at in 0..HEADER_BODY + 8 {
            for bit in 0..8 {
                let mut bytes = bytes;
                bytes[at] ^= 1 << bit;
                assert!(Header::decode(&bytes, length).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn a_header_of_impossible_sizes_is_refused() {
        for (records, keys, buckets) in [(u64::MAX, 0, 1), (1, 1, u64::MAX), (1, 2, 1), (0, 0, 0)] {
            let right = header(1);
            let mut bytes = right.encode();
            for (at, value) in [(24, records), (32, keys), (40, buckets)] {
                bytes[at..][..8].copy_from_slice(&u64::to_le_bytes(value));
            }
            let length = Header { records, keys, buckets, ..right }.file_bytes().unwrap_or(u64::MAX);
            bytes[64..72].copy_from_slice(&length.to_le_bytes());
            let sum = xxh3(&bytes[..HEADER_BODY]);
            bytes[HEADER_BODY..][..8].copy_from_slice(&sum.to_le_bytes());
            assert!(Header::decode(&bytes, length).unwrap_err().contains("damaged"), "{records} {keys} {buckets}");
        }
    }

    #[test]
    fn the_index_finds_what_a_map_finds() {
        let header = header(1000);
        let mut buckets = vec![[0; BUCKET_BYTES]; header.buckets as usize];
        let (mut random, mut right) = (Random(1), HashMap::new());
        for number in 0..1000 {
            let key = random.below(900) as i64 - 450;
            assert_eq!(insert(&header, &mut buckets, key, number), right.insert(key, number).is_some());
        }
        for key in -500..500 {
            let mut at = header.home(key);
            let found = loop {
                match find(&buckets[at as usize], key) {
                    Slot::Full => at = header.next(at),
                    Slot::Free(_) => break None,
                    Slot::Record(number) => break Some(number),
                }
            };
            assert_eq!(found, right.get(&key).copied(), "{key}");
        }
    }

    #[test]
    fn records_and_buckets_are_good_in_their_own_place_alone() {
        let header = header(5);
        let mut record = vec![0; header.record_bytes()];
        header.encode_record(3, -1, &[1, 2, 3, 4, 5, 6], &mut record);
        assert_eq!(header.decode_record(3, &record), Some((-1, &[1, 2, 3, 4, 5, 6][..])));
        assert_eq!(header.decode_record(4, &record), None);
        assert_eq!(Header { id: 1, ..header }.decode_record(3, &record), None);
        let mut bucket = [0; BUCKET_BYTES];
        seal(&header, 1, &mut bucket);
        assert!(is_whole(&header, 1, &bucket) && !is_whole(&header, 2, &bucket));
        assert!(!is_whole(&header, 1, &[0; BUCKET_BYTES]), "a hole in the file is no bucket");
    }
}
