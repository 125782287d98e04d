//! The tables of all models, and what is done for them in the background.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use pagoda_kernels::cuda::may_wait;

use super::cluster::{Nodes, RedisStats};
use super::config::{CacheConfig, EmbeddingConfig, ModelConfig, TableConfig};
use super::later::{Later, unless_panics};
use super::open::{self, Estimate, Origin};
use super::table::Table;
use super::view::EmbeddingTable;
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex, RwLock};

/// The most keys that may wait to be inserted in the background.
const QUEUED_KEYS: usize = 1 << 20;
/// How often tables are looked after: doubtful rows read again, and said how stale they may be.
const TICK: Duration = Duration::from_secs(1);
/// The most threads that insert, if the configuration does not say; never more than half of the cores.
const THREADS: usize = 4;

/// Tables of embedding rows, of any number of models. Any number of threads may use it at the same time; models come and
/// go while others serve.
pub struct Embeddings {
    shared: Arc<Shared>,
    refresher: Option<JoinHandle<()>>,
}

struct Shared {
    /// Without its models: the floors, which all of them share.
    config: EmbeddingConfig,
    nodes: Option<Arc<Nodes>>,
    later: Arc<Later>,
    models: RwLock<HashMap<String, Model>>,
    /// Every table that someone has, also of models that were retired.
    known: Mutex<Vec<Known>>,
    /// Held while a model is added, so that two that share a table do not both open it.
    adding: Mutex<()>,
    /// When all tables were last looked after.
    looked: Mutex<Instant>,
    stop: Mutex<bool>,
    changed: Condvar,
}

/// A model's tables, each with its name.
type Model = Vec<(String, EmbeddingTable)>;

/// A table that is there as long as someone has it.
struct Known {
    config: TableConfig,
    origin: Origin,
    table: Weak<Table>,
    schedule: Option<Schedule>,
}

impl Known {
    fn is_there(&self) -> bool {
        self.table.strong_count() > 0
    }
}

/// When a table's cache is refreshed.
#[derive(Clone, Copy)]
struct Schedule {
    interval: Duration,
    /// How much of it at a time.
    share: f64,
    due: Instant,
}

/// A table to look after, and the share of its cache that is due.
type Due = (Arc<Table>, Option<f64>);

impl Schedule {
    fn new(cache: &CacheConfig) -> Option<Self> {
        let seconds = |seconds: f64| Duration::from_secs_f64(seconds);
        let interval = Some(cache.refresh_interval).filter(|&interval| interval > 0.0).map(seconds)?;
        let first = if cache.refresh_delay > 0.0 { seconds(cache.refresh_delay) } else { interval };
        let share = if cache.refresh_share > 0.0 { cache.refresh_share } else { 1.0 };
        Some(Self { interval, share, due: Instant::now() + first })
    }

    /// The one of two that reads all of the cache again sooner, from when either would have begun.
    fn sooner(self, other: Self) -> Self {
        let pass = |schedule: &Self| schedule.interval.as_secs_f64() / schedule.share;
        let due = self.due.min(other.due);
        Self { due, ..if pass(&self) <= pass(&other) { self } else { other } }
    }
}

impl Embeddings {
    /// Opens the tables of every model of a configuration.
    pub fn open(config: &EmbeddingConfig) -> Result<Self> {
        let threads = config.models.iter().filter_map(|model| model.cache.as_ref()?.insert_threads).max();
        let half = std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        let threads = threads.map_or(half.min(THREADS), |threads| threads as usize);
        let later = Arc::new(Later::new(threads, QUEUED_KEYS)?);
        let shared = Arc::new(Shared {
            config: EmbeddingConfig { models: Vec::new(), ..config.clone() },
            nodes: open::nodes(config)?,
            later,
            models: RwLock::default(),
            known: Mutex::default(),
            adding: Mutex::new(()),
            looked: Mutex::new(Instant::now()),
            stop: Mutex::new(false),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let spawned = Builder::new().name("pagoda-refresh".into()).spawn(move || own.refresh());
        let refresher = spawned
            .map_err(|error| Error::new(Status::Capacity, format!("no thread to refresh tables with: {error}")))?;
        let embeddings = Self { shared, refresher: Some(refresher) };
        for model in &config.models {
            embeddings.add(model)?;
        }
        Ok(embeddings)
    }

    /// As [`Self::open`], with a configuration file.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::open(&EmbeddingConfig::from_file(path)?)
    }

    /// What the tables of a configuration will take, before anything of it is taken: only the headers of the tables are
    /// read.
    pub fn estimate(config: &EmbeddingConfig) -> Result<Vec<Estimate>> {
        open::estimate(config)
    }

    /// Adds a model while others serve. A table that another model has already, the same name and file, is shared, unless the
    /// file was replaced meanwhile: then it is opened anew. Where a table file on disk would have to be built anew for that,
    /// which someone still writes to, it is `BUSY`, as it is where the source is changed while that is built.
    pub fn add(&self, model: &ModelConfig) -> Result<()> {
        let _one = self.shared.adding.lock();
        if self.shared.models().contains_key(&model.name) {
            let message = format!("there is a model {} already: retire it first", model.name);
            return Err(Error::invalid("model", message));
        }
        let mut tables = Model::with_capacity(model.tables.len());
        for table in &model.tables {
            // However its path is spelt, it is the same.
            let path = std::fs::canonicalize(&table.path).unwrap_or_else(|_| table.path.clone());
            let table = TableConfig { path, ..table.clone() };
            let opened = match self.shared.same(&table)? {
                Some(shared) => shared,
                None => self.open_table(model, &table)?,
            };
            let cache = model.cache.as_ref();
            if let Some(schedule) = cache.and_then(Schedule::new) {
                self.shared.schedule(&opened, schedule);
            }
            let view = EmbeddingTable {
                table: opened,
                later: Arc::clone(&self.shared.later),
                default: table.default.as_slice().into(),
                hit_rate_threshold: cache.map_or(1.0, |cache| cache.hit_rate_threshold),
                cached: cache.is_some(),
                devices: model.devices.as_slice().into(),
            };
            tables.push((table.name, view));
        }
        self.shared.models.write().insert(model.name.clone(), tables);
        // The refresher may have to look sooner; whoever holds the lock has not begun to wait.
        drop(self.shared.stop.lock());
        self.shared.changed.notify_all();
        Ok(())
    }

    fn open_table(&self, model: &ModelConfig, table: &TableConfig) -> Result<Arc<Table>> {
        let Shared { config, nodes, later, known, .. } = &*self.shared;
        let (opened, origin) = open::table(config, nodes.as_ref(), model, table).map_err(|error| {
            let held = known.lock().iter().any(|known| known.config.is_same_table(table) && known.is_there());
            if error.status() != Status::Busy || !held {
                return error;
            }
            let (message, path) = (error.message(), table.path.display());
            let hint = format!("{path} was replaced, and someone has the table as it was before");
            let hint = format!("{hint}: close what uses it and retire its models, then add {} again", model.name);
            Error::new(Status::Busy, format!("{message}. {hint}"))
        })?;
        let opened = Arc::new(opened);
        open::fill(config, model, table, &opened, later)?;
        let mut known = known.lock();
        known.retain(Known::is_there);
        known.push(Known { config: table.clone(), origin, table: Arc::downgrade(&opened), schedule: None });
        Ok(opened)
    }

    /// Takes a model out of service. Its tables go when no other model has them and no one holds them any more.
    pub fn retire(&self, model: &str) -> Result<()> {
        let removed = self.shared.models.write().remove(model);
        removed.map(drop).ok_or_else(|| self.no_model(model))
    }

    /// The names of the models, in order.
    pub fn models(&self) -> Vec<String> {
        let mut names: Vec<_> = self.shared.models().keys().cloned().collect();
        names.sort_unstable();
        names
    }

    /// A model's tables, in the order of its configuration.
    pub fn tables(&self, model: &str) -> Result<Vec<EmbeddingTable>> {
        let found = self.shared.models().get(model).map(|tables| tables.iter().map(|(_, view)| view.clone()).collect());
        found.ok_or_else(|| self.no_model(model))
    }

    /// A table by its name: `model/table`, or `table` alone if only one model has one of that name, or all that have share
    /// it.
    pub fn table(&self, name: &str) -> Result<EmbeddingTable> {
        let models = self.shared.models();
        let (model, table) = name.split_once('/').map_or((None, name), |(model, table)| (Some(model), table));
        if let Some(model) = model.filter(|&model| !models.contains_key(model)) {
            drop(models);
            return Err(self.no_model(model).about("table"));
        }
        let chosen = models.iter().filter(|(name, _)| model.is_none_or(|model| model == *name));
        let mut found: Vec<(&str, &EmbeddingTable)> = chosen
            .flat_map(|(model, tables)| tables.iter().map(move |(name, view)| (model.as_str(), name, view)))
            .filter(|(_, name, _)| *name == table)
            .map(|(model, _, view)| (model, view))
            .collect();
        found.sort_unstable_by_key(|(model, _)| *model);
        let Some(&(_, first)) = found.first() else {
            let message = format!("no model has a table {name:?}: see models() and tables()");
            return Err(Error::new(Status::NotFound, message).about("table"));
        };
        if found.iter().any(|(_, view)| !Arc::ptr_eq(&view.table, &first.table)) {
            let names: Vec<String> = found.iter().map(|(model, _)| format!("{model}/{table}")).collect();
            let message = format!("{table:?} could be any of {}: say which", names.join(", "));
            return Err(Error::invalid("table", message));
        }
        Ok(first.clone())
    }

    /// What was counted of the Redis Cluster, if there is one.
    pub fn redis_stats(&self) -> Option<RedisStats> {
        self.shared.nodes.as_ref().map(|nodes| nodes.stats())
    }

    /// Waits until everything that was to be inserted in the background is, or was dropped.
    pub fn wait(&self) {
        let tables: Vec<_> = self.shared.known.lock().iter().filter_map(|known| known.table.upgrade()).collect();
        for device in tables.iter().flat_map(|table| table.devices.live()) {
            device.wait();
        }
        self.shared.later.wait();
    }

    fn no_model(&self, model: &str) -> Error {
        let names = self.models();
        let there = match names.len() {
            0 => "there are none".to_owned(),
            1..=10 => format!("there are {}", names.join(", ")),
            many => format!("there are {many} others, see models()"),
        };
        Error::new(Status::NotFound, format!("there is no model {model:?}; {there}")).about("model")
    }
}

impl Drop for Embeddings {
    fn drop(&mut self) {
        *self.shared.stop.lock() = true;
        self.shared.changed.notify_all();
        if let Some(refresher) = self.refresher.take() {
            debug_assert!(
                may_wait(),
                "tables are closed while captures are held off, which the refresher may wait for"
            );
            // A panic has been reported where it happened.
            let _ = refresher.join();
        }
    }
}

impl Shared {
    fn models(&self) -> crate::sync::RwLockReadGuard<'_, HashMap<String, Model>> {
        self.models.read()
    }

    /// The same table, if someone has it and it would be no other if it were opened now.
    fn same(&self, wanted: &TableConfig) -> Result<Option<Arc<Table>>> {
        let alike = self
            .known
            .lock()
            .iter()
            .filter(|known| known.config.is_same_table(wanted))
            .filter_map(|known| Some((known.table.upgrade()?, known.origin.clone())))
            .collect::<Vec<_>>();
        // Without the lock: whole files may be read for it.
        for (table, origin) in alike {
            if origin.is_current(&self.config, wanted)? {
                return Ok(Some(table));
            }
        }
        Ok(None)
    }

    /// Has a table's cache refreshed as a model wants it, and as those that share it already do.
    fn schedule(&self, table: &Arc<Table>, mut schedule: Schedule) {
        for known in self.known.lock().iter_mut().filter(|known| known.table.as_ptr() == Arc::as_ptr(table)) {
            schedule = known.schedule.map_or(schedule, |other| other.sooner(schedule));
            known.schedule = Some(schedule);
        }
        table.refreshed.lock().interval = Some(schedule.interval);
    }

    /// Refreshes whatever is due, until it is told to stop.
    fn refresh(&self) {
        let mut stop = self.stop.lock();
        while !*stop {
            let (due, next) = self.due();
            let wait = next.saturating_duration_since(Instant::now());
            if due.is_empty() && !wait.is_zero() {
                self.changed.wait_for(&mut stop, wait);
                continue;
            }
            drop(stop);
            for (table, share) in due {
                // One table that panics must not end it for the others.
                let _ = unless_panics(|| {
                    table.settle_doubts();
                    table.bring_back(|| *self.stop.lock());
                    if let Some(share) = share {
                        table.refresh(share, || *self.stop.lock());
                    }
                    table.tell_staleness();
                });
            }
            stop = self.stop.lock();
        }
    }

    /// The tables to look after now, with the share of the cache that is due of each; and when to look again.
    fn due(&self) -> (Vec<Due>, Instant) {
        let now = Instant::now();
        let mut last = self.looked.lock();
        let look = now.duration_since(*last) >= TICK;
        if look {
            *last = now;
        }
        let mut next = *last + TICK;
        let mut due = Vec::new();
        for known in self.known.lock().iter_mut() {
            let Some(table) = known.table.upgrade() else { continue };
            let mut share = None;
            if let Some(schedule) = &mut known.schedule {
                if schedule.due <= now {
                    schedule.due = now + schedule.interval;
                    share = Some(schedule.share);
                }
                next = next.min(schedule.due);
            }
            if look || share.is_some() {
                due.push((table, share));
            }
        }
        (due, next)
    }
}
