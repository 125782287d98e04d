//! Keeps the persistent index in step with the segments: it always equals what a prefix of the records makes.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;

use super::Key;
use super::chain::{Chain, Known, Location, resolve};
use super::index::{Covered, Digest, Index, META, Meta, decode_chain, decode_key, encode_chain, encode_key};
use super::inner::Inner;
use super::sequence_number::SequenceNumber;
use crate::error::{Error, Result, Status};

/// How many owners a rebuild writes to the index at once.
const CHUNK: usize = 10_000;

/// A change of the index.
pub(super) enum Change {
    Record(Known),
    /// A compaction copied a record.
    Moved {
        seq: SequenceNumber,
        to: Location,
    },
}

pub(super) struct Persistent {
    index: Box<dyn Index>,
    digest: Digest,
    /// Whether it failed. Then it is not used again, except to remove its contents.
    broken: bool,
    /// Whether outdated contents were left behind when it failed.
    stale: bool,
}

/// What was found in an index.
pub(super) enum Loaded {
    /// It is intact.
    Good(Meta, HashMap<Key, Chain<Location>>),
    /// It is damaged or missing. Its entry about itself, if that is intact, tells how long the segments should be.
    Bad(Option<Meta>),
}

impl Loaded {
    /// All segments that the index ever listed have lower numbers.
    pub(super) fn next_segment(&self) -> u64 {
        match self {
            Self::Good(meta, _) | Self::Bad(Some(meta)) => meta.next_segment,
            Self::Bad(None) => 0,
        }
    }
}

impl Persistent {
    pub(super) fn new(index: Box<dyn Index>) -> Self {
        Self { index, digest: Digest::default(), broken: false, stale: false }
    }

    pub(super) fn load(&mut self) -> Loaded {
        let Ok(pairs) = self.index.load() else { return Loaded::Bad(None) };
        let mut meta = None;
        let mut chains = HashMap::with_capacity(pairs.len());
        let mut digest = Digest::default();
        let mut readable = true;
        for (key, value) in pairs {
            if key == META {
                meta = Meta::decode(&value);
                continue;
            }
            digest.add(&key, &value);
            match (decode_key(&key), decode_chain(&value)) {
                (Some(key), Some(chain)) => drop(chains.insert(key, chain)),
                _ => readable = false,
            }
        }
        match meta {
            Some(meta) if readable && meta.digest == digest => {
                self.digest = digest;
                Loaded::Good(meta, chains)
            }
            meta => Loaded::Bad(meta),
        }
    }

    /// Makes a loaded index durable: a process that was killed may have written it without a flush. A flush alone would
    /// do nothing, for nothing was written since.
    pub(super) fn confirm(&mut self, loaded: Loaded) -> Loaded {
        let Loaded::Good(meta, chains) = loaded else { return loaded };
        let again = vec![(META.to_vec(), Some(meta.encode()))];
        match self.attempt(|this| this.index.apply(again).and_then(|()| this.index.flush())) {
            Ok(()) => Loaded::Good(meta, chains),
            Err(_) => Loaded::Bad(Some(meta)),
        }
    }

    /// Rebuilds it from all chains.
    pub(super) fn rebuild(&mut self, inner: &Inner, chains: &HashMap<Key, Chain<Location>>) -> Result<()> {
        self.attempt(|this| {
            this.index.wipe()?;
            this.digest = Digest::default();
            let mut batch = Vec::new();
            for (&key, chain) in chains {
                let (key, value) = (encode_key(key), encode_chain(chain));
                this.digest.add(&key, &value);
                batch.push((key, Some(value)));
                if batch.len() == CHUNK {
                    this.index.apply(std::mem::take(&mut batch))?;
                }
            }
            // Meta goes with the last batch: an index without it is not valid.
            batch.push((META.to_vec(), Some(this.meta(inner).encode())));
            this.index.apply(batch)?;
            this.index.flush()
        })
    }

    /// Applies the changes since the last update, atomically.
    pub(super) fn update(&mut self, inner: &Inner, changes: Vec<(Key, Change)>, flush: bool) -> Result<()> {
        if changes.is_empty() && !flush {
            return Ok(());
        }
        self.attempt(|this| {
            let mut of_keys: HashMap<Key, Vec<Change>> = HashMap::new();
            for (key, change) in changes {
                of_keys.entry(key).or_default().push(change);
            }
            let mut batch = Vec::with_capacity(of_keys.len() + 1);
            for (key, changes) in of_keys {
                this.update_key(inner, key, changes, &mut batch)?;
            }
            batch.push((META.to_vec(), Some(this.meta(inner).encode())));
            this.index.apply(batch)?;
            if flush { this.index.flush() } else { Ok(()) }
        })
    }

    fn update_key(
        &mut self,
        inner: &Inner,
        key: Key,
        changes: Vec<Change>,
        batch: &mut Vec<(Vec<u8>, Option<Vec<u8>>)>,
    ) -> Result<()> {
        let name = encode_key(key);
        let old = self.index.get(&name)?;
        let chain = match &old {
            Some(bytes) => Some(decode_chain(bytes).ok_or_else(|| unreadable("holds a value that was not written"))?),
            None => None,
        };
        let mut records = chain.as_ref().map_or_else(Vec::new, Known::of_chain);
        for change in changes {
            match change {
                Change::Record(record) => records.push(record),
                Change::Moved { seq, to } => {
                    records
                        .iter_mut()
                        .filter(|record| record.slot.seq == seq)
                        .for_each(|record| record.slot.place = to);
                }
            }
        }
        let newest = records.iter().map(|record| record.slot.seq).max().unwrap_or_default();
        let stamp = inner.shard(key).get(&key).map_or(newest.0, |chain| chain.stamp);
        // The segments hold all its records, or else the write would have failed.
        let new = resolve(&mut records, stamp).map_err(|_| unreadable("lacks a record"))?;
        let new = new.map(|chain| encode_chain(&chain));
        if let Some(old) = &old {
            self.digest.subtract(&name, old);
        }
        if let Some(new) = &new {
            self.digest.add(&name, new);
        }
        if old.is_some() || new.is_some() {
            batch.push((name, new));
        }
        Ok(())
    }

    fn meta(&self, inner: &Inner) -> Meta {
        let segments = inner.segments.lock();
        let segments = segments.values().map(|segment| Covered {
            id: segment.id,
            len: segment.len.load(Relaxed),
            lowest_dead: segment.lowest_dead(),
        });
        let segments = segments.collect();
        Meta {
            store: inner.id,
            next_seq: inner.queue.next_seq(),
            next_segment: inner.next_segment.load(Relaxed),
            digest: self.digest,
            segments,
        }
    }

    fn attempt(&mut self, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        if self.broken {
            return Ok(());
        }
        let outcome = run(self);
        if outcome.is_err() {
            self.broken = true;
            // If this fails too, the index still equals a prefix of the records, as long as all segments are there.
            self.stale = self.index.wipe().is_err();
        }
        outcome
    }

    /// Makes sure that the index on disk, if there is one, is current. An outdated one would list segments that are
    /// about to be removed.
    pub(super) fn retract(&mut self) -> Result<()> {
        if self.stale {
            self.index.wipe()?;
            self.stale = false;
        }
        Ok(())
    }
}

fn unreadable(how: &str) -> Error {
    Error::new(Status::Io, format!("the store's index {how}"))
}
