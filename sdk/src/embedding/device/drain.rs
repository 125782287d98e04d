//! What lookups that wait for nothing found missing: read when they are done, and brought in the background.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::Builder;

use super::super::distinct::Distinct;
use super::super::later::{Later, unless_panics};
use super::super::lookup::Looked;
use super::super::table::Table;
use super::Scratches;
use crate::device::BagScratch;
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex};

/// A lookup that is on a stream.
pub(super) struct Asked {
    /// A table that is retired meanwhile is not served any more.
    pub(super) table: Weak<Table>,
    pub(super) later: Arc<Later>,
    pub(super) keys: usize,
    pub(super) scratch: BagScratch,
    pub(super) scratches: Arc<Scratches>,
}

/// The thread that waits for lookups, one after the other. It ends by itself when the last was read: whoever drops this may
/// be on a thread that it waits for.
pub(super) struct Drain {
    sender: Sender<Asked>,
    waiting: Arc<Waiting>,
}

/// How many lookups were not read yet.
#[derive(Default)]
struct Waiting {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Waiting {
    fn end(&self) {
        *self.count.lock() -= 1;
        self.changed.notify_all();
    }
}

impl Drain {
    pub(super) fn start() -> Result<Self> {
        let (sender, receiver) = channel();
        let waiting = Arc::<Waiting>::default();
        let own = Arc::clone(&waiting);
        let thread = Builder::new().name("pagoda-drain".into()).spawn(move || work(&receiver, &own));
        thread.map_err(|error| {
            Error::new(Status::Capacity, format!("no thread to read what a GPU found missing: {error}"))
        })?;
        Ok(Self { sender, waiting })
    }

    /// Has a lookup read when it is done.
    pub(super) fn send(&self, asked: Asked) {
        *self.waiting.count.lock() += 1;
        if self.sender.send(asked).is_err() {
            self.waiting.end();
        }
    }

    /// Waits until every lookup was read.
    pub(super) fn wait(&self) {
        let mut count = self.waiting.count.lock();
        self.waiting.changed.wait_while(&mut count, |count| *count > 0);
    }
}

fn work(receiver: &Receiver<Asked>, waiting: &Waiting) {
    for asked in receiver {
        let _ = unless_panics(|| asked.read());
        waiting.end();
    }
}

impl Asked {
    fn read(self) {
        if let Err(error) = self.scratch.wait() {
            log::warn!("what a GPU found missing is not fetched: {error}");
            return;
        }
        let missing = self.scratch.missing_keys();
        self.scratches.put_back(self.scratch);
        let Some(table) = self.table.upgrade() else { return };
        let hits = self.keys - missing.len().min(self.keys);
        let missing = Distinct::of(missing.into_iter()).keys;
        // The different ones among those that were found no one has counted: they are on the device.
        table.counters.count(Looked { keys: hits + missing.len(), hits, defaults: missing.len() });
        let sought: Vec<i64> = missing.into_iter().filter(|&key| !table.absent.contains(key)).collect();
        if !sought.is_empty() {
            self.later.insert(&table, sought);
        }
    }
}
