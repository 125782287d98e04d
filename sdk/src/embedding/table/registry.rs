//! The registry of all open models and their tables, and the thread that refreshes the tables.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use pagoda_kernels::cuda::may_wait;

use super::Table;
use super::open_table::{self, Estimate, Origin};
use super::table_handle::EmbeddingTable;
use crate::embedding::config::PsJson;
use crate::embedding::lookup::background_fetch::BackgroundFetch;
use crate::embedding::options::{CacheOptions, EmbeddingOptions, ModelTables, NameOptions, TableSpec};
use crate::embedding::panic_guard::catch_panic;
use crate::embedding::tiers::redis::{Cluster, RedisStats};
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex, RwLock, RwLockReadGuard, Worker};

/// The most keys in the queue of background fetches.
const QUEUED_KEYS: usize = 1 << 20;
/// How often the refresher visits every table: it reads unverified rows again and publishes the staleness.
const TICK: Duration = Duration::from_secs(1);
/// The most threads of background fetches, unless the options name a number. At most half of the cores.
const THREADS: usize = 4;

/// The embedding tables of any number of models. Any number of threads may use it at the same time. Models can be added
/// and retired while others serve.
pub struct Embeddings {
    shared: Arc<Shared>,
    /// Dropped after `shared.stop` is set: dropping a worker waits for its end.
    refresher: Option<Worker>,
}

struct Shared {
    /// The options of the tiers, which all models share. The list of models is empty.
    options: EmbeddingOptions,
    name_options: NameOptions,
    cluster: Option<Arc<Cluster>>,
    background: Arc<BackgroundFetch>,
    models: RwLock<HashMap<String, Model>>,
    /// Every open table. Handles keep tables of retired models open.
    open: Mutex<Vec<OpenTable>>,
    /// Held while a model is added, so that two models that share a table do not both open it.
    adding: Mutex<()>,
    /// When the refresher last visited every table.
    visited: Mutex<Instant>,
    stop: Mutex<bool>,
    changed: Condvar,
}

/// The tables of a model with their names.
type Model = Vec<(String, EmbeddingTable)>;

/// A table that is open as long as a model or a handle refers to it.
struct OpenTable {
    spec: TableSpec,
    origin: Origin,
    table: Weak<Table>,
    schedule: Option<Schedule>,
}

impl OpenTable {
    fn is_open(&self) -> bool {
        self.table.strong_count() > 0
    }
}

/// When a table's cache is refreshed.
#[derive(Clone, Copy)]
struct Schedule {
    interval: Duration,
    /// The share of the cache that one refresh reads.
    share: f64,
    due: Instant,
}

/// A table to visit, and the share of its cache to refresh.
type Due = (Arc<Table>, Option<f64>);

impl Schedule {
    fn new(cache: &CacheOptions) -> Option<Self> {
        let interval = Some(cache.refresh_interval).filter(|interval| !interval.is_zero())?;
        let first = if cache.refresh_delay.is_zero() { interval } else { cache.refresh_delay };
        let share = if cache.refresh_share > 0.0 { cache.refresh_share } else { 1.0 };
        Some(Self { interval, share, due: Instant::now() + first })
    }

    /// The schedule of two that completes a pass sooner, with the earlier first refresh.
    fn sooner(self, other: Self) -> Self {
        let pass = |schedule: &Self| schedule.interval.as_secs_f64() / schedule.share;
        let due = self.due.min(other.due);
        Self { due, ..if pass(&self) <= pass(&other) { self } else { other } }
    }
}

impl Embeddings {
    /// Opens the tables of all models. Errors name the fields of the options.
    pub fn open(options: &EmbeddingOptions) -> Result<Self> {
        Self::open_named(options, |error| error)
    }

    /// As [`Self::open`], with the options of a configuration in the format of HugeCTR's ps.json. Errors name its keys,
    /// also those of later calls.
    pub fn open_ps_json(config: &PsJson) -> Result<Self> {
        Self::open_named(&config.options, PsJson::name_keys).map_err(PsJson::name_keys)
    }

    fn open_named(options: &EmbeddingOptions, name_options: NameOptions) -> Result<Self> {
        let threads = options.models.iter().filter_map(|model| model.cache.as_ref()?.fetch_threads).max();
        let half = std::thread::available_parallelism().map_or(1, |cores| cores.get().div_ceil(2));
        let threads = threads.map_or(half.min(THREADS), |threads| threads as usize);
        let background = Arc::new(BackgroundFetch::new(threads, QUEUED_KEYS)?);
        let shared = Arc::new(Shared {
            options: EmbeddingOptions { models: Vec::new(), ..options.clone() },
            name_options,
            cluster: open_table::open_cluster(&options.tiers)?,
            background,
            models: RwLock::default(),
            open: Mutex::default(),
            adding: Mutex::new(()),
            visited: Mutex::new(Instant::now()),
            stop: Mutex::new(false),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let refresher = Worker::spawn("pagoda-refresh", "refresh tables with", move || own.refresh())?;
        let embeddings = Self { shared, refresher: Some(refresher) };
        for model in &options.models {
            embeddings.add(model)?;
        }
        Ok(embeddings)
    }

    /// Opens the tables of a configuration file in the format of HugeCTR's ps.json.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_ps_json(&PsJson::from_file(path)?)
    }

    /// Estimates the size of the tables of all models. It reads the headers of the tables and allocates nothing.
    pub fn estimate(options: &EmbeddingOptions) -> Result<Vec<Estimate>> {
        open_table::estimate(options)
    }

    /// Adds a model while others serve. A table with the name and the file of an open table is shared. If the file was
    /// replaced since, the table is opened again.
    ///
    /// # Errors
    /// `BUSY` if the table file on disk must be rebuilt for that while another handle writes to it, or if the source
    /// changes during the build.
    pub fn add(&self, model: &ModelTables) -> Result<()> {
        self.add_model(model).map_err(self.shared.name_options)
    }

    fn add_model(&self, model: &ModelTables) -> Result<()> {
        model.check()?;
        let _adding = self.shared.adding.lock();
        if self.shared.models().contains_key(&model.name) {
            let message = format!("there is a model {} already: retire it first", model.name);
            return Err(Error::invalid("model", message));
        }
        let mut tables = Model::with_capacity(model.tables.len());
        for table in &model.tables {
            // Different spellings of a path name the same table.
            let path = std::fs::canonicalize(&table.path).unwrap_or_else(|_| table.path.clone());
            let table = TableSpec { path, ..table.clone() };
            let opened = match self.shared.shared_table(&table)? {
                Some(shared) => shared,
                None => self.open_table(model, &table)?,
            };
            let cache = model.cache.as_ref();
            if let Some(schedule) = cache.and_then(Schedule::new) {
                self.shared.schedule(&opened, schedule);
            }
            let handle = EmbeddingTable {
                table: opened,
                background: Arc::clone(&self.shared.background),
                default: table.default_row.as_slice().into(),
                hit_rate_threshold: cache.map_or(1.0, |cache| cache.hit_rate_threshold),
                cached: cache.is_some(),
                devices: model.devices.as_slice().into(),
                name_options: self.shared.name_options,
            };
            tables.push((table.name, handle));
        }
        self.shared.models.write().insert(model.name.clone(), tables);
        // Wakes the refresher: the next refresh may be due sooner. Without the lock it could miss this before it waits.
        drop(self.shared.stop.lock());
        self.shared.changed.notify_all();
        Ok(())
    }

    fn open_table(&self, model: &ModelTables, table: &TableSpec) -> Result<Arc<Table>> {
        let Shared { options, cluster, background, open, .. } = &*self.shared;
        let (opened, origin) = open_table::open(options, cluster.as_ref(), model, table).map_err(|error| {
            let held = open.lock().iter().any(|other| other.spec.is_same_table(table) && other.is_open());
            if error.status() != Status::Busy || !held {
                return error;
            }
            let (message, path) = (error.message(), table.path.display());
            let hint = format!("{path} was replaced, and the table as it was before is still in use");
            let hint = format!("{hint}: close what uses it and retire its models, then add {} again", model.name);
            Error::new(Status::Busy, format!("{message}. {hint}"))
        })?;
        let opened = Arc::new(opened);
        open_table::fill(options, model, table, &opened, background)?;
        let mut open = open.lock();
        open.retain(OpenTable::is_open);
        open.push(OpenTable { spec: table.clone(), origin, table: Arc::downgrade(&opened), schedule: None });
        Ok(opened)
    }

    /// Takes a model out of service. A table is closed when no model and no handle refers to it any more.
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

    /// The tables of a model, in the order of its options.
    pub fn tables(&self, model: &str) -> Result<Vec<EmbeddingTable>> {
        let found =
            self.shared.models().get(model).map(|tables| tables.iter().map(|(_, handle)| handle.clone()).collect());
        found.ok_or_else(|| self.no_model(model))
    }

    /// A table by its name: `model/table`, or `table` alone if that names one table only.
    pub fn table(&self, name: &str) -> Result<EmbeddingTable> {
        let models = self.shared.models();
        let (model, table) = name.split_once('/').map_or((None, name), |(model, table)| (Some(model), table));
        if let Some(model) = model.filter(|&model| !models.contains_key(model)) {
            drop(models);
            return Err(self.no_model(model).about("table"));
        }
        let chosen = models.iter().filter(|(name, _)| model.is_none_or(|model| model == *name));
        let mut found: Vec<(&str, &EmbeddingTable)> = chosen
            .flat_map(|(model, tables)| tables.iter().map(move |(name, handle)| (model.as_str(), name, handle)))
            .filter(|(_, name, _)| *name == table)
            .map(|(model, _, handle)| (model, handle))
            .collect();
        found.sort_unstable_by_key(|(model, _)| *model);
        let Some(&(_, first)) = found.first() else {
            let message = format!("no model has a table {name:?}: see models() and tables()");
            return Err(Error::new(Status::NotFound, message).about("table"));
        };
        if found.iter().any(|(_, handle)| !Arc::ptr_eq(&handle.table, &first.table)) {
            let names: Vec<String> = found.iter().map(|(model, _)| format!("{model}/{table}")).collect();
            let message = format!("{table:?} could be any of {}: say which", names.join(", "));
            return Err(Error::invalid("table", message));
        }
        Ok(first.clone())
    }

    /// The counts of the Redis Cluster, if there is one.
    pub fn redis_stats(&self) -> Option<RedisStats> {
        self.shared.cluster.as_ref().map(|cluster| cluster.stats())
    }

    /// Waits until all background fetches are done.
    pub fn wait(&self) {
        let tables: Vec<_> = self.shared.open.lock().iter().filter_map(|open| open.table.upgrade()).collect();
        for device in tables.iter().flat_map(|table| table.devices.live()) {
            device.wait();
        }
        self.shared.background.wait();
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
        debug_assert!(may_wait(), "tables are closed while captures are held off, which the refresher may wait for");
        self.refresher = None;
    }
}

impl Shared {
    fn models(&self) -> RwLockReadGuard<'_, HashMap<String, Model>> {
        self.models.read()
    }

    /// The open table that `wanted` names, if its source has not changed since.
    fn shared_table(&self, wanted: &TableSpec) -> Result<Option<Arc<Table>>> {
        let alike = self
            .open
            .lock()
            .iter()
            .filter(|open| open.spec.is_same_table(wanted))
            .filter_map(|open| Some((open.table.upgrade()?, open.origin.clone())))
            .collect::<Vec<_>>();
        // Without the lock: the check may read whole files.
        for (table, origin) in alike {
            if origin.is_current(&self.options.tiers, wanted)? {
                return Ok(Some(table));
            }
        }
        Ok(None)
    }

    /// Schedules the refreshes of a table so that they satisfy a model and all models that share the table.
    fn schedule(&self, table: &Arc<Table>, mut schedule: Schedule) {
        for open in self.open.lock().iter_mut().filter(|open| open.table.as_ptr() == Arc::as_ptr(table)) {
            schedule = open.schedule.map_or(schedule, |other| other.sooner(schedule));
            open.schedule = Some(schedule);
        }
        table.refresh.lock().interval = Some(schedule.interval);
    }

    /// The loop of the refresher thread.
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
                // A panic of one table must not end the refreshes of the others.
                let _ = catch_panic(|| {
                    table.verify_keys();
                    table.restore_lost_updates(|| *self.stop.lock());
                    if let Some(share) = share {
                        table.refresh_share(share, || *self.stop.lock());
                    }
                    table.publish_metrics();
                });
            }
            stop = self.stop.lock();
        }
    }

    /// The tables to visit now, with the share of the cache to refresh of each; and the time of the next visit.
    fn due(&self) -> (Vec<Due>, Instant) {
        let now = Instant::now();
        let mut last = self.visited.lock();
        let visit = now.duration_since(*last) >= TICK;
        if visit {
            *last = now;
        }
        let mut next = *last + TICK;
        let mut due = Vec::new();
        for open in self.open.lock().iter_mut() {
            let Some(table) = open.table.upgrade() else { continue };
            let mut share = None;
            if let Some(schedule) = &mut open.schedule {
                if schedule.due <= now {
                    schedule.due = now + schedule.interval;
                    share = Some(schedule.share);
                }
                next = next.min(schedule.due);
            }
            if visit || share.is_some() {
                due.push((table, share));
            }
        }
        (due, next)
    }
}
