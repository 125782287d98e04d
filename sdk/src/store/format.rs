//! The bytes of a segment file: a header, then records, each at a multiple of 64 bytes.

use std::io;

use super::disk::DiskFile;
use super::sequence_number::SequenceNumber;
use super::{Key, Owner, Record, Space};
use crate::checksum::{crc32c, xxh3, xxh3_seeded};

/// Records begin at multiples of this: layers are aligned for vector units, and recovery can search a damaged file for
/// the next record.
pub(super) const ALIGNMENT: u64 = 64;
pub(super) const SEGMENT_HEADER: u64 = 64;
pub(super) const VERSION: u32 = 1;
pub(super) const MAX_TAG: usize = 1 << 16;
pub(super) const MAX_LAYERS: u32 = 1 << 16;

const SEGMENT_MAGIC: &[u8; 8] = b"PAGODASG";
const RECORD_MAGIC: u32 = u32::from_le_bytes(*b"PGDR");
/// The part of a record's head whose length is fixed.
const FIXED: usize = 128;

/// The checksum of one layer of a record.
pub(super) fn layer_checksum(bytes: &[u8]) -> u64 {
    crc32c(bytes).into()
}

pub(super) fn align(length: u64) -> u64 {
    length.next_multiple_of(ALIGNMENT)
}

pub(super) fn segment_name(id: u64) -> String {
    format!("segment-{id:010}.pgd")
}

pub(super) fn segment_id(name: &str) -> Option<u64> {
    let id = name.strip_prefix("segment-")?.strip_suffix(".pgd")?.parse().ok()?;
    (segment_name(id) == name).then_some(id)
}

/// The first bytes of a segment file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) id: u64,
    /// The number of the store, the same in all its segments: a file of another store is recognised.
    pub(super) store: u64,
    /// Every record in earlier segments has a lower number than this.
    pub(super) created_seq: SequenceNumber,
    /// The segment before this one, and how many bytes of it are valid.
    pub(super) previous: u64,
    pub(super) previous_len: u64,
}

/// What the first bytes of a segment file are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Opening {
    Good(SegmentHeader),
    /// Whole, but of a format that this version does not know.
    Foreign(u32),
    Damaged,
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> [u8; SEGMENT_HEADER as usize] {
        let mut bytes = [0; SEGMENT_HEADER as usize];
        bytes[..8].copy_from_slice(SEGMENT_MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        for (place, value) in
            [self.id, self.store, self.created_seq.0, self.previous, self.previous_len].iter().enumerate()
        {
            bytes[16 + 8 * place..24 + 8 * place].copy_from_slice(&value.to_le_bytes());
        }
        let sum = xxh3(&bytes[..56]);
        bytes[56..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The checksum has the same place in every later format, so that damage can be told from a newer format.
    pub(super) fn decode(bytes: &[u8]) -> Opening {
        if bytes.len() < SEGMENT_HEADER as usize
            || &bytes[..8] != SEGMENT_MAGIC
            || xxh3(&bytes[..56]) != u64_at(bytes, 56)
        {
            return Opening::Damaged;
        }
        match u32_at(bytes, 8) {
            VERSION => Opening::Good(Self {
                id: u64_at(bytes, 16),
                store: u64_at(bytes, 24),
                created_seq: SequenceNumber(u64_at(bytes, 32)),
                previous: u64_at(bytes, 40),
                previous_len: u64_at(bytes, 48),
            }),
            other => Opening::Foreign(other),
        }
    }
}

/// The kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Tokens that follow those of the record `prev_seq`, or begin the history.
    Put = 1,
    /// The tokens from `start` on are gone; the record `prev_seq` holds the last that is left.
    Cut = 2,
}

/// The part of a record before its data.
///
/// The newest record of a key determines its history: where it begins, where it ends, and which record comes before.
/// That one names the record before it, and so on down to `history_start`. So a lost record is always noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RecordHeader {
    pub(super) kind: Kind,
    pub(super) store: u64,
    pub(super) segment: u64,
    pub(super) offset: u64,
    pub(super) seq: SequenceNumber,
    /// The record this one continues.
    pub(super) prev_seq: SequenceNumber,
    pub(super) key: Key,
    /// Where the history begins from now on.
    pub(super) history_start: u64,
    pub(super) start: u64,
    pub(super) tokens: u32,
    pub(super) layers: u32,
    pub(super) layer_bytes: u64,
    pub(super) tag_len: u32,
    /// When it was written, in milliseconds since 1970.
    pub(super) time: u64,
    /// How many bytes of the segment were durable when this was written. A bad record before that is damage; one after
    /// it may be a torn write.
    pub(super) synced: u64,
}

impl RecordHeader {
    /// Bytes before the data: the fixed part, a checksum for each layer, the tag.
    pub(super) fn head_len(&self) -> u64 {
        head_len(self.layers, self.tag_len)
    }

    pub(super) fn total_len(&self) -> u64 {
        total_len(self.layers, self.layer_bytes, self.tag_len)
    }

    /// The head, ready to be written.
    pub(super) fn encode(&self, sums: &[u64], tag: &[u8]) -> Vec<u8> {
        debug_assert_eq!((sums.len(), tag.len()), (self.layers as usize, self.tag_len as usize));
        let mut bytes = Vec::with_capacity(self.head_len() as usize);
        bytes.extend(RECORD_MAGIC.to_le_bytes());
        bytes.extend((self.kind as u32).to_le_bytes());
        let before =
            [0, self.store, self.segment, self.offset, self.seq.0, self.prev_seq.0, self.key.space.0, self.key.owner.0];
        bytes.extend(before.iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend([self.history_start, self.start].iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend([self.tokens, self.layers].iter().flat_map(|value| value.to_le_bytes()));
        let after = [self.layer_bytes, u64::from(self.tag_len), self.time, self.synced];
        bytes.extend(after.iter().flat_map(|value| value.to_le_bytes()));
        debug_assert_eq!(bytes.len(), FIXED);
        bytes.extend(sums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.extend(tag);
        bytes.resize(self.head_len() as usize, 0);
        let sum = head_checksum(&bytes);
        bytes[8..16].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The fixed part, not yet checked against its checksum.
    fn decode(bytes: &[u8]) -> Option<Self> {
        if u32_at(bytes, 0) != RECORD_MAGIC {
            return None;
        }
        let kind = match u32_at(bytes, 4) {
            1 => Kind::Put,
            2 => Kind::Cut,
            _ => return None,
        };
        let header = Self {
            kind,
            store: u64_at(bytes, 16),
            segment: u64_at(bytes, 24),
            offset: u64_at(bytes, 32),
            seq: SequenceNumber(u64_at(bytes, 40)),
            prev_seq: SequenceNumber(u64_at(bytes, 48)),
            key: Key { space: Space(u64_at(bytes, 56)), owner: Owner(u64_at(bytes, 64)) },
            history_start: u64_at(bytes, 72),
            start: u64_at(bytes, 80),
            tokens: u32_at(bytes, 88),
            layers: u32_at(bytes, 92),
            layer_bytes: u64_at(bytes, 96),
            tag_len: u32_at(bytes, 104),
            time: u64_at(bytes, 112),
            synced: u64_at(bytes, 120),
        };
        // Values that no writer writes must not overflow the sums below.
        let sane = header.layers <= MAX_LAYERS
            && header.tag_len as usize <= MAX_TAG
            && header.layer_bytes <= i64::MAX as u64 / (2 * u64::from(MAX_LAYERS))
            && header.start.checked_add(u64::from(header.tokens)).is_some();
        sane.then_some(header)
    }
}

pub(super) fn head_len(layers: u32, tag_len: u32) -> u64 {
    align(FIXED as u64 + 8 * u64::from(layers) + u64::from(tag_len))
}

pub(super) fn total_len(layers: u32, layer_bytes: u64, tag_len: u32) -> u64 {
    head_len(layers, tag_len) + align(u64::from(layers) * layer_bytes)
}

/// The checksum of every layer of a record.
pub(super) fn layer_sums(record: &Record) -> Vec<u64> {
    let layers = record.layers as usize;
    let length = record.data.len() / layers;
    (0..layers).map(|layer| layer_checksum(&record.data[layer * length..(layer + 1) * length])).collect()
}

/// A record in a file, with its head checked.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    pub(super) header: RecordHeader,
    file: &'a dyn DiskFile,
    bytes: &'a [u8],
}

impl<'a> Head<'a> {
    /// The record at `offset` if there is a whole one, with a good head, before `end`. Store 0 is any store.
    pub(super) fn read(file: &'a dyn DiskFile, store: u64, segment: u64, offset: u64, end: u64) -> Option<Self> {
        Self::try_read(file, store, segment, offset, end).ok().flatten()
    }

    /// As [`Head::read`], but tells a file that can not be read from one that has no record there.
    pub(super) fn try_read(
        file: &'a dyn DiskFile,
        store: u64,
        segment: u64,
        offset: u64,
        end: u64,
    ) -> io::Result<Option<Self>> {
        if offset.checked_add(FIXED as u64).is_none_or(|fixed| fixed > end) {
            return Ok(None);
        }
        let Some(header) = RecordHeader::decode(file.view(offset, FIXED)?) else { return Ok(None) };
        let ours = (header.segment, header.offset) == (segment, offset) && (header.store == store || store == 0);
        if !ours || header.total_len() > end - offset {
            return Ok(None);
        }
        let bytes = file.view(offset, header.head_len() as usize)?;
        Ok((head_checksum(bytes) == u64_at(bytes, 8)).then_some(Self { header, file, bytes }))
    }

    pub(super) fn tag(&self) -> &'a [u8] {
        let from = FIXED + 8 * self.header.layers as usize;
        &self.bytes[from..from + self.header.tag_len as usize]
    }

    pub(super) fn sums(&self) -> Vec<u64> {
        (0..self.header.layers as usize).map(|layer| u64_at(self.bytes, FIXED + 8 * layer)).collect()
    }

    /// The bytes of a layer, if they can be read and their checksum is right.
    pub(super) fn layer(&self, layer: u32) -> Option<&'a [u8]> {
        let from = self.header.offset + self.header.head_len() + u64::from(layer) * self.header.layer_bytes;
        checked_view(self.file, from, self.header.layer_bytes, u64_at(self.bytes, FIXED + 8 * layer as usize))
    }

    /// Whether the checksum of every layer is right.
    pub(super) fn is_whole(&self) -> io::Result<bool> {
        for layer in 0..self.header.layers {
            let from = self.header.offset + self.header.head_len() + u64::from(layer) * self.header.layer_bytes;
            let bytes = self.file.view(from, self.header.layer_bytes as usize)?;
            if layer_checksum(bytes) != u64_at(self.bytes, FIXED + 8 * layer as usize) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// All layers, one after the other, if every one of them is good.
    pub(super) fn data(&self) -> Option<&'a [u8]> {
        let good = (0..self.header.layers).all(|layer| self.layer(layer).is_some());
        let length = u64::from(self.header.layers) * self.header.layer_bytes;
        let from = self.header.offset + self.header.head_len();
        if good { self.file.view(from, length as usize).ok() } else { None }
    }
}

/// A part of a file if it can be read and has this checksum.
pub(super) fn checked_view(file: &dyn DiskFile, offset: u64, length: u64, sum: u64) -> Option<&[u8]> {
    let bytes = file.view(offset, length as usize).ok()?;
    (layer_checksum(bytes) == sum).then_some(bytes)
}

/// Where the next whole record after `offset` begins that can be read.
pub(super) fn next_record(file: &dyn DiskFile, store: u64, segment: u64, offset: u64, end: u64) -> Option<u64> {
    search(file, store, segment, offset, end, |_| Ok(())).ok().flatten()
}

/// As [`next_record`], but a read error is returned.
pub(super) fn try_next_record(
    file: &dyn DiskFile,
    store: u64,
    segment: u64,
    offset: u64,
    end: u64,
) -> io::Result<Option<u64>> {
    search(file, store, segment, offset, end, Err)
}

fn search(
    file: &dyn DiskFile,
    store: u64,
    segment: u64,
    offset: u64,
    end: u64,
    unread: impl Fn(io::Error) -> io::Result<()>,
) -> io::Result<Option<u64>> {
    const STRIDE: u64 = 1 << 20;
    let mut at = offset + ALIGNMENT;
    while at < end {
        // Views as large as the file gives them: a view takes a system call.
        let length = STRIDE.min(end - at);
        let block = file.view(at, length as usize).map(Some).or_else(|error| unread(error).map(|()| None))?;
        let mut within = 0;
        while within < length {
            let possible = block.is_none_or(|block| {
                let here = &block[within as usize..];
                here.len() >= 4 && here[..4] == RECORD_MAGIC.to_le_bytes()
            });
            if possible {
                match Head::try_read(file, store, segment, at + within, end) {
                    Ok(Some(_)) => return Ok(Some(at + within)),
                    Ok(None) => {}
                    Err(error) => unread(error)?,
                }
            }
            within += ALIGNMENT;
        }
        at += STRIDE;
    }
    Ok(None)
}

/// The checksum of a head without the field of the checksum.
fn head_checksum(head: &[u8]) -> u64 {
    xxh3_seeded(u64_at(head, 0), &head[16..])
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::super::disk::{Disk, RealDisk};
    use pagoda_test_support::Folder;

    use super::*;

    fn header() -> RecordHeader {
        RecordHeader {
            kind: Kind::Put,
            store: 11,
            segment: 3,
            offset: 64,
            seq: SequenceNumber(9),
            prev_seq: SequenceNumber(8),
            key: Key { space: Space(1), owner: Owner(2) },
            history_start: 5,
            start: 7,
            tokens: 4,
            layers: 3,
            layer_bytes: 10,
            tag_len: 5,
            time: 123,
            synced: 64,
        }
    }

    #[test]
    fn segment_headers_come_back_and_notice_every_flip() {
        let header = SegmentHeader { id: 1, store: 2, created_seq: SequenceNumber(3), previous: 4, previous_len: 5 };
        let bytes = header.encode();
        assert_eq!(SegmentHeader::decode(&bytes), Opening::Good(header));
        for at in 0..bytes.len() {
            let mut bytes = bytes;
            bytes[at] ^= 1;
            assert_eq!(SegmentHeader::decode(&bytes), Opening::Damaged, "byte {at}");
        }
        let mut newer = bytes;
        newer[8] = 2;
        let sum = xxh3(&newer[..56]);
        newer[56..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(SegmentHeader::decode(&newer), Opening::Foreign(2));
    }

    #[test]
    fn names_of_segments() {
        assert_eq!(segment_name(7), "segment-0000000007.pgd");
        assert_eq!(segment_id("segment-0000000007.pgd"), Some(7));
        assert_eq!(segment_id("segment-7.pgd"), None);
        assert_eq!(segment_id("segment-0000000007.pgd.old"), None);
    }

    #[test]
    fn records_come_back_and_notice_every_flip() {
        let folder = Folder::new();
        let disk = RealDisk::new(folder.path());
        let data: Vec<u8> = (0..30).collect();
        let sums: Vec<u64> = data.chunks(10).map(layer_checksum).collect();
        let mut bytes = vec![0; 64];
        bytes.extend(header().encode(&sums, b"hello"));
        bytes.extend(&data);
        bytes.resize(64 + header().total_len() as usize, 0);
        for flip in [None].into_iter().chain((64..64 + header().head_len() as usize + data.len()).map(Some)) {
            let mut bytes = bytes.clone();
            if let Some(at) = flip {
                bytes[at] ^= 16;
            }
            let name = format!("{flip:?}");
            let file = disk.create(&name, 4096).unwrap();
            file.write_at(0, &[&bytes]).unwrap();
            let end = bytes.len() as u64;
            let head = Head::read(&*file, 11, 3, 64, end);
            let whole = head.is_some_and(|head| head.data().is_some());
            assert_eq!(whole, flip.is_none(), "{flip:?}");
            if let (Some(head), None) = (head, flip) {
                assert_eq!(head.header, header());
                assert_eq!(head.tag(), b"hello");
                assert_eq!(head.layer(1).unwrap(), &data[10..20]);
                assert_eq!(next_record(&*file, 11, 3, 0, end), Some(64));
                assert!(Head::read(&*file, 12, 3, 64, end).is_none(), "another store's");
                assert!(Head::read(&*file, 11, 3, 64, end - 64).is_none(), "not whole");
            }
            disk.remove(&name).unwrap();
        }
    }
}
