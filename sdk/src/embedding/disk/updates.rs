//! What has changed since a table file was built, in a folder of sled's beside it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use twox_hash::XxHash3_64;

use super::build::{beside, sync_folder};
use super::format::{Header, Marker, u64_at};
use crate::embedding::floor::Rows;
use crate::error::{Error, Result, Status};
use crate::store::checksum;

/// How much of the updates sled keeps in memory.
const CACHE_BYTES: u64 = 64 << 20;
/// How long another process may take to look at the updates.
const PATIENCE: Duration = Duration::from_secs(30);
/// The name of [`Meta`]; those of rows have 8 bytes.
const META: &[u8] = b"meta";

pub(super) struct Updates {
    path: PathBuf,
    table: u64,
    row_bytes: usize,
    held: Held,
    /// Every key that was updated, and perhaps some that were about to be: most are not, and need not be asked for.
    keys: RwLock<HashSet<i64>>,
    count: AtomicUsize,
    state: Mutex<State>,
}

enum Held {
    /// Made by the first update.
    Sled(OnceLock<sled::Db>),
    /// Read once: sled allows nobody beside it.
    Loaded(HashMap<i64, Vec<u8>>),
}

#[derive(Default)]
struct State {
    meta: Meta,
    /// Whether a write failed: then nobody knows what is in there.
    broken: bool,
}

/// What is known of a key.
pub(super) struct Update<'a> {
    pub(super) version: u64,
    /// `None` if it was deleted.
    pub(super) row: Option<&'a [u8]>,
}

/// Removes the updates of a table that was replaced.
pub(super) fn remove(table: &Path) -> Result<()> {
    let path = folder(table);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::new(
            Status::Io,
            format!("{}, of the table before, can not be removed: {error}. Remove it by hand", path.display()),
        )),
        _ => Ok(()),
    }
}

fn folder(table: &Path) -> PathBuf {
    beside(table, ".updates")
}

impl Updates {
    pub(super) fn open(table: &Path, header: &Header, marker: Marker, read_only: bool) -> Result<Self> {
        let mut updates = Self {
            path: folder(table),
            table: header.id,
            row_bytes: header.layout.row_bytes(),
            held: Held::Sled(OnceLock::new()),
            keys: RwLock::default(),
            count: AtomicUsize::new(0),
            state: Mutex::default(),
        };
        let there = updates.path.exists();
        if there {
            updates.load(header.replaced, read_only)?;
        }
        let known = updates.state.get_mut().unwrap_or_else(PoisonError::into_inner).meta.updates;
        if known < marker.updates {
            let what = if there { "has" } else { "is not there; it had" };
            return Err(updates.wrong(&format!(
                "{what} {known} updates of at least {}: bring it back, or build the table again",
                marker.updates
            )));
        }
        Ok(updates)
    }

    /// Reads all of them, so that none that is damaged is found later, and to know their keys.
    fn load(&mut self, replaced: u64, read_only: bool) -> Result<()> {
        let tree = self.open_sled()?;
        let meta = self.attempt("read", || tree.get(META))?;
        let meta = match meta {
            Some(bytes) => Meta::decode(&bytes).ok_or_else(|| self.wrong("is damaged"))?,
            // Made, and nothing was written yet.
            None => Meta { table: self.table, ..Meta::default() },
        };
        if meta.table == replaced && replaced != 0 {
            // The build that replaced the table was ended before it came to this.
            self.attempt("closed", || {
                drop(tree);
                Ok(())
            })?;
            return if read_only {
                Ok(())
            } else {
                fs::remove_dir_all(&self.path).map_err(|error| self.failed(&error))
            };
        }
        if meta.table != self.table {
            let message = "has updates of another table: bring that table back, or remove the folder to lose them";
            return Err(self.wrong(message));
        }
        let (mut keys, mut loaded, mut digest) = (HashSet::new(), HashMap::new(), Digest::default());
        self.attempt("read", || {
            for pair in tree.iter() {
                let (key, value) = pair?;
                if key.as_ref() == META {
                    continue;
                }
                digest.add(&key, &value);
                // One that is too long or short does not get past the digest.
                let number = key.as_ref().try_into().map_or(0, i64::from_be_bytes);
                keys.insert(number);
                if read_only {
                    loaded.insert(number, value.to_vec());
                }
            }
            Ok(())
        })?;
        let whole = digest == meta.digest && keys.len() as u64 == digest.count;
        if !whole {
            return Err(self.wrong("is damaged: its updates are not those that were written"));
        }
        self.count = AtomicUsize::new(keys.len());
        self.keys = RwLock::new(keys);
        self.state = Mutex::new(State { meta, broken: false });
        self.held = if read_only {
            self.attempt("closed", || {
                drop(tree);
                Ok(())
            })?;
            Held::Loaded(loaded)
        } else {
            Held::Sled(OnceLock::from(tree))
        };
        Ok(())
    }

    fn open_sled(&self) -> Result<sled::Db> {
        let config = sled::Config::new().path(&self.path).cache_capacity(CACHE_BYTES).flush_every_ms(None);
        let patience = Instant::now() + PATIENCE;
        loop {
            // Another process that opens the table to read has it for a moment, and one of sled's threads may hold its
            // lock a moment longer than the one who closed it.
            let held = |error: &sled::Error| error.to_string().contains("could not acquire lock");
            let opened = self.attempt("opened", || match config.open() {
                Err(error) if held(&error) => Ok(None),
                opened => opened.map(Some),
            })?;
            match opened {
                Some(tree) => return Ok(tree),
                None if Instant::now() < patience => std::thread::sleep(Duration::from_millis(2)),
                None => return Err(Error::new(Status::Busy, format!("{} is in use", self.path.display()))),
            }
        }
    }

    /// The places in `keys` of those that may have been updated; `None` if none was.
    pub(super) fn places(&self, keys: &[i64]) -> Option<Vec<bool>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let updated = self.keys.read().unwrap_or_else(PoisonError::into_inner);
        Some(keys.iter().map(|key| updated.contains(key)).collect())
    }

    /// Gives what is known of a key; false if it was not updated.
    pub(super) fn get(&self, key: i64, give: impl FnOnce(Update<'_>)) -> Result<bool> {
        let kept;
        let value: &[u8] = match &self.held {
            Held::Loaded(rows) => match rows.get(&key) {
                Some(value) => value,
                None => return Ok(false),
            },
            Held::Sled(tree) => {
                let Some(tree) = tree.get() else { return Ok(false) };
                match self.attempt("read", || tree.get(key.to_be_bytes()))? {
                    Some(value) => kept = value,
                    None => return Ok(false),
                }
                &kept
            }
        };
        let update = Update::decode(key, value, self.row_bytes);
        give(update.ok_or_else(|| self.wrong(&format!("holds for the key {key} what was not written")))?);
        Ok(true)
    }

    /// Applies changes that are not older than what is there, and makes them durable. `mark` is called then with the
    /// number of updates and whether it is the first.
    pub(super) fn apply(&self, change: &Rows<'_>, mark: impl FnOnce(Marker, bool) -> Result<()>) -> Result<()> {
        let Held::Sled(tree) = &self.held else { unreachable!("a table that is read-only is not updated") };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            return Err(self.wrong("could not be written to before: close the table and open it again"));
        }
        if tree.get().is_none() {
            let made = self.open_sled()?;
            drop(tree.set(made));
        }
        let tree = tree.get().expect("made above");
        let (batch, meta, keys) = self.batch(tree, change, state.meta)?;
        if !keys.is_empty() {
            // Before they are there: who asks in between finds nothing new, and looks on.
            let mut known = self.keys.write().unwrap_or_else(PoisonError::into_inner);
            known.extend(keys);
            self.count.store(known.len(), Ordering::Release);
        }
        state.broken = true;
        self.attempt("written", || {
            tree.apply_batch(batch)?;
            tree.flush()
        })?;
        if state.meta.updates == 0 {
            sync_folder(&self.path.join("db")).and_then(|()| sync_folder(&self.path)).map_err(|e| self.failed(&e))?;
        }
        mark(Marker { updates: meta.updates }, state.meta.updates == 0)?;
        *state = State { meta, broken: false };
        Ok(())
    }

    fn batch(&self, tree: &sled::Db, change: &Rows<'_>, mut meta: Meta) -> Result<(sled::Batch, Meta, Vec<i64>)> {
        let (mut batch, mut keys) = (sled::Batch::default(), Vec::new());
        for (place, &key) in change.keys.iter().enumerate() {
            let name = key.to_be_bytes();
            if let Some(old) = self.attempt("read", || tree.get(name))? {
                let held = Update::decode(key, &old, self.row_bytes);
                let held = held.ok_or_else(|| self.wrong(&format!("holds for the key {key} what was not written")))?;
                if held.version > change.versions[place] {
                    continue;
                }
                meta.digest.subtract(&name, &old);
            } else {
                keys.push(key);
            }
            let update = Update { version: change.versions[place], row: change.row(place) };
            let value = update.encode(key);
            meta.digest.add(&name, &value);
            batch.insert(&name, value);
        }
        (meta.table, meta.updates) = (self.table, meta.updates + 1);
        batch.insert(META, meta.encode());
        Ok((batch, meta, keys))
    }

    pub(super) fn memory(&self) -> u64 {
        // A hash table keeps an eighth or more of its places free, and a byte for each.
        let keys = self.keys.read().unwrap_or_else(PoisonError::into_inner).capacity() as u64 * 10;
        keys + match &self.held {
            Held::Sled(tree) => tree.get().map_or(0, |_| CACHE_BYTES),
            Held::Loaded(rows) => rows.len() as u64 * (self.row_bytes as u64 + 64),
        }
    }

    /// Runs something of sled's, which panics on some damaged files: that is an error like another here.
    fn attempt<T>(&self, what: &str, run: impl FnOnce() -> sled::Result<T>) -> Result<T> {
        let reason = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(result)) => return Ok(result),
            Ok(Err(error)) => error.to_string(),
            Err(panic) => Error::from_panic(&*panic).message().to_owned(),
        };
        Err(self.wrong(&format!("can not be {what}: {reason}")))
    }

    fn wrong(&self, what: &str) -> Error {
        Error::new(Status::Io, format!("{}, with the updates of the table, {what}", self.path.display()))
    }

    fn failed(&self, error: &io::Error) -> Error {
        self.wrong(&format!("can not be changed: {error}"))
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        if let Held::Sled(tree) = &mut self.held
            && let Some(tree) = tree.take()
        {
            let _ = catch_unwind(AssertUnwindSafe(|| drop(tree)));
        }
    }
}

impl<'a> Update<'a> {
    fn encode(&self, key: i64) -> Vec<u8> {
        let mut bytes = self.version.to_le_bytes().to_vec();
        bytes.push(u8::from(self.row.is_none()));
        bytes.extend(self.row.unwrap_or_default());
        bytes.extend(Self::checksum(key, &bytes).to_le_bytes());
        bytes
    }

    fn decode(key: i64, bytes: &'a [u8], row_bytes: usize) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk()?;
        if Self::checksum(key, body) != u32::from_le_bytes(*sum) {
            return None;
        }
        let (version, rest) = body.split_first_chunk()?;
        let row = match rest.split_first()? {
            (0, row) if row.len() == row_bytes => Some(row),
            (1, []) => None,
            _ => return None,
        };
        Some(Self { version: u64::from_le_bytes(*version), row })
    }

    fn checksum(key: i64, body: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&key.to_le_bytes()), body)
    }
}

/// What the updates say of themselves; written with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Meta {
    table: u64,
    /// How many times the table was updated.
    updates: u64,
    digest: Digest,
}

/// How many pairs there are, and a sum over them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Digest {
    count: u64,
    sum: u64,
}

impl Digest {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.count += 1;
        self.sum = self.sum.wrapping_add(Self::of(key, value));
    }

    fn subtract(&mut self, key: &[u8], value: &[u8]) {
        self.count -= 1;
        self.sum = self.sum.wrapping_sub(Self::of(key, value));
    }

    fn of(key: &[u8], value: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(checksum(key), value)
    }
}

impl Meta {
    fn encode(&self) -> Vec<u8> {
        let words = [self.table, self.updates, self.digest.count, self.digest.sum];
        let mut bytes = words.map(u64::to_le_bytes).concat();
        bytes.extend(checksum(&bytes).to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != 40 || checksum(&bytes[..32]) != u64_at(bytes, 32) {
            return None;
        }
        let [table, updates, count, sum] = [0, 8, 16, 24].map(|at| u64_at(bytes, at));
        Some(Self { table, updates, digest: Digest { count, sum } })
    }
}
