//! Work that no one waits for, or not for long: fetching rows on threads of our own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use pagoda_kernels::cuda::may_wait;

use super::mix::mix;
use super::table::Table;
use super::walk::{Outcome, Walked};
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex, MutexGuard};

/// The most keys of one task: a large lookup does not keep the others waiting.
const TASK: usize = 4096;

/// A bounded queue of keys to be fetched, and the threads that do it.
pub(super) struct Later {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    pending: Pending,
    /// The most keys that may be queued.
    most: usize,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Keys in the queue or being fetched in the background.
    inserting: usize,
    /// Keys that someone waits for, and that are to be put into a floor.
    waiting: usize,
    putting: usize,
    working: usize,
    stop: bool,
}

enum Task {
    Walk(Walk),
    /// What a walk has found.
    Put(Arc<Table>, Vec<i64>, Walked),
    /// Something longer, step by step; false: it is done.
    Steps(Box<dyn FnMut() -> bool + Send>),
}

struct Walk {
    /// A table that is retired meanwhile is not served any more.
    table: Weak<Table>,
    keys: Vec<i64>,
    /// If someone waits for it.
    reply: Option<Arc<Reply>>,
}

/// Where someone waits for a walk.
struct Reply {
    /// Until when floors are asked.
    floors_until: Instant,
    state: Mutex<Replied>,
    changed: Condvar,
}

#[derive(Default)]
struct Replied {
    /// What is known by now.
    walked: Option<Walked>,
    done: bool,
    /// No one waits any more.
    left: bool,
}

impl Later {
    /// Starts `threads` threads with room for `most` keys in their queue.
    pub(super) fn new(threads: usize, most: usize) -> Result<Self> {
        let shared =
            Arc::new(Shared { queue: Mutex::default(), changed: Condvar::new(), pending: Pending::new(most), most });
        let mut later = Self { shared, threads: Vec::new() };
        for _ in 0..threads {
            let shared = Arc::clone(&later.shared);
            let spawned = Builder::new().name("pagoda-embedding".into()).spawn(move || shared.work());
            later.threads.push(spawned.map_err(|error| {
                Error::new(Status::Capacity, format!("no thread to fetch embedding rows with: {error}"))
            })?);
        }
        Ok(later)
    }

    /// Has keys, all different, brought into the cache. What the queue has no room for is dropped, and counted; what is on
    /// its way already is not fetched twice. Says how many were queued.
    pub(super) fn insert(&self, table: &Arc<Table>, keys: Vec<i64>) -> usize {
        self.shared.insert(table, keys)
    }

    /// Walks down the floors for keys, and gives what is found until the deadline; the rest is inserted when it arrives.
    pub(super) fn walk_until(&self, table: &Arc<Table>, keys: Vec<i64>, deadline: Instant, take: impl FnOnce(&Walked)) {
        // A little earlier, so that what a floor has by then is heard of in time.
        let floors_until = deadline - deadline.saturating_duration_since(Instant::now()) / 8;
        let reply = Arc::new(Reply { floors_until, state: Mutex::default(), changed: Condvar::new() });
        let walk = Walk { table: Arc::downgrade(table), keys, reply: Some(Arc::clone(&reply)) };
        let mut queue = self.shared.lock();
        if queue.waiting + walk.keys.len() > self.shared.most {
            table.counters.dropped.add(walk.keys.len() as u64);
            return;
        }
        queue.waiting += walk.keys.len();
        // Before what no one waits for.
        queue.tasks.push_front(Task::Walk(walk));
        drop(queue);
        self.shared.changed.notify_all();
        let mut state = reply.lock();
        while !state.done {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            reply.changed.wait_for(&mut state, left);
        }
        state.left = true;
        if let Some(walked) = &state.walked {
            take(walked);
        }
    }

    /// Has what was found below the floors that are reached over a network put into them, if there is room in the queue: the
    /// next one who looks for it may do it too.
    pub(super) fn put(&self, table: &Arc<Table>, keys: &[i64], walked: &Walked) {
        let Some(level) = table.floors.iter().position(|level| level.shared && level.keeps) else { return };
        // Only these are kept until then: as a rule that floor has most of them.
        let places = walked.below(level);
        if places.is_empty() {
            return;
        }
        let mut queue = self.shared.lock();
        if queue.putting + places.len() <= self.shared.most {
            queue.putting += places.len();
            let keys = places.iter().map(|&place| keys[place as usize]).collect();
            queue.tasks.push_back(Task::Put(Arc::clone(table), keys, walked.part(&places)));
            drop(queue);
            self.shared.changed.notify_all();
        }
    }

    /// How many keys wait to be put, and the bytes of their rows.
    #[cfg(test)]
    pub(super) fn putting(&self) -> (usize, usize) {
        let queue = self.shared.lock();
        let bytes =
            queue.tasks.iter().map(|task| if let Task::Put(_, _, walked) = task { walked.row_bytes() } else { 0 });
        (queue.putting, bytes.sum())
    }

    /// Has something done step by step, as long as `step` says that there is more; others have their turn in between.
    pub(super) fn steps(&self, step: impl FnMut() -> bool + Send + 'static) {
        self.shared.lock().tasks.push_back(Task::Steps(Box::new(step)));
        self.shared.changed.notify_all();
    }

    /// Waits until nothing is queued or being fetched.
    pub(super) fn wait(&self) {
        let mut queue = self.shared.lock();
        let busy = |queue: &mut Queue| !queue.tasks.is_empty() || queue.working > 0;
        self.shared.changed.wait_while(&mut queue, busy);
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        debug_assert!(may_wait(), "inserting is stopped while captures are held off, which it may wait for");
        for thread in self.threads.drain(..) {
            // A panic has been reported where it happened.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    fn insert(&self, table: &Arc<Table>, mut keys: Vec<i64>) -> usize {
        keys.retain(|&key| self.pending.begin(mark(Arc::as_ptr(table), key)));
        let mut queue = self.lock();
        let dropped = keys.split_off(keys.len().min(self.most.saturating_sub(queue.inserting)));
        queue.inserting += keys.len();
        queue.tasks.extend(
            keys.chunks(TASK)
                .map(|keys| Task::Walk(Walk { table: Arc::downgrade(table), keys: keys.to_vec(), reply: None })),
        );
        drop(queue);
        self.changed.notify_all();
        table.counters.dropped.add(dropped.len() as u64);
        self.pending.end(Arc::as_ptr(table), &dropped);
        keys.len()
    }

    fn work(&self) {
        loop {
            let idle = |queue: &mut Queue| queue.tasks.is_empty() && !queue.stop;
            let mut queue = self.lock();
            self.changed.wait_while(&mut queue, idle);
            if queue.stop {
                return;
            }
            let Some(task) = queue.tasks.pop_front() else { continue };
            queue.working += 1;
            drop(queue);
            match task {
                Task::Walk(walk) => self.walk(&walk),
                Task::Put(table, keys, walked) => {
                    let _ = unless_panics(|| table.put_above(&keys, &walked, |level| level.shared));
                    self.lock().putting -= keys.len();
                }
                Task::Steps(mut step) => {
                    let again = unless_panics(&mut step).unwrap_or(false);
                    let mut queue = self.lock();
                    if again {
                        queue.tasks.push_back(Task::Steps(step));
                    }
                }
            }
            self.lock().working -= 1;
            self.changed.notify_all();
        }
    }

    fn walk(&self, walk: &Walk) {
        let _ = unless_panics(|| walk.run(self));
        match &walk.reply {
            Some(reply) => {
                self.lock().waiting -= walk.keys.len();
                reply.set(|state| state.done = true);
            }
            None => {
                self.pending.end(walk.table.as_ptr(), &walk.keys);
                self.lock().inserting -= walk.keys.len();
            }
        }
    }
}

/// Which keys are on their way. Whoever looks up asks this of thousands of keys, so there is no lock, and no place for more
/// keys than can be queued: now and then one takes the place of another, which is then fetched twice if it is asked for
/// again.
struct Pending(Box<[AtomicU64]>);

impl Pending {
    fn new(most: usize) -> Self {
        let zeros = Box::<[AtomicU64]>::new_zeroed_slice(most.next_power_of_two());
        // SAFETY: zero is a number as any other. What is never touched takes no memory this way.
        Self(unsafe { zeros.assume_init() })
    }

    /// Marks a key as on its way, and says whether that is news.
    fn begin(&self, mark: u64) -> bool {
        self.place(mark).swap(mark, Ordering::Relaxed) != mark
    }

    fn end(&self, table: *const Table, keys: &[i64]) {
        for mark in keys.iter().map(|&key| mark(table, key)) {
            let _ = self.place(mark).compare_exchange(mark, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn place(&self, mark: u64) -> &AtomicU64 {
        &self.0[mark as usize & (self.0.len() - 1)]
    }
}

/// What stands for a key of a table; never 0. Two of the same mark are as good as never on their way at the same time, and
/// if they are, one of them is inserted when it is asked for the next time.
fn mark(table: *const Table, key: i64) -> u64 {
    // Tables lie near one another, and so do keys.
    mix(key, mix(table as i64, 3)) | 1 << 63
}

/// A panic must not end the thread; what it was about is left out.
pub(super) fn unless_panics<T>(work: impl FnOnce() -> T) -> Option<T> {
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    done.inspect_err(|_| log::error!("a panic while embedding rows were fetched or refreshed in the background")).ok()
}

impl Walk {
    fn run(&self, shared: &Shared) {
        let Some(table) = self.table.upgrade() else { return };
        let Some(reply) = &self.reply else {
            table.walk(&self.keys, None, None, &mut |_| ());
            return;
        };
        if reply.lock().left {
            shared.insert(&table, self.keys.clone());
            return;
        }
        let walked = table.walk(&self.keys, Some(reply.floors_until), None, &mut |walked| {
            reply.set(|state| {
                if !state.left {
                    state.walked = Some(walked.clone());
                }
            });
        });
        // No one waits for these any more, but they were asked for.
        let late = |&(place, _): &(usize, &i64)| walked.outcomes[place] == Outcome::Unknown;
        let late: Vec<i64> = self.keys.iter().enumerate().filter(late).map(|(_, &key)| key).collect();
        if !late.is_empty() {
            shared.insert(&table, late);
        }
        reply.set(|state| state.walked = Some(walked));
    }
}

impl Reply {
    fn lock(&self) -> MutexGuard<'_, Replied> {
        self.state.lock()
    }

    fn set(&self, change: impl FnOnce(&mut Replied)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}
