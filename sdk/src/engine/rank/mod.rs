//! The ranking engine: a request brings a user's events and candidates and gets scores.

#[cfg(feature = "serde")]
mod as_object;
mod event_log;
mod history;
mod layout;
mod open_model;
mod options;
mod prepared_request;
mod ranker;
mod request;
mod served_model;
mod stats;
mod tables;
mod workspace;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

pub use options::{EngineOptions, GraphShape, TableOptions};
pub use request::{Columns, Events, RankRequest, RankResponse};
pub use stats::{EngineProvider, EngineStats};

use self::prepared_request::PreparedRequest;
use self::ranker::Ranker;
use self::served_model::ModelCloser;
use super::batching::{BatchLimits, Pending, Scheduler, Workers, in_callback};
use super::exec::Shape;
use super::stores;
use crate::embedding::TableStats;
use crate::error::{Error, Result, Status};
use crate::folder::ModelFolder;
use crate::kv::{KvStats, Owner, Owners, TierStats, Tiers};
use crate::runtime::{Model, Provider, Watcher, cancelled};
use crate::store::Ticket;
use crate::sync::Mutex;

/// How many users are forgotten before each wait for the store. Large enough to amortise the wait, small enough that
/// writes of other users are not delayed for long.
const FORGET_CHUNK: usize = 4096;

/// An engine that serves one model folder. Any number of threads may use it at the same time.
///
/// Dropping it answers the waiting requests, and writes the cached keys and values to the store, if there is one. It
/// may be dropped inside one of its own callbacks. Then what that request uses is closed after the callback returns.
pub struct Engine {
    scheduler: Arc<Scheduler<Ranker>>,
    workers: Workers,
    /// Held during a swap: one at a time.
    swapping: Mutex<()>,
    closer: ModelCloser,
}

impl Engine {
    /// Opens a model folder and everything under it, and runs the model once.
    ///
    /// # Errors
    /// As [`ModelFolder::open`], [`Model::open`], and the errors of opening stores, caches and tables. INVALID_ARGUMENT
    /// for invalid options.
    pub fn open(folder: impl AsRef<Path>, options: EngineOptions) -> Result<Self> {
        check(&options)?;
        let folder = ModelFolder::open(folder)?;
        let store = stores::open(options.store.as_ref(), options.host_bytes, &options.model)?;
        let model = ranker::open_and_warm_up(folder, &options, store.as_ref())?;
        let limits = batch_limits(&options);
        let scheduler = Arc::new(Scheduler::new(Ranker::new(options, store, model), limits));
        let workers = scheduler.start("pagoda-rank")?;
        Ok(Self { scheduler, workers, swapping: Mutex::new(()), closer: ModelCloser::default() })
    }

    fn ranker(&self) -> &Ranker {
        &self.scheduler.runner
    }

    /// Answers a request. It runs on the caller's thread if an instance is idle, no request waits, and it has neither a
    /// timeout nor a cancel. Otherwise it is queued.
    ///
    /// # Errors
    /// - INVALID_ARGUMENT: the request is invalid.
    /// - NOT_FOUND: the model does not have a feature, or there is a gap: the engine does not know the events before
    ///   `start`. Send the whole history.
    /// - CAPACITY: too many requests wait, or the history is larger than the cache.
    /// - CANCELLED: the request was cancelled, or its timeout is over.
    /// - RUNTIME: the model failed.
    ///
    /// A request that fails does not affect others, and nothing of it is kept. One exception: if it was cancelled or
    /// timed out while it ran in a batch with others, its events may be kept.
    pub fn rank(&self, request: &RankRequest) -> Result<RankResponse> {
        let pending = self.new_pending(request, false)?;
        if let Err(error) = self.scheduler.run_or_queue(&pending) {
            pending.end(Err(error));
        }
        pending.wait()
    }

    /// Answers a request asynchronously. `done` is called once, on a worker thread of the engine or on the thread that
    /// cancels the request. An invalid request is an error of this function, and `done` is not called. `done` must not
    /// wait for other requests of this engine: they may need the same thread.
    ///
    /// # Errors
    /// As [`Engine::rank`]. Errors that occur while the request runs go to `done`.
    pub fn rank_async(
        &self,
        request: &RankRequest,
        done: impl FnOnce(Result<RankResponse>) + Send + 'static,
    ) -> Result<()> {
        let pending = self.new_pending(request, true)?;
        pending.set_callback(Box::new(done))?;
        let queued = self.scheduler.deadlines.watch(&pending).and_then(|()| self.scheduler.queue(Arc::clone(&pending)));
        match queued {
            // The error is returned here, so `done` is not called.
            Err(error) if pending.withdraw(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn new_pending(&self, request: &RankRequest, has_callback: bool) -> Result<Arc<Pending<PreparedRequest>>> {
        let check = || match &request.cancel {
            Some(cancel) if cancel.is_triggered() => Err(cancelled()),
            _ => PreparedRequest::new(&self.ranker().current(), request),
        };
        let work = check().inspect_err(|error| self.scheduler.counters.count_failed(error))?;
        let limited = request.timeout.is_some() || request.cancel.is_some();
        let pending = Pending::new(work, request.timeout, limited, has_callback, &self.scheduler.counters);
        if let Some(cancel) = &request.cancel {
            let watcher: Arc<dyn Watcher> = Arc::clone(&pending) as _;
            cancel.watch(Arc::downgrade(&watcher));
        }
        Ok(pending)
    }

    /// Serves another model folder from now on. The new model is opened and warmed up beside the old one. Requests that
    /// arrived earlier end on the old model. No request fails. The new model uses no keys and values of the old one. If
    /// the features differ, the remembered events are dropped, also for requests that arrived earlier. If the swap
    /// fails, nothing changes. A folder with the version that is served already changes nothing.
    ///
    /// # Errors
    /// As [`Engine::open`]. BUSY if another cache on the same store serves that version, or has not closed it yet.
    pub fn swap(&self, folder: impl AsRef<Path>) -> Result<()> {
        let _one = self.swapping.lock();
        let ranker = self.ranker();
        let folder = ModelFolder::open(folder)?;
        if folder.version == ranker.current().folder.version {
            return Ok(());
        }
        let new = ranker::open_and_warm_up(folder, &ranker.options, ranker.store.as_ref())?;
        ranker.events.set_signature(&new.layout.signature);
        log::info!("version {} is served from now on", new.version);
        let old = std::mem::replace(&mut *ranker.model.write(), new);
        self.closer.retire(old);
        Ok(())
    }

    /// Starts to load keys and values of users from host memory and the store into the pool, and returns at once. A
    /// request that comes soon then does not wait for them. Stops if the pool has no more room. Returns how many
    /// histories are being loaded.
    pub fn prefetch(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        match serving.kv.as_ref().filter(|_| serving.caches_kv) {
            Some(kv) => kv.prefetch(Owner::slice(users)),
            None => Ok(0),
        }
    }

    /// Evicts the keys and values of users from the pool to host memory and the store, as an eviction for lack of room
    /// does. Without those tiers they are lost. Returns how many of the users had any in the pool. BUSY if a user has a
    /// request that runs or is being added to a batch.
    pub fn unload(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        match serving.kv.as_ref().filter(|_| serving.caches_kv) {
            Some(kv) => kv.evict(Owners::These(Owner::slice(users)), Tiers::RESIDENT),
            None => Ok(0),
        }
    }

    /// Forgets users: their events, and their keys and values of the version that is served now, in memory and in the
    /// store. Keys and values of other versions stay in the store: forget the users again while those versions are
    /// served. Returns how many of the users were known. BUSY if a user has a request that runs or is being added to a
    /// batch. After an error some users may be forgotten: repeat the call.
    pub fn forget(&self, users: &[u64]) -> Result<usize> {
        let serving = self.ranker().current();
        let mut known = 0;
        for users in users.chunks(FORGET_CHUNK) {
            let mut tickets = Vec::new();
            let forgotten = users.iter().try_for_each(|&user| {
                // Events first: a request could compute the keys and values again from them.
                let remembered = forget_events(&self.scheduler, user)?;
                let cached = serving.forget(user, &mut tickets)?;
                known += usize::from(cached || remembered);
                Ok(())
            });
            // Also after an error: what was forgotten must be durable before this returns.
            let waited = Ticket::wait_all(&tickets);
            forgotten.and(waited)?;
        }
        Ok(known)
    }

    /// Where the model that is served runs.
    pub fn provider(&self) -> EngineProvider {
        let (ranker, model) = (self.ranker(), self.model());
        let provider = model.provider();
        EngineProvider {
            provider,
            device_id: (provider == Provider::Cuda).then_some(ranker.options.model.device_id),
            reason: model.provider_reason().to_owned(),
        }
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
        self.ranker().current().caches_kv
    }

    /// The counters of the engine.
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

    /// How full the tiers under the KV cache are, host memory before the store.
    pub fn tiers(&self) -> Vec<TierStats> {
        self.ranker().store.as_ref().map_or_else(Vec::new, |store| store.tiers())
    }

    /// The statistics of the KV cache, if there is one. They restart with a swap.
    pub fn kv_stats(&self) -> Option<KvStats> {
        let serving = self.ranker().current();
        serving.kv.as_ref().filter(|_| serving.caches_kv).map(|kv| kv.stats())
    }

    /// The names of the embedding tables that have statistics. Empty if the tables are in the graph.
    pub fn tables(&self) -> Vec<String> {
        self.all_table_stats().into_iter().map(|(name, _)| name).collect()
    }

    /// The statistics of an embedding table, by its name in pagoda.json. They restart with a swap.
    ///
    /// # Errors
    /// NOT_FOUND for an unknown table, and for one that is part of the graph.
    pub fn table_stats(&self, table: &str) -> Result<TableStats> {
        let all = self.all_table_stats();
        let found = all.iter().find(|(name, _)| name == table).map(|(_, stats)| *stats);
        found.ok_or_else(|| no_table(table, &all))
    }

    fn all_table_stats(&self) -> Vec<(String, TableStats)> {
        self.ranker().current().tables.as_ref().map_or_else(Vec::new, |tables| tables.stats())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.scheduler.stop();
        self.workers.join();
        // Inside a callback this thread can not wait. It may have more requests to answer after the callback, whose
        // deadlines hold. The request of the callback may also hold the last reference to a retired model.
        if in_callback() {
            self.closer.detach();
            self.scheduler.deadlines.end_when_empty();
            return;
        }
        self.closer.join();
        self.scheduler.deadlines.stop();
    }
}

fn no_table(asked: &str, all: &[(String, TableStats)]) -> Error {
    let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    let message = match names[..] {
        [] => format!("{asked:?}, where this model has its tables in the graph"),
        _ => format!("the model has no table {asked:?}; its tables are {}", names.join(", ")),
    };
    Error::new(Status::NotFound, message).about("table")
}

/// Forgets the events of a user. Returns whether there were any. Meanwhile no worker can take a request of that user,
/// which would record the events again.
fn forget_events(scheduler: &Scheduler<Ranker>, user: u64) -> Result<bool> {
    let forgotten = scheduler.with_idle_key(user, || scheduler.runner.events.forget(user));
    forgotten.ok_or_else(|| {
        let message =
            format!("user {user} has a request that runs or is being added to a batch: try again after it has ended");
        Error::new(Status::Busy, message)
    })
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
        return Err(Error::invalid(*name, "0 would admit no request; expected 1 or more"));
    }
    if options.model.tables.is_some() {
        return Err(Error::invalid("options.model.tables", "the model folder has the tables: leave this unset"));
    }
    Shape::check_all(&open_model::shapes(options))?;
    Ok(())
}
