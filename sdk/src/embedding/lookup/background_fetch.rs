//! Fetches rows on worker threads: for lookups that return the default row meanwhile, for lookups with a time limit,
//! and for prefetches.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use pagoda_kernels::cuda::may_wait;

use super::tier_result::{KeyState, TierResult};
use crate::embedding::hash::mix;
use crate::embedding::panic_guard::catch_panic;
use crate::embedding::table::Table;
use crate::error::Result;
use crate::sync::{Condvar, Mutex, MutexGuard, Worker};

/// The most keys of one task. A large lookup is split, so that it does not delay all others.
const TASK_KEYS: usize = 4096;

/// A bounded queue of keys to fetch, and its worker threads.
pub(in crate::embedding) struct BackgroundFetch {
    shared: Arc<Shared>,
    /// Dropped after `shared.stop` is set: dropping a worker waits for its end.
    workers: Vec<Worker>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    in_flight: InFlightKeys,
    /// The most keys of each kind in the queue.
    max_keys: usize,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Keys of background fetches, queued or running.
    background_keys: usize,
    /// Keys of fetches that a lookup waits for.
    awaited_keys: usize,
    /// Keys of rows to store in a shared tier.
    stored_keys: usize,
    /// Tasks that run.
    running: usize,
    stop: bool,
}

enum Task {
    Fetch(Fetch),
    /// Stores fetched rows in the shared tiers.
    Store(Arc<Table>, Vec<i64>, TierResult),
    /// Runs a step of a longer job; the step returns false when the job is done.
    Steps(Box<dyn FnMut() -> bool + Send>),
}

struct Fetch {
    /// Weak: the fetch is skipped if the table is closed.
    table: Weak<Table>,
    keys: Vec<i64>,
    /// Set if a lookup waits for the result.
    reply: Option<Arc<Reply>>,
}

/// Where a lookup waits for a fetch.
struct Reply {
    /// The deadline for the tiers.
    tier_deadline: Instant,
    state: Mutex<ReplyState>,
    changed: Condvar,
}

#[derive(Default)]
struct ReplyState {
    /// The result so far.
    found: Option<TierResult>,
    done: bool,
    /// The lookup does not wait any more.
    abandoned: bool,
}

impl BackgroundFetch {
    /// Starts `threads` workers, with room for `max_keys` keys of each kind in their queue.
    pub(in crate::embedding) fn new(threads: usize, max_keys: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            in_flight: InFlightKeys::new(max_keys),
            max_keys,
        });
        let mut fetch = Self { shared, workers: Vec::new() };
        for _ in 0..threads {
            let shared = Arc::clone(&fetch.shared);
            let worker = Worker::spawn("pagoda-embedding", "fetch embedding rows with", move || shared.work())?;
            fetch.workers.push(worker);
        }
        Ok(fetch)
    }

    /// Queues unique keys to be fetched into the cache. Keys that are in flight are not queued again. Keys beyond the
    /// capacity of the queue are dropped and counted. Returns how many keys were queued.
    pub(in crate::embedding) fn enqueue(&self, table: &Arc<Table>, keys: Vec<i64>) -> usize {
        self.shared.enqueue(table, keys)
    }

    /// Fetches keys and calls `take` with what has arrived by the deadline. The other rows are cached when they arrive.
    pub(in crate::embedding) fn fetch_until(
        &self,
        table: &Arc<Table>,
        keys: Vec<i64>,
        deadline: Instant,
        take: impl FnOnce(&TierResult),
    ) {
        // The tiers stop a little earlier, so that their partial results arrive in time.
        let tier_deadline = deadline - deadline.saturating_duration_since(Instant::now()) / 8;
        let reply = Arc::new(Reply { tier_deadline, state: Mutex::default(), changed: Condvar::new() });
        let fetch = Fetch { table: Arc::downgrade(table), keys, reply: Some(Arc::clone(&reply)) };
        let mut queue = self.shared.queue.lock();
        if queue.awaited_keys + fetch.keys.len() > self.shared.max_keys {
            table.metrics.dropped.add(fetch.keys.len() as u64);
            return;
        }
        queue.awaited_keys += fetch.keys.len();
        // Ahead of all background fetches.
        queue.tasks.push_front(Task::Fetch(fetch));
        drop(queue);
        self.shared.changed.notify_all();
        let mut state = reply.state.lock();
        while !state.done {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            reply.changed.wait_for(&mut state, left);
        }
        state.abandoned = true;
        if let Some(found) = &state.found {
            take(found);
        }
    }

    /// Queues rows that were found below the shared tiers to be stored there. They are dropped if the queue is full:
    /// the next lookup of the same keys stores them.
    pub(in crate::embedding) fn store_shared(&self, table: &Arc<Table>, keys: &[i64], found: &TierResult) {
        let Some(level) = table.tiers.iter().position(|tier| tier.shared && tier.stores_fetched) else { return };
        // Only these rows are copied: as a rule the shared tier holds most of the others.
        let indices = found.found_below(level);
        if indices.is_empty() {
            return;
        }
        let mut queue = self.shared.queue.lock();
        if queue.stored_keys + indices.len() <= self.shared.max_keys {
            queue.stored_keys += indices.len();
            let keys = indices.iter().map(|&index| keys[index as usize]).collect();
            queue.tasks.push_back(Task::Store(Arc::clone(table), keys, found.select(&indices)));
            drop(queue);
            self.shared.changed.notify_all();
        }
    }

    /// The number of keys whose rows are to be stored, and the bytes of these rows.
    #[cfg(test)]
    pub(in crate::embedding) fn stored_keys(&self) -> (usize, usize) {
        let queue = self.shared.queue.lock();
        let bytes =
            queue.tasks.iter().map(|task| if let Task::Store(_, _, found) = task { found.row_bytes() } else { 0 });
        (queue.stored_keys, bytes.sum())
    }

    /// Queues a job that runs step by step until `step` returns false. Other tasks run between two steps.
    pub(in crate::embedding) fn run_steps(&self, step: impl FnMut() -> bool + Send + 'static) {
        self.shared.queue.lock().tasks.push_back(Task::Steps(Box::new(step)));
        self.shared.changed.notify_all();
    }

    /// Waits until the queue is empty and no task runs.
    pub(in crate::embedding) fn wait(&self) {
        let mut queue = self.shared.queue.lock();
        let busy = |queue: &mut Queue| !queue.tasks.is_empty() || queue.running > 0;
        self.shared.changed.wait_while(&mut queue, busy);
    }
}

impl Drop for BackgroundFetch {
    fn drop(&mut self) {
        self.shared.queue.lock().stop = true;
        self.shared.changed.notify_all();
        debug_assert!(may_wait(), "the workers are stopped while captures are held off, which they may wait for");
        self.workers.clear();
    }
}

impl Shared {
    fn enqueue(&self, table: &Arc<Table>, mut keys: Vec<i64>) -> usize {
        keys.retain(|&key| self.in_flight.begin(fingerprint(Arc::as_ptr(table), key)));
        let mut queue = self.queue.lock();
        let dropped = keys.split_off(keys.len().min(self.max_keys.saturating_sub(queue.background_keys)));
        queue.background_keys += keys.len();
        queue.tasks.extend(
            keys.chunks(TASK_KEYS)
                .map(|keys| Task::Fetch(Fetch { table: Arc::downgrade(table), keys: keys.to_vec(), reply: None })),
        );
        drop(queue);
        self.changed.notify_all();
        table.metrics.dropped.add(dropped.len() as u64);
        self.in_flight.end(Arc::as_ptr(table), &dropped);
        keys.len()
    }

    fn work(&self) {
        loop {
            let idle = |queue: &mut Queue| queue.tasks.is_empty() && !queue.stop;
            let mut queue = self.queue.lock();
            self.changed.wait_while(&mut queue, idle);
            if queue.stop {
                return;
            }
            let Some(task) = queue.tasks.pop_front() else { continue };
            queue.running += 1;
            drop(queue);
            match task {
                Task::Fetch(fetch) => self.fetch(&fetch),
                Task::Store(table, keys, found) => {
                    let _ = catch_panic(|| table.store_above(&keys, &found, |tier| tier.shared));
                    self.queue.lock().stored_keys -= keys.len();
                }
                Task::Steps(mut step) => {
                    let again = catch_panic(&mut step).unwrap_or(false);
                    let mut queue = self.queue.lock();
                    if again {
                        queue.tasks.push_back(Task::Steps(step));
                    }
                }
            }
            self.queue.lock().running -= 1;
            self.changed.notify_all();
        }
    }

    fn fetch(&self, fetch: &Fetch) {
        let _ = catch_panic(|| fetch.run(self));
        match &fetch.reply {
            Some(reply) => {
                self.queue.lock().awaited_keys -= fetch.keys.len();
                reply.set(|state| state.done = true);
            }
            None => {
                self.in_flight.end(fetch.table.as_ptr(), &fetch.keys);
                self.queue.lock().background_keys -= fetch.keys.len();
            }
        }
    }
}

impl Fetch {
    fn run(&self, shared: &Shared) {
        let Some(table) = self.table.upgrade() else { return };
        let store = |found: &TierResult| table.store_above(&self.keys, found, |tier| tier.shared);
        let Some(reply) = &self.reply else {
            table.fetch_rows(&self.keys, None, &mut |_| (), store);
            return;
        };
        if reply.lock().abandoned {
            shared.enqueue(&table, self.keys.clone());
            return;
        }
        let arrived = &mut |found: &TierResult| {
            reply.set(|state| {
                if !state.abandoned {
                    state.found = Some(found.clone());
                }
            });
        };
        let found = table.fetch_rows(&self.keys, Some(reply.tier_deadline), arrived, store);
        // The deadline has passed for these keys. They are fetched in the background.
        let late = |&(index, _): &(usize, &i64)| found.states[index] == KeyState::Unknown;
        let late: Vec<i64> = self.keys.iter().enumerate().filter(late).map(|(_, &key)| key).collect();
        if !late.is_empty() {
            shared.enqueue(&table, late);
        }
        reply.set(|state| state.found = Some(found));
    }
}

impl Reply {
    fn lock(&self) -> MutexGuard<'_, ReplyState> {
        self.state.lock()
    }

    fn set(&self, change: impl FnOnce(&mut ReplyState)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

/// The keys of background fetches that are queued or running. A lookup checks thousands of keys, so this is a hash
/// table of fingerprints without a lock and without collision handling: a key can replace another one, which is then
/// fetched a second time if a lookup misses it again.
struct InFlightKeys(Box<[AtomicU64]>);

impl InFlightKeys {
    fn new(max_keys: usize) -> Self {
        let zeros = Box::<[AtomicU64]>::new_zeroed_slice(max_keys.next_power_of_two());
        // SAFETY: all zeros is a valid atomic. Pages that are never touched take no memory this way.
        Self(unsafe { zeros.assume_init() })
    }

    /// Marks a key as in flight. Returns false if it was already.
    fn begin(&self, fingerprint: u64) -> bool {
        self.slot(fingerprint).swap(fingerprint, Ordering::Relaxed) != fingerprint
    }

    fn end(&self, table: *const Table, keys: &[i64]) {
        for fingerprint in keys.iter().map(|&key| fingerprint(table, key)) {
            let _ = self.slot(fingerprint).compare_exchange(fingerprint, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn slot(&self, fingerprint: u64) -> &AtomicU64 {
        &self.0[fingerprint as usize & (self.0.len() - 1)]
    }
}

/// A hash of a key and its table; never 0. If two keys that are in flight have the same fingerprint, one of them is not
/// fetched until the next lookup that misses it.
fn fingerprint(table: *const Table, key: i64) -> u64 {
    // Both are hashed: tables have close addresses, and tables have close keys.
    mix(key, mix(table as i64, 3)) | 1 << 63
}
