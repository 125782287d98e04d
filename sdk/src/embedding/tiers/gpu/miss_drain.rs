//! Collects the misses of GPU lookups that do not wait for missing rows.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use super::scratch_pool::ScratchPool;
use crate::device::MissList;
use crate::embedding::panic_guard::catch_panic;
use crate::error::Result;
use crate::sync::{Condvar, Mutex, Worker};

/// Receives the misses of finished lookups.
pub(in crate::embedding) trait MissSink: Send + Sync {
    /// A lookup of `keys` keys ended. `missing` are the keys that it did not find; they may contain duplicates.
    fn missed(&self, keys: usize, missing: Vec<i64>);
}

/// A lookup that is on a stream.
pub(in crate::embedding) struct PendingLookup {
    pub(in crate::embedding) sink: Arc<dyn MissSink>,
    pub(in crate::embedding) keys: usize,
    pub(in crate::embedding) scratch: MissList,
    pub(in crate::embedding) scratches: Arc<ScratchPool>,
}

/// A worker thread that waits for lookups in the order in which they were enqueued. The thread is detached and ends
/// after the last lookup: the thread that drops this may be one that the worker waits for.
pub(in crate::embedding) struct MissDrain {
    sender: Sender<PendingLookup>,
    pending: Arc<Pending>,
}

/// The number of lookups whose misses were not read yet.
#[derive(Default)]
struct Pending {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Pending {
    fn end(&self) {
        *self.count.lock() -= 1;
        self.changed.notify_all();
    }
}

impl MissDrain {
    pub(super) fn start() -> Result<Self> {
        let (sender, receiver) = channel();
        let pending = Arc::<Pending>::default();
        let shared = Arc::clone(&pending);
        Worker::spawn("pagoda-drain", "read the misses of a GPU with", move || work(&receiver, &shared))?.detach();
        Ok(Self { sender, pending })
    }

    /// Enqueues a lookup: its misses are read when it is done.
    pub(in crate::embedding) fn send(&self, lookup: PendingLookup) {
        *self.pending.count.lock() += 1;
        if self.sender.send(lookup).is_err() {
            self.pending.end();
        }
    }

    /// Waits until the misses of every lookup were read.
    pub(super) fn wait(&self) {
        let mut count = self.pending.count.lock();
        self.pending.changed.wait_while(&mut count, |count| *count > 0);
    }
}

fn work(receiver: &Receiver<PendingLookup>, pending: &Pending) {
    for lookup in receiver {
        let _ = catch_panic(|| lookup.read());
        pending.end();
    }
}

impl PendingLookup {
    fn read(self) {
        if let Err(error) = self.scratch.wait() {
            log::warn!("the rows that a GPU lookup missed are not fetched: {error}");
            return;
        }
        let missing = self.scratch.missing_keys();
        self.scratches.put_back(self.scratch);
        self.sink.missed(self.keys, missing);
    }
}
