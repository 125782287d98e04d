//! The format of an update log: a header, then one batch for each update. `sdk/docs/embedding-table.md` describes it.

use super::table_format::{u32_at, u64_at};
use crate::checksum::{crc32c_append, xxh3, xxh3_seeded};
use crate::embedding::update::version::Version;

/// The offset of the first batch.
pub(super) const HEADER_BYTES: usize = 64;
/// The bytes of a batch before its entries.
pub(super) const BATCH_BYTES: usize = 48;
/// The bytes of an entry beside its row: key, version, kind, checksum.
pub(super) const ENTRY_EXTRA: usize = 21;
/// The bytes of an entry before its row.
const ENTRY_HEAD: usize = 17;

const MAGIC: &[u8; 8] = b"PAGODAUL";
const VERSION: u32 = 1;
/// The first bytes of a batch.
pub(super) const BATCH_MAGIC: &[u8; 8] = b"PAGODAUB";

/// The header of an update log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogHeader {
    /// The id of its table.
    pub(super) table: u64,
    pub(super) row_bytes: u32,
    /// The number of updates that a compaction has folded into the first entries; 0: none.
    pub(super) base: u64,
    /// The number of these entries.
    pub(super) folded: u64,
}

impl LogHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.row_bytes.to_le_bytes());
        for (at, value) in [(16, self.table), (24, self.base), (32, self.folded)] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let sum = xxh3(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the header; `None` if it is damaged.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        if !bytes.starts_with(MAGIC) || xxh3(&bytes[..56]) != u64_at(bytes, 56) || u32_at(bytes, 8) != VERSION {
            return None;
        }
        let [table, base, folded] = [16, 24, 32].map(|at| u64_at(bytes, at));
        Some(Self { table, row_bytes: u32_at(bytes, 12), base, folded })
    }
}

/// The header of a batch: the entries of one update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchHeader {
    /// The number of the update, from 1.
    pub(super) update: u64,
    /// Bytes of its entries.
    pub(super) bytes: u64,
    /// The number of entries.
    pub(super) entries: u64,
    /// The checksum of the entries.
    pub(super) sum: u64,
}

impl BatchHeader {
    pub(super) fn new(update: u64, entries: u64, body: &[u8]) -> Self {
        Self { update, bytes: body.len() as u64, entries, sum: xxh3(body) }
    }

    /// Encodes the header for one offset of the log of one table. Its checksum is valid there only.
    pub(super) fn encode(&self, table: u64, at: u64) -> [u8; BATCH_BYTES] {
        let mut bytes = [0; BATCH_BYTES];
        bytes[..8].copy_from_slice(BATCH_MAGIC);
        for (place, value) in [self.update, self.bytes, self.entries, self.sum].into_iter().enumerate() {
            bytes[8 + 8 * place..][..8].copy_from_slice(&value.to_le_bytes());
        }
        let sum = Self::checksum(&bytes, table, at);
        bytes[40..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the header at an offset of the log of a table; `None` if it is damaged.
    pub(super) fn decode(bytes: &[u8; BATCH_BYTES], table: u64, at: u64) -> Option<Self> {
        if !bytes.starts_with(BATCH_MAGIC) || Self::checksum(bytes, table, at) != u64_at(bytes, 40) {
            return None;
        }
        let [update, length, entries, sum] = [8, 16, 24, 32].map(|at| u64_at(bytes, at));
        Some(Self { update, bytes: length, entries, sum })
    }

    fn checksum(bytes: &[u8; BATCH_BYTES], table: u64, at: u64) -> u64 {
        xxh3_seeded(table ^ at.rotate_left(32), &bytes[..40])
    }
}

/// An entry: the update of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Update<'a> {
    pub(super) key: i64,
    pub(super) version: Version,
    /// `None`: a tombstone.
    pub(super) row: Option<&'a [u8]>,
}

impl<'a> Update<'a> {
    /// Appends the entry to a batch.
    pub(super) fn encode(&self, table: u64, body: &mut Vec<u8>) {
        let start = body.len();
        body.extend(self.key.to_le_bytes());
        body.extend(self.version.0.to_le_bytes());
        body.push(u8::from(self.row.is_none()));
        body.extend(self.row.unwrap_or_default());
        let sum = Self::checksum(table, &body[start..]);
        body.extend(sum.to_le_bytes());
    }

    /// Decodes the entry at the beginning of `bytes`. Returns its length too. `None` if it is damaged.
    pub(super) fn decode(bytes: &'a [u8], table: u64, row_bytes: usize) -> Option<(Self, usize)> {
        let row_bytes = match bytes.get(16)? {
            0 => row_bytes,
            1 => 0,
            _ => return None,
        };
        let (body, sum) = bytes.get(..ENTRY_EXTRA + row_bytes)?.split_last_chunk()?;
        if Self::checksum(table, body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let row = (body[16] == 0).then_some(&body[ENTRY_HEAD..]);
        Some((
            Self { key: u64_at(body, 0).cast_signed(), version: Version(u64_at(body, 8)), row },
            ENTRY_EXTRA + row_bytes,
        ))
    }

    fn checksum(table: u64, body: &[u8]) -> u32 {
        crc32c_append(table as u32, body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_comes_back_and_nothing_else_does() {
        let header = LogHeader { table: 7, row_bytes: 3, base: 1, folded: 2 };
        let bytes = header.encode();
        assert_eq!(LogHeader::decode(&bytes), Some(header));
        let mut body = Vec::new();
        let updates = [
            Update { key: -1, version: Version(9), row: Some(&[1, 2, 3]) },
            Update { key: 5, version: Version(1), row: None },
        ];
        updates.iter().for_each(|update| update.encode(7, &mut body));
        let (first, length) = Update::decode(&body, 7, 3).unwrap();
        assert_eq!((first, length), (updates[0], ENTRY_EXTRA + 3));
        assert_eq!(Update::decode(&body[length..], 7, 3), Some((updates[1], ENTRY_EXTRA)));
        assert_eq!(Update::decode(&body, 8, 3), None, "of another table");
        let batch = BatchHeader::new(3, 2, &body);
        let encoded = batch.encode(7, 64);
        assert_eq!(BatchHeader::decode(&encoded, 7, 64), Some(batch));
        assert!(BatchHeader::decode(&encoded, 7, 65).is_none() && BatchHeader::decode(&encoded, 8, 64).is_none());
        for bit in 0..8 * body.len() {
            let mut damaged = body.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(BatchHeader::new(3, 2, &damaged), batch);
            let at = if bit / 8 < length { 0 } else { length };
            assert_eq!(Update::decode(&damaged[at..], 7, 3), None, "bit {bit}");
        }
        for bit in 0..8 * HEADER_BYTES {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(LogHeader::decode(&damaged), None, "bit {bit}");
        }
        for bit in 0..8 * BATCH_BYTES {
            let mut damaged = encoded;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(BatchHeader::decode(&damaged, 7, 64), None, "bit {bit}");
        }
    }
}
