//! The ranking engine: requests bring a user's events and candidates and get scores.

mod event_log;
mod history;
mod layout;
mod open_model;
mod options;
mod prepared_request;
mod ranker;
mod request;
mod stats;
mod tables;
mod workspace;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

pub use options::{EngineOptions, EngineStore, GraphShape, TableOptions};
pub use request::{Columns, Events, RankRequest, RankResponse};
pub use stats::EngineStats;

use pagoda_kernels::cuda::Gpu;

use self::open_model::OpenModel;
use self::prepared_request::PreparedRequest;
use self::ranker::Ranker;
use super::batching::{BatchLimits, Pending, Scheduler, Workers, in_callback};
use super::exec::Shape;
use crate::config::Provider;
use crate::embedding::TableStats;
use crate::error::{Error, Result, Status};
use crate::folder::ModelFolder;
use crate::kv::{KvStats, Tiers, Users};
use crate::runtime::{Model, Watcher, cancelled};
use crate::store::{DiskStore, HostStore, Store, Ticket};
use crate::sync::Mutex;

/// How many users are forgotten before the store is waited for: enough that the waiting does not show, and few enough
/// that others' tokens do not wait behind them for long.
const FORGOTTEN_TOGETHER: usize = 4096;

/// A model folder that is served. Any number of threads may use an engine at the same time.
///
/// Dropping it answers the queued requests, and writes the pool to the store if there is one. It may be dropped in a
/// callback of its own; what that request uses is then closed after the callback returns.
pub struct Engine {
    scheduler: Arc<Scheduler<Ranker>>,
    workers: Workers,
    /// Held while a model is swapped: one after the other.
    swapping: Mutex<()>,
    /// Those that let go of models that are not served any more.
    retiring: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    /// Opens a model folder and everything under it, and runs the model once.
    ///
    /// # Errors
    /// As [`ModelFolder::open`], [`Model::open`] and what opens stores, caches and tables; INVALID_ARGUMENT for options
    /// that can not be.
    pub fn open(folder: impl AsRef<Path>, options: EngineOptions) -> Result<Self> {
        check(&options)?;
        let folder = ModelFolder::open(folder)?;
        let store = options.store.as_ref().map(|store| -> Result<_> {
            let opened = DiskStore::open(&store.path, &store.options)?;
            Ok(Arc::new(opened) as Arc<dyn Store>)
        });
        let store = above(store.transpose()?, &options)?;
        let model = ranker::open(folder, &options, store.as_ref())?;
        let limits = batch_limits(&options);
        let scheduler = Arc::new(Scheduler::new(Ranker::new(options, store, model), limits));
        let workers = scheduler.start("pagoda-rank")?;
        Ok(Self { scheduler, workers, swapping: Mutex::new(()), retiring: Mutex::new(Vec::new()) })
    }

    fn ranker(&self) -> &Ranker {
        &self.scheduler.runner
    }

    /// Answers a request. Runs on the caller's thread if no other request is in the way and nothing can end it early;
    /// otherwise waits for its turn.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for what can not be asked, NOT_FOUND for features that the model does not have and for a gap:
    /// the events before `start` are not known here, so send the whole history. CAPACITY when too many requests wait or
    /// the history is larger than the cache, CANCELLED when it was cancelled or its time is over, RUNTIME when the
    /// model fails. Whatever fails, fails alone, and leaves nothing of itself behind; only what was cancelled or out of
    /// time while it ran with others may be kept.
    pub fn rank(&self, request: &RankRequest) -> Result<RankResponse> {
        let pending = self.pending(request, false)?;
        if let Err(error) = self.scheduler.run_or_queue(&pending) {
            pending.end(Err(error));
        }
        pending.wait()
    }

    /// Answers a request on another thread and calls `done` there, once: one of the engine's, or the one that cancels
    /// it. What is wrong with the request itself is said at once, and `done` is then not called. `done` must not wait
    /// for other requests of this engine, which may be answered on the same thread.
    ///
    /// # Errors
    /// As [`Engine::rank`]; those that are found while it runs go to `done`.
    pub fn rank_async(
        &self,
        request: &RankRequest,
        done: impl FnOnce(Result<RankResponse>) + Send + 'static,
    ) -> Result<()> {
        let pending = self.pending(request, true)?;
        pending.call(Box::new(done))?;
        let queued = self.scheduler.deadlines.watch(&pending).and_then(|()| self.scheduler.queue(Arc::clone(&pending)));
        match queued {
            // It is said here, so not there.
            Err(error) if pending.withdraw(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn pending(&self, request: &RankRequest, calls_back: bool) -> Result<Arc<Pending<PreparedRequest>>> {
        let check = || match &request.cancel {
            Some(cancel) if cancel.is_triggered() => Err(cancelled()),
            _ => PreparedRequest::new(&self.ranker().current(), request),
        };
        let work = check().inspect_err(|error| self.scheduler.counters.failed(error))?;
        let limited = request.timeout.is_some() || request.cancel.is_some();
        let pending = Pending::new(work, request.timeout, limited, calls_back, &self.scheduler.counters);
        if let Some(cancel) = &request.cancel {
            let watcher: Arc<dyn Watcher> = Arc::clone(&pending) as _;
            cancel.watch(Arc::downgrade(&watcher));
        }
        Ok(pending)
    }

    /// Serves another model folder from now on. It is opened and run once beside the old one; requests that came before
    /// end on that, no request fails, and nothing that the old model computed is used for the new one. If the features
    /// are others, what is remembered of events is forgotten, also for requests that came before. If it fails, all
    /// stays as it was. A folder of the version that is served already changes nothing.
    ///
    /// # Errors
    /// As [`Engine::open`]. BUSY if that version is served already by another cache of the same store, or was a moment
    /// ago.
    pub fn swap(&self, folder: impl AsRef<Path>) -> Result<()> {
        let _one = self.swapping.lock();
        let ranker = self.ranker();
        let folder = ModelFolder::open(folder)?;
        if folder.version == ranker.current().folder.version {
            return Ok(());
        }
        let new = ranker::open(folder, &ranker.options, ranker.store.as_ref())?;
        ranker.events.expect(&new.layout.signature);
        log::info!("version {} is served from now on", new.version);
        let old = std::mem::replace(&mut *ranker.model.write(), new);
        self.retire(old);
        Ok(())
    }

    /// Lets go of a model when its last request has ended, on a thread of its own: closing its cache may take a while.
    fn retire(&self, old: Arc<OpenModel>) {
        let wait = move || {
            while Arc::strong_count(&old) > 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let mut retiring = self.retiring.lock();
        retiring.retain(|thread| !thread.is_finished());
        match Builder::new().name("pagoda-retire".into()).spawn(wait) {
            Ok(thread) => retiring.push(thread),
            // Then whoever has it last closes it.
            Err(error) => log::warn!("no thread to close the old model on: {error}"),
        }
    }

    /// Starts to load keys and values of users from host memory and the store into the pool, and returns at once, so
    /// that a request that comes soon need not wait for them. Stops where the pool has no more room. Returns how many
    /// histories are being loaded.
    pub fn prefetch(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        match serving.kv.as_ref().filter(|_| serving.keeps) {
            Some(kv) => kv.prefetch(users),
            None => Ok(0),
        }
    }

    /// Evicts keys and values of users from the pool to host memory and the store, as an eviction for other users does;
    /// without either they are gone. Returns how many users had any in the pool. A user whose request runs or is being
    /// put into a batch is an error (BUSY).
    pub fn unload(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        match serving.kv.as_ref().filter(|_| serving.keeps) {
            Some(kv) => kv.evict(Users::These(users), Tiers::RESIDENT),
            None => Ok(0),
        }
    }

    /// Forgets users: their events, and their keys and values in the version that is served now, also those in the
    /// store. What another version left in the store is found when that is served again: forget them there too. Says
    /// how many were known. A user who has a request that runs now, or is just being put into a batch, is an error
    /// (BUSY). After an error some of it may be forgotten: repeat the call.
    pub fn forget(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        let mut known = 0;
        for users in users.chunks(FORGOTTEN_TOGETHER) {
            let mut tickets = Vec::new();
            let forgotten = users.iter().try_for_each(|&user| {
                // Before keys and values, which a request could otherwise make anew of them.
                let remembered = forget_events(&self.scheduler, user)?;
                let cached = serving.forget(user, &mut tickets)?;
                known += usize::from(cached || remembered);
                Ok(())
            });
            // Also after an error: whoever is gone is so for good when anyone hears of it.
            let waited = Ticket::wait_all(&tickets);
            forgotten.and(waited)?;
        }
        Ok(known)
    }

    /// The GPU that the model runs on; `None` on the CPU.
    pub fn device(&self) -> Option<u32> {
        let ranker = self.ranker();
        (ranker.current().model.provider() == Provider::Cuda).then_some(ranker.options.model.device_id)
    }

    /// The model folder that is served.
    pub fn folder(&self) -> Arc<ModelFolder> {
        Arc::clone(&self.ranker().current().folder)
    }

    /// The model that is served.
    pub fn model(&self) -> Arc<Model> {
        Arc::clone(&self.ranker().current().model)
    }

    /// Whether keys and values are cached.
    pub fn is_caching(&self) -> bool {
        self.ranker().current().keeps
    }

    /// The state and the counters of the engine.
    pub fn stats(&self) -> EngineStats {
        let (answered, failed, batches) = self.scheduler.counters.totals();
        let (cached_rows, computed_rows) = self.ranker().rows.totals();
        let (remembered_users, remembered_bytes) = self.ranker().events.size();
        EngineStats {
            answered,
            failed,
            batches,
            cached_rows,
            computed_rows,
            waiting: self.scheduler.waiting() as u64,
            remembered_users,
            remembered_bytes,
        }
    }

    /// The statistics of the cache of keys and values, if there is one. A swap starts a new cache.
    pub fn kv_stats(&self) -> Option<KvStats> {
        let serving = self.ranker().current();
        serving.kv.as_ref().filter(|_| serving.keeps).map(|kv| kv.stats())
    }

    /// The name and the statistics of each embedding table; none if the tables are in the graph. A swap opens new
    /// tables.
    pub fn table_stats(&self) -> Vec<(String, TableStats)> {
        self.ranker().current().tables.as_ref().map_or_else(Vec::new, |tables| tables.stats())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.scheduler.stop();
        let retiring = std::mem::take(&mut *self.retiring.lock());
        self.workers.join();
        // In a callback requests may still wait, which the thread that called it answers after it: their deadlines hold.
        // And its request may have an old model until this returns: that is closed without us.
        if in_callback() {
            self.scheduler.deadlines.let_end();
            return;
        }
        for thread in retiring {
            // A panic has been reported where it happened.
            let _ = thread.join();
        }
        self.scheduler.deadlines.stop();
    }
}

/// Forgets the events of a user, and says whether there were any: while no worker can take a request of that user,
/// which would note again what it has found.
fn forget_events(scheduler: &Scheduler<Ranker>, user: u64) -> Result<bool> {
    let forgotten = scheduler.unless_taken(user, || scheduler.runner.events.forget(user));
    forgotten.ok_or_else(|| {
        let message =
            format!("user {user} has a request that runs, or is being put into a batch: forget it after that");
        Error::new(Status::Busy, message)
    })
}

/// The host's memory above the store, if there is to be any.
fn above(store: Option<Arc<dyn Store>>, options: &EngineOptions) -> Result<Option<Arc<dyn Store>>> {
    if options.host_bytes == 0 {
        return Ok(store);
    }
    let gpu = match options.model.provider {
        Provider::Cpu => None,
        Provider::Cuda => Some(Gpu::shared(options.model.device_id as usize)?),
        Provider::Auto => Gpu::shared(options.model.device_id as usize).ok(),
    };
    let host = HostStore::new(options.host_bytes, gpu, store).map_err(|error| match error.argument() {
        Some("bytes") => error.about("options.host_bytes"),
        _ => error,
    })?;
    Ok(Some(Arc::new(host)))
}

fn batch_limits(options: &EngineOptions) -> BatchLimits {
    BatchLimits {
        instances: options.instances,
        max_batch: options.max_batch,
        max_rows: options.max_batch_rows,
        max_delay: options.max_delay,
        queue: options.queue,
        sleep_when_idle: options.model.sleep_when_idle,
    }
}

fn check(options: &EngineOptions) -> Result<()> {
    const MOST_INSTANCES: u32 = 256;
    if options.instances == 0 || options.instances > MOST_INSTANCES {
        let message = format!("{} is not between 1 and {MOST_INSTANCES}", options.instances);
        return Err(Error::invalid("options.instances", message));
    }
    let numbers = [
        ("options.max_batch", options.max_batch),
        ("options.max_batch_rows", options.max_batch_rows),
        ("options.queue", options.queue),
    ];
    if let Some((name, _)) = numbers.iter().find(|(_, number)| *number == 0) {
        return Err(Error::invalid(*name, "0 would let no request through; 1 or more"));
    }
    if options.model.tables.is_some() {
        return Err(Error::invalid("options.model.tables", "the tables are those of the model folder: leave it out"));
    }
    Shape::check_all(&open_model::shapes(options))?;
    Ok(())
}
