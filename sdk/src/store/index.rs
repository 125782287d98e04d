//! The persistent copy of the index, which saves reading all segments when a store is opened. It is a cache: if it is
//! damaged or outdated, it is discarded and rebuilt from the segments.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chain::{Chain, Location, Slot};
use super::format::{u32_at, u64_at};
use super::sequence_number::SequenceNumber;
use super::{Key, Owner, Space};
use crate::checksum::{xxh3, xxh3_seeded};
use crate::error::{Error, Result, Status};
use crate::files::sync_parent;
use crate::sync::Mutex;

/// Pairs of bytes that outlive the process.
pub trait Index: Send {
    /// Opens it if necessary and returns everything in it.
    fn load(&mut self) -> Result<Vec<Pair>>;

    /// The value of a key.
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>>;

    /// Sets and (`None`) removes values: all of them, or after a crash none.
    fn apply(&mut self, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Result<()>;

    /// Makes what was applied durable.
    fn flush(&mut self) -> Result<()>;

    /// Removes everything, also from a damaged index.
    fn wipe(&mut self) -> Result<()>;
}

/// A key and its value.
pub type Pair = (Vec<u8>, Vec<u8>);

/// The index in a folder, kept by sled.
pub struct SledIndex {
    path: PathBuf,
    tree: Option<sled::Db>,
}

impl SledIndex {
    /// The index in this folder, which is made on first use.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self { path: path.as_ref().to_owned(), tree: None }
    }

    /// Runs a function on the open tree. sled panics on some damaged files; here that is an error.
    fn with<T>(&mut self, what: &str, run: impl FnOnce(&sled::Db) -> sled::Result<T>) -> Result<T> {
        let attempt = catch_unwind(AssertUnwindSafe(|| {
            if self.tree.is_none() {
                self.tree = Some(open_sled(&self.path)?);
            }
            run(self.tree.as_ref().expect("opened above"))
        }));
        let reason = match attempt {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => Error::from_panic(&*panic).message().to_owned(),
        };
        Err(Error::new(Status::Io, format!("the index {} can not be {what}: {reason}", self.path.display())))
    }

    fn close(&mut self) {
        if let Some(tree) = self.tree.take() {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(tree)));
        }
    }
}

fn unless_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

fn open_sled(path: &Path) -> sled::Result<sled::Db> {
    // Flushed when a segment is full and at the end. Recovery reads later records from the segments.
    let config = sled::Config::new().path(path).cache_capacity(64 << 20).flush_every_ms(None);
    // A background thread of sled may hold sled's lock for a moment after the tree was closed. No other store can have
    // it: this one holds the store's own lock.
    let patience = Instant::now() + Duration::from_secs(5);
    loop {
        match config.open() {
            Err(sled::Error::Io(error))
                if error.to_string().contains("could not acquire lock") && Instant::now() < patience =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            outcome => return outcome,
        }
    }
}

impl Index for SledIndex {
    fn load(&mut self) -> Result<Vec<Pair>> {
        self.with("read", |tree| {
            tree.iter().map(|pair| pair.map(|(key, value)| (key.to_vec(), value.to_vec()))).collect()
        })
    }

    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.with("read", |tree| Ok(tree.get(key)?.map(|value| value.to_vec())))
    }

    fn apply(&mut self, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Result<()> {
        self.with("written", |tree| {
            let mut batch = sled::Batch::default();
            for (key, value) in changes {
                match value {
                    Some(value) => batch.insert(key, value),
                    None => batch.remove(key),
                }
            }
            tree.apply_batch(batch)
        })
    }

    fn flush(&mut self) -> Result<()> {
        let path = self.path.clone();
        self.with("written", |tree| {
            tree.flush()?;
            // sled's flush does not sync the file's metadata or the disk's own cache. Segments are removed because the
            // index does not list them, so the index has to be durable before.
            let file = path.join("db");
            File::open(&file)?.sync_all()?;
            sync_parent(&file)?;
            Ok(sync_parent(&path)?)
        })
    }

    fn wipe(&mut self) -> Result<()> {
        self.close();
        let removed =
            if self.path.is_dir() { std::fs::remove_dir_all(&self.path) } else { std::fs::remove_file(&self.path) };
        // An index that came back after a loss of power would list segments that were removed since. Synced even if
        // there is no index now: the removal of an earlier one may not be durable yet.
        let synced = || sync_parent(&self.path).or_else(unless_missing);
        removed.or_else(unless_missing).and_then(|()| synced()).map_err(|error| {
            let message = format!("the index {} can not be removed: {error}. Remove it by hand", self.path.display());
            Error::new(Status::Io, message)
        })
    }
}

impl Drop for SledIndex {
    fn drop(&mut self) {
        self.close();
    }
}

/// An index in memory, for tests. Clones share their contents, so that the next store can open the same one.
#[derive(Clone, Debug, Default)]
pub struct MemoryIndex {
    /// What is in it.
    pub pairs: Arc<Mutex<BTreeMap<Vec<u8>, Vec<u8>>>>,
}

impl Index for MemoryIndex {
    fn load(&mut self) -> Result<Vec<Pair>> {
        Ok(self.pairs.lock().clone().into_iter().collect())
    }

    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        Ok(self.pairs.lock().get(key).cloned())
    }

    fn apply(&mut self, changes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> Result<()> {
        let mut pairs = self.pairs.lock();
        for (key, value) in changes {
            match value {
                Some(value) => pairs.insert(key, value),
                None => pairs.remove(&key),
            };
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn wipe(&mut self) -> Result<()> {
        self.pairs.lock().clear();
        Ok(())
    }
}

/// The key of [`Meta`]; keys of owners have 16 bytes.
pub(super) const META: &[u8] = b"meta";
const META_VERSION: u64 = 1;

/// The index's entry about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Meta {
    pub(super) store: u64,
    pub(super) next_seq: SequenceNumber,
    /// A segment with a lower number that is not in the list was about to be removed.
    pub(super) next_segment: u64,
    pub(super) digest: Digest,
    pub(super) segments: Vec<Covered>,
}

/// How much of a segment the index covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Covered {
    pub(super) id: u64,
    pub(super) len: u64,
    pub(super) lowest_dead: SequenceNumber,
}

/// The number of pairs and an order-independent checksum of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Digest {
    count: u64,
    sums: [u64; 2],
}

impl Digest {
    pub(super) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.count = self.count.wrapping_add(1);
        for (seed, sum) in self.sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add(hash(seed as u64, key, value));
        }
    }

    pub(super) fn subtract(&mut self, key: &[u8], value: &[u8]) {
        self.count = self.count.wrapping_sub(1);
        for (seed, sum) in self.sums.iter_mut().enumerate() {
            *sum = sum.wrapping_sub(hash(seed as u64, key, value));
        }
    }
}

fn hash(seed: u64, key: &[u8], value: &[u8]) -> u64 {
    xxh3_seeded(seed, &[key, value].concat())
}

impl Meta {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Digest { count, sums } = self.digest;
        let words = [META_VERSION, self.store, self.next_seq.0, self.next_segment, count, sums[0], sums[1]];
        let segments = self.segments.iter().flat_map(|covered| [covered.id, covered.len, covered.lowest_dead.0]);
        let mut bytes: Vec<u8> = words.into_iter().chain(segments).flat_map(u64::to_le_bytes).collect();
        bytes.extend(xxh3(&bytes).to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, sum) = bytes.split_at_checked(bytes.len().checked_sub(8)?)?;
        if body.len() < 56
            || (body.len() - 56) % 24 != 0
            || xxh3(body) != u64_at(sum, 0)
            || u64_at(body, 0) != META_VERSION
        {
            return None;
        }
        let segments = body[56..].chunks(24);
        Some(Self {
            store: u64_at(body, 8),
            next_seq: SequenceNumber(u64_at(body, 16)),
            next_segment: u64_at(body, 24),
            digest: Digest { count: u64_at(body, 32), sums: [u64_at(body, 40), u64_at(body, 48)] },
            segments: segments
                .map(|item| Covered {
                    id: u64_at(item, 0),
                    len: u64_at(item, 8),
                    lowest_dead: SequenceNumber(u64_at(item, 16)),
                })
                .collect(),
        })
    }
}

pub(super) fn encode_key(key: Key) -> Vec<u8> {
    [key.space.0.to_be_bytes(), key.owner.0.to_be_bytes()].concat()
}

pub(super) fn decode_key(bytes: &[u8]) -> Option<Key> {
    let bytes: [u8; 16] = bytes.try_into().ok()?;
    Some(Key {
        space: Space(u64::from_be_bytes(bytes[..8].try_into().ok()?)),
        owner: Owner(u64::from_be_bytes(bytes[8..].try_into().ok()?)),
    })
}

const SLOT: usize = 52;

pub(super) fn encode_chain(chain: &Chain<Location>) -> Vec<u8> {
    let words = [chain.start, chain.end, chain.newest.0, chain.stamp];
    let mut bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
    for slot in &chain.slots {
        bytes.extend(
            [slot.seq.0, slot.start, slot.layer_bytes, slot.place.segment, slot.place.offset]
                .iter()
                .flat_map(|word| word.to_le_bytes()),
        );
        bytes.extend([slot.tokens, slot.layers, slot.tag_len].iter().flat_map(|word| word.to_le_bytes()));
    }
    bytes
}

pub(super) fn decode_chain(bytes: &[u8]) -> Option<Chain<Location>> {
    let (words, slots) = bytes.split_at_checked(32)?;
    if slots.is_empty() || slots.len() % SLOT != 0 {
        return None;
    }
    let slots = slots.chunks(SLOT).map(|item| Slot {
        seq: SequenceNumber(u64_at(item, 0)),
        start: u64_at(item, 8),
        layer_bytes: u64_at(item, 16),
        place: Location { segment: u64_at(item, 24), offset: u64_at(item, 32) },
        tokens: u32_at(item, 40),
        layers: u32_at(item, 44),
        tag_len: u32_at(item, 48),
    });
    Some(Chain {
        start: u64_at(words, 0),
        end: u64_at(words, 8),
        newest: SequenceNumber(u64_at(words, 16)),
        stamp: u64_at(words, 24),
        slots: slots.collect(),
    })
}

#[cfg(test)]
mod tests {
    use pagoda_test_support::Folder;

    use super::*;

    #[test]
    fn what_the_index_holds_comes_back() {
        let meta = Meta {
            store: 1,
            next_seq: SequenceNumber(2),
            next_segment: 9,
            digest: Digest { count: 3, sums: [4, 5] },
            segments: vec![Covered { id: 6, len: 7, lowest_dead: SequenceNumber(8) }],
        };
        let bytes = meta.encode();
        assert_eq!(Meta::decode(&bytes), Some(meta));
        assert!((0..bytes.len()).all(|length| Meta::decode(&bytes[..length]).is_none()));
        let slot = Slot {
            seq: SequenceNumber(9),
            start: 3,
            tokens: 5,
            layers: 2,
            layer_bytes: 100,
            tag_len: 1,
            place: Location { segment: 4, offset: 128 },
        };
        let chain = Chain { start: 4, end: 8, newest: SequenceNumber(10), stamp: 12, slots: vec![slot.clone(), slot] };
        assert_eq!(decode_chain(&encode_chain(&chain)), Some(chain));
        let key = Key { space: Space(1), owner: Owner(u64::MAX) };
        assert_eq!(decode_key(&encode_key(key)), Some(key));
    }

    #[test]
    fn sled_keeps_batches_and_can_be_wiped() {
        let folder = Folder::new();
        let path = folder.path().join("index");
        let mut index = SledIndex::new(&path);
        index.apply(vec![(b"a".to_vec(), Some(b"1".to_vec())), (b"b".to_vec(), Some(b"2".to_vec()))]).unwrap();
        index.apply(vec![(b"a".to_vec(), None)]).unwrap();
        index.flush().unwrap();
        drop(index);
        let mut index = SledIndex::new(&path);
        assert_eq!(index.load().unwrap(), [(b"b".to_vec(), b"2".to_vec())]);
        index.wipe().unwrap();
        assert!(!path.exists());
        assert_eq!(index.load().unwrap(), []);
    }

    #[test]
    fn files_that_sled_can_not_read_are_an_error() {
        let folder = Folder::new();
        let path = folder.path().join("index");
        std::fs::write(&path, "not a folder").unwrap();
        assert_eq!(SledIndex::new(&path).load().unwrap_err().status(), Status::Io);
    }
}
