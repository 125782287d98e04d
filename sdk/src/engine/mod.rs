//! The ranking engine: a model folder, served. Requests bring a user's events and candidates and get scores; what was
//! computed of a history is kept, and requests that come at the same time run together. `sdk/docs/engine.md` says what
//! it promises.
//!
//! ```no_run
//! use pagoda::engine::{Columns, Engine, EngineOptions, Events, RankRequest};
//!
//! let engine = Engine::open("model", EngineOptions::default())?;
//! let events = Columns::new().with("movie", [17, 4]).with("rating", [5, 3]);
//! let response = engine.rank(&RankRequest {
//!     user: 7,
//!     events: Events { keys: events, times: Vec::new() },
//!     candidates: Columns::new().with("movie", [8, 15, 16]),
//!     ..RankRequest::default()
//! })?;
//! println!("{:?}", response.of_candidate(0));
//! # Ok::<(), pagoda::Error>(())
//! ```

mod batch;
mod clock;
mod core;
mod folder;
mod graphs;
mod history;
mod inputs;
mod layout;
mod options;
mod pending;
mod queue;
mod remembered;
mod request;
mod serving;
mod stats;
mod tables;
mod work;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

pub use folder::{
    Feature, FolderFile, FolderTable, Inputs, KvLayout, Limits, Lookup, ModelFolder, Outputs, Positions, Sequence,
    SourceOf, Task, Times,
};
pub use options::{EngineOptions, EngineStore, GraphShape, TableOptions};
pub use request::{Columns, Events, RankRequest, RankResponse};
pub use stats::EngineStats;

use pagoda_kernels::cuda::Gpu;

use self::core::Core;
use self::pending::{Pending, in_callback};
use self::serving::Serving;
use self::work::Work;
use crate::config::Provider;
use crate::embedding::TableStats;
use crate::error::{Error, Result, Status};
use crate::kv::{KvStats, Tiers, Users};
use crate::runtime::{Model, Watcher, cancelled};
use crate::store::{DiskStore, HostStore, Store, Ticket};

/// How many users are forgotten before the store is waited for: enough that the waiting does not show, and few enough that
/// others' tokens do not wait behind them for long.
const FORGOTTEN_TOGETHER: usize = 4096;

/// A model folder that is being served. Any number of threads may use one at the same time.
///
/// Dropping it answers the requests that wait, and stores what is cached if there is a store. It may be dropped in a
/// callback of its own; then what that request uses is closed after the callback returns.
pub struct Engine {
    core: Arc<Core>,
    workers: Vec<JoinHandle<()>>,
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
        let serving = Serving::open(folder, &options, store.as_ref())?;
        let core = Arc::new(Core::new(options, store, serving));
        let mut engine = Self { core, workers: Vec::new(), swapping: Mutex::new(()), retiring: Mutex::new(Vec::new()) };
        for number in 0..engine.core.options.instances {
            let core = Arc::clone(&engine.core);
            let thread = Builder::new().name(format!("pagoda-rank-{number}")).spawn(move || core.work());
            let no_thread = |error| Error::new(Status::Capacity, format!("no thread to run batches on: {error}"));
            engine.workers.push(thread.map_err(no_thread)?);
        }
        Ok(engine)
    }

    /// Answers a request. Runs on the caller's thread if no other request is in the way and nothing can end it early;
    /// otherwise waits for its turn.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for what can not be asked, NOT_FOUND for features that the model does not have and for a gap: the events before `start` are not known here, so send the whole history. CAPACITY when too many requests
    /// wait or the history is larger than the cache, CANCELLED when it was cancelled or its time is over, RUNTIME when
    /// the model fails. Whatever fails, fails alone, and leaves nothing of itself behind; only what was cancelled or
    /// out of time while it ran with others may be kept.
    pub fn rank(&self, request: &RankRequest) -> Result<RankResponse> {
        let pending = self.pending(request, false)?;
        if let Err(error) = self.core.run_or_queue(&pending) {
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
        let queued = self.core.clock.watch(&pending).and_then(|()| self.core.queue(Arc::clone(&pending)));
        match queued {
            // It is said here, so not there.
            Err(error) if pending.withdraw(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn pending(&self, request: &RankRequest, calls_back: bool) -> Result<Arc<Pending>> {
        let core = &self.core;
        let check = || match &request.cancel {
            Some(cancel) if cancel.is_triggered() => Err(cancelled()),
            _ => Work::new(&core.current(), request),
        };
        let work = check().inspect_err(|error| core.counters.failed(error))?;
        let limited = request.timeout.is_some() || request.cancel.is_some();
        let pending = Pending::new(work, request.timeout, limited, calls_back, &core.counters);
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
        let _one = self.swapping.lock().unwrap_or_else(PoisonError::into_inner);
        let core = &self.core;
        let folder = ModelFolder::open(folder)?;
        if folder.version == core.current().folder.version {
            return Ok(());
        }
        let new = Serving::open(folder, &core.options, core.store.as_ref())?;
        core.remembered.expect(&new.layout.signature);
        log::info!("version {} is served from now on", new.version);
        let old = std::mem::replace(&mut *core.serving.write().unwrap_or_else(PoisonError::into_inner), new);
        self.retire(old);
        Ok(())
    }

    /// Lets go of a model when its last request has ended, on a thread of its own: closing its cache may take a while.
    fn retire(&self, old: Arc<Serving>) {
        let wait = move || {
            while Arc::strong_count(&old) > 1 {
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let mut retiring = self.retiring.lock().unwrap_or_else(PoisonError::into_inner);
        retiring.retain(|thread| !thread.is_finished());
        match Builder::new().name("pagoda-retire".into()).spawn(wait) {
            Ok(thread) => retiring.push(thread),
            // Then whoever has it last closes it.
            Err(error) => log::warn!("no thread to close the old model on: {error}"),
        }
    }

    /// Has keys and values of users leave the pool for the host's memory and the store, as they do when others need the
    /// room; without either they are gone. Says how many had any there. A user who has a request that runs now, or is just
    /// being put into a batch, is an error (BUSY).
    pub fn unload(&self, users: &[u64]) -> Result<usize> {
        let serving = self.core.current();
        match serving.kv.as_ref().filter(|_| serving.keeps) {
            Some(kv) => kv.evict(Users::These(users), Tiers::RESIDENT),
            None => Ok(0),
        }
    }

    /// Forgets users: their events, and their keys and values in the version that is served now, also those in the
    /// store. What another version left in the store is found when that is served again: forget them there too. Says
    /// how many were known. A user who has a request that runs now, or is just being put into a batch, is an error (BUSY).
    /// After an error some of it may be forgotten: repeat the call.
    pub fn forget(&self, users: &[u64]) -> Result<usize> {
        let serving = self.core.current();
        let mut known = 0;
        for users in users.chunks(FORGOTTEN_TOGETHER) {
            let mut tickets = Vec::new();
            let forgotten = users.iter().try_for_each(|&user| {
                // Before keys and values, which a request could otherwise make anew of them.
                let remembered = self.core.forget_events(user)?;
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

    /// The folder that is served now.
    pub fn folder(&self) -> Arc<ModelFolder> {
        Arc::clone(&self.core.current().folder)
    }

    /// The model that runs now.
    pub fn model(&self) -> Arc<Model> {
        Arc::clone(&self.core.current().model)
    }

    /// Whether keys and values are kept.
    pub fn is_caching(&self) -> bool {
        self.core.current().keeps
    }

    /// What the engine did.
    pub fn stats(&self) -> EngineStats {
        self.core.counters.stats(self.core.waiting(), self.core.remembered.size())
    }

    /// What the cache of keys and values has and did, if there is one. A swap begins a new one.
    pub fn kv_stats(&self) -> Option<KvStats> {
        let serving = self.core.current();
        serving.kv.as_ref().filter(|_| serving.keeps).map(|kv| kv.stats())
    }

    /// What each embedding table did, with its name; none if they are in the graph. A swap begins anew.
    pub fn table_stats(&self) -> Vec<(String, TableStats)> {
        self.core.current().tables.as_ref().map_or_else(Vec::new, |tables| tables.stats())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.core.stop();
        let mut retiring = std::mem::take(&mut *self.retiring.lock().unwrap_or_else(PoisonError::into_inner));
        // The request that is answered here may have an old model until this returns: they wait for that without us.
        if in_callback() {
            retiring.clear();
        }
        for thread in self.workers.drain(..).chain(retiring) {
            // Whoever drops it in a callback is on one of them.
            if thread.thread().id() != std::thread::current().id() {
                // A panic has been reported where it happened.
                let _ = thread.join();
            }
        }
        // In a callback requests may still wait, which whoever called it answers after it: their time limits hold.
        if in_callback() {
            self.core.clock.let_end();
        } else {
            self.core.clock.stop();
        }
    }
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
    Ok(())
}
