//! Counters of the whole process, as Prometheus text.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::error::{Error, Status};
use crate::sync::Mutex;

/// Every metric as Prometheus text.
pub fn text() -> String {
    let mut text = String::new();
    encode(&mut text, &METRICS.registry).expect("writing to a String does not fail");
    text
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

struct Metrics {
    registry: Registry,
    runs: Family<RunLabels, Counter>,
    run_seconds: Family<ModelLabels, Histogram>,
    open_models: Gauge,
    live_objects: Family<KindLabels, Gauge>,
    async_queue: Gauge,
    kv_tokens: Family<SourceLabels, Counter>,
    kv_events: Family<KindLabels, Counter>,
    store_written_bytes: Counter,
    store_read_bytes: Counter,
    store_errors: Family<KindLabels, Counter>,
    store_file_bytes: Gauge,
    embedding_lookups: Family<TableLabels, Counter>,
    embedding_keys: Family<TableKindLabels, Counter>,
    embedding_errors: Family<TierLabels, Counter>,
    embedding_stale_seconds: Family<TableLabels, Gauge>,
    embedding_device_rows: Family<TableLabels, Gauge>,
    engine_requests: Family<StatusLabels, Counter>,
    engine_rows: Family<KindLabels, Counter>,
    engine_graph_batches: Family<KindLabels, Counter>,
    engine_batch_requests: Histogram,
    engine_queue_seconds: Histogram,
    generator_answers: Family<KindLabels, Counter>,
    generator_tokens: Family<KindLabels, Counter>,
    generator_preemptions: Counter,
    generator_step_sequences: Histogram,
    generator_step_seconds: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RunLabels {
    model: String,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StatusLabels {
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    source: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TableLabels {
    table: String,
}

impl TableLabels {
    fn of_kind(&self, kind: &'static str) -> TableKindLabels {
        TableKindLabels { table: self.table.clone(), kind }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TableKindLabels {
    table: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: &'static str,
}

impl Metrics {
    fn new() -> Self {
        let mut registry = Registry::with_prefix("pagoda");
        let runs = Family::default();
        registry.register("runs", "Runs of a model, by how they ended", runs.clone());
        // 16 µs to about 8 s: from a one-node graph to a model that reads a whole history.
        let run_seconds: Family<ModelLabels, Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(16e-6, 2.0, 20)));
        registry.register("run_seconds", "Time a run took", run_seconds.clone());
        let open_models = Gauge::default();
        registry.register("open_models", "Models that are open", open_models.clone());
        let live_objects = Family::default();
        registry.register("live_objects", "Handles given out through the C interface", live_objects.clone());
        let async_queue = Gauge::default();
        registry.register("async_queue", "Asynchronous runs waiting for a thread", async_queue.clone());
        let kv_tokens = Family::default();
        registry.register("kv_tokens", "Tokens of prepared histories, by where they came from", kv_tokens.clone());
        let kv_events = Family::default();
        registry.register("kv_events", "What happened to owners in caches of keys and values", kv_events.clone());
        let store_written_bytes = Counter::default();
        registry.register("store_written_bytes", "Bytes that stores wrote", store_written_bytes.clone());
        let store_read_bytes = Counter::default();
        registry.register(
            "store_read_bytes",
            "Bytes of layers read from the files of stores",
            store_read_bytes.clone(),
        );
        let store_errors = Family::default();
        registry.register("store_errors", "What went wrong in stores, by kind", store_errors.clone());
        let store_file_bytes = Gauge::default();
        registry.register("store_file_bytes", "Bytes that the files of the open stores take", store_file_bytes.clone());
        let embedding_lookups = Family::default();
        registry.register("embedding_lookups", "Lookups in embedding tables", embedding_lookups.clone());
        let embedding_keys = Family::default();
        registry.register(
            "embedding_keys",
            "Keys of lookups in embedding tables, by what became of them",
            embedding_keys.clone(),
        );
        let embedding_errors = Family::default();
        registry.register(
            "embedding_errors",
            "Times a tier of an embedding table did not do what it was asked",
            embedding_errors.clone(),
        );
        let embedding_stale_seconds = Family::default();
        registry.register(
            "embedding_stale_seconds",
            "For how long at most the cache of an embedding table may have missed a change, when it was last refreshed",
            embedding_stale_seconds.clone(),
        );
        let embedding_device_rows = Family::default();
        registry.register(
            "embedding_device_rows",
            "Rows of an embedding table in the caches on GPUs",
            embedding_device_rows.clone(),
        );
        let engine_requests = Family::default();
        registry.register("engine_requests", "Requests of ranking engines, by how they ended", engine_requests.clone());
        let engine_rows = Family::default();
        registry.register(
            "engine_rows",
            "Rows of histories in ranking engines, by what became of them",
            engine_rows.clone(),
        );
        let engine_graph_batches = Family::default();
        let help = "Batches of ranking engines with CUDA graphs, by whether one had their shape and could be bound and captured";
        registry.register("engine_graph_batches", help, engine_graph_batches.clone());
        let engine_batch_requests = Histogram::new(exponential_buckets(1.0, 2.0, 11));
        let help = "Requests that ranking engines ran together";
        registry.register("engine_batch_requests", help, engine_batch_requests.clone());
        let engine_queue_seconds = Histogram::new(exponential_buckets(16e-6, 2.0, 20));
        let help = "Time from when a request of a ranking engine came to when its batch was put together";
        registry.register("engine_queue_seconds", help, engine_queue_seconds.clone());
        let generator_answers = Family::default();
        registry.register("generator_answers", "Answers of generators, by why they ended", generator_answers.clone());
        let generator_tokens = Family::default();
        let help = "Tokens of generators: computed rows, cached tokens of prompts, generated tokens";
        registry.register("generator_tokens", help, generator_tokens.clone());
        let generator_preemptions = Counter::default();
        let help = "Sequences that generators preempted because pages ran out";
        registry.register("generator_preemptions", help, generator_preemptions.clone());
        let generator_step_sequences = Histogram::new(exponential_buckets(1.0, 2.0, 11));
        let help = "Sequences that generators ran together in a step";
        registry.register("generator_step_sequences", help, generator_step_sequences.clone());
        let generator_step_seconds = Histogram::new(exponential_buckets(250e-6, 2.0, 16));
        registry.register("generator_step_seconds", "Time of a generator's step", generator_step_seconds.clone());
        Self {
            registry,
            runs,
            run_seconds,
            open_models,
            live_objects,
            async_queue,
            kv_tokens,
            kv_events,
            store_written_bytes,
            store_read_bytes,
            store_errors,
            store_file_bytes,
            embedding_lookups,
            embedding_keys,
            embedding_errors,
            embedding_stale_seconds,
            embedding_device_rows,
            engine_requests,
            engine_rows,
            engine_graph_batches,
            engine_batch_requests,
            engine_queue_seconds,
            generator_answers,
            generator_tokens,
            generator_preemptions,
            generator_step_sequences,
            generator_step_seconds,
        }
    }
}

/// The number of live handles of a kind.
pub(crate) fn live_objects(kind: &'static str, count: usize) {
    METRICS.live_objects.get_or_create(&KindLabels { kind }).set(count as i64);
}

/// Asynchronous runs waiting for a thread.
pub(crate) fn async_queue() -> &'static Gauge {
    &METRICS.async_queue
}

/// Tokens of prepared histories that came from `source`.
pub(crate) fn kv_tokens(source: &'static str) -> Counter {
    METRICS.kv_tokens.get_or_create_owned(&SourceLabels { source })
}

/// Owners in KV caches to which `kind` happened.
pub(crate) fn kv_events(kind: &'static str) -> Counter {
    METRICS.kv_events.get_or_create_owned(&KindLabels { kind })
}

/// Bytes that stores wrote.
pub(crate) fn store_written_bytes() -> &'static Counter {
    &METRICS.store_written_bytes
}

/// Bytes of layers read from the files of stores.
pub(crate) fn store_read_bytes() -> &'static Counter {
    &METRICS.store_read_bytes
}

/// Counts an error of a store.
pub(crate) fn store_error(kind: &'static str) {
    METRICS.store_errors.get_or_create(&KindLabels { kind }).inc();
}

/// Bytes that the files of the open stores take.
pub(crate) fn store_file_bytes() -> &'static Gauge {
    &METRICS.store_file_bytes
}

/// Counts a failure of a tier of an embedding table.
pub(crate) fn embedding_error(tier: &'static str) {
    METRICS.embedding_errors.get_or_create(&TierLabels { tier }).inc();
}

/// Requests of ranking engines with this outcome.
pub(crate) fn engine_requests(status: Status) -> Counter {
    METRICS.engine_requests.get_or_create_owned(&StatusLabels { status: status.name() })
}

/// Batches of ranking engines with CUDA graphs, by the way they ran.
pub(crate) fn engine_graph_batches(kind: &'static str) -> Counter {
    METRICS.engine_graph_batches.get_or_create_owned(&KindLabels { kind })
}

/// Rows of histories in ranking engines to which `kind` happened.
pub(crate) fn engine_rows(kind: &'static str) -> Counter {
    METRICS.engine_rows.get_or_create_owned(&KindLabels { kind })
}

/// How many requests ranking engines ran together, and how long each waited for that, in seconds.
pub(crate) fn engine_batches() -> (&'static Histogram, &'static Histogram) {
    (&METRICS.engine_batch_requests, &METRICS.engine_queue_seconds)
}

/// Answers of generators that ended for this reason.
pub(crate) fn generator_answers(reason: &'static str) -> Counter {
    METRICS.generator_answers.get_or_create_owned(&KindLabels { kind: reason })
}

/// Tokens of generators to which `kind` happened.
pub(crate) fn generator_tokens(kind: &'static str) -> Counter {
    METRICS.generator_tokens.get_or_create_owned(&KindLabels { kind })
}

/// Sequences that generators preempted.
pub(crate) fn generator_preemptions() -> &'static Counter {
    &METRICS.generator_preemptions
}

/// How many sequences generators ran in a step, and how long it took, in seconds.
pub(crate) fn generator_steps() -> (&'static Histogram, &'static Histogram) {
    (&METRICS.generator_step_sequences, &METRICS.generator_step_seconds)
}

/// A counter of one object that is also part of the process's counter.
pub(crate) struct Count {
    own: AtomicU64,
    all: Counter,
}

impl Count {
    /// A counter from 0, as a part of `all`.
    pub(crate) fn new(all: Counter) -> Self {
        Self { own: AtomicU64::new(0), all }
    }

    pub(crate) fn add(&self, number: u64) {
        self.own.fetch_add(number, Ordering::Relaxed);
        self.all.inc_by(number);
    }

    /// The object's own count.
    pub(crate) fn get(&self) -> u64 {
        self.own.load(Ordering::Relaxed)
    }
}

/// The metrics of one model. They are looked up once, when it is opened, so that a run costs two atomic additions.
pub(crate) struct ModelMetrics {
    name: String,
    ok: Counter,
    seconds: Histogram,
}

impl ModelMetrics {
    pub(crate) fn new(name: &str) -> Self {
        METRICS.open_models.inc();
        Self {
            name: name.to_owned(),
            ok: METRICS.runs.get_or_create_owned(&RunLabels { model: name.to_owned(), status: Status::Ok.name() }),
            seconds: METRICS.run_seconds.get_or_create_owned(&ModelLabels { model: name.to_owned() }),
        }
    }

    pub(crate) fn succeeded(&self, took: Duration) {
        self.ok.inc();
        self.seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn failed(&self, error: &Error) {
        METRICS.runs.get_or_create(&RunLabels { model: self.name.clone(), status: error.status().name() }).inc();
    }
}

impl Drop for ModelMetrics {
    fn drop(&mut self) {
        METRICS.open_models.dec();
    }
}

/// The metrics of one embedding table. When the last table of a name is closed its lines are removed, so that the text
/// does not grow in a process that opens and closes models.
pub(crate) struct TableMetrics {
    labels: TableLabels,
    pub(crate) lookups: Count,
    pub(crate) asked: Count,
    pub(crate) hit: Count,
    pub(crate) default: Count,
    pub(crate) dropped: Count,
}

/// How many tables of each name there are. Locked while lines are made and removed, so that no table counts in lines
/// that were just removed.
static TABLES: LazyLock<Mutex<HashMap<String, usize>>> = LazyLock::new(Mutex::default);

impl TableMetrics {
    pub(crate) fn new(name: &str) -> Self {
        let mut tables = TABLES.lock();
        *tables.entry(name.to_owned()).or_default() += 1;
        let labels = TableLabels { table: name.to_owned() };
        let keys = |kind| Count::new(METRICS.embedding_keys.get_or_create_owned(&labels.of_kind(kind)));
        Self {
            lookups: Count::new(METRICS.embedding_lookups.get_or_create_owned(&labels)),
            asked: keys("asked"),
            hit: keys("hit"),
            default: keys("default"),
            dropped: keys("dropped"),
            labels,
        }
    }

    /// Sets for how long its cache may have missed a change, and how many of its rows are in the caches on GPUs.
    pub(crate) fn tell(&self, stale_seconds: i64, device_rows: usize) {
        METRICS.embedding_stale_seconds.get_or_create(&self.labels).set(stale_seconds);
        METRICS.embedding_device_rows.get_or_create(&self.labels).set(device_rows as i64);
    }
}

impl Drop for TableMetrics {
    fn drop(&mut self) {
        let mut tables = TABLES.lock();
        if let Some(users) = tables.get_mut(&self.labels.table).filter(|users| **users > 1) {
            *users -= 1;
            return;
        }
        tables.remove(&self.labels.table);
        METRICS.embedding_lookups.remove(&self.labels);
        for kind in ["asked", "hit", "default", "dropped"] {
            METRICS.embedding_keys.remove(&self.labels.of_kind(kind));
        }
        METRICS.embedding_stale_seconds.remove(&self.labels);
        METRICS.embedding_device_rows.remove(&self.labels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_tells_what_happened() {
        let metrics = ModelMetrics::new("a \"quoted\" name");
        metrics.succeeded(Duration::from_micros(20));
        metrics.failed(&Error::new(Status::Cancelled, "stop"));
        let text = text();
        assert!(text.contains(r#"pagoda_runs_total{model="a \"quoted\" name",status="OK"} 1"#), "{text}");
        assert!(text.contains(r#"pagoda_runs_total{model="a \"quoted\" name",status="CANCELLED"} 1"#), "{text}");
        assert!(text.contains(r#"pagoda_run_seconds_count{model="a \"quoted\" name"} 1"#), "{text}");
        assert!(text.contains("# TYPE pagoda_run_seconds histogram"), "{text}");
    }

    #[test]
    fn a_table_is_told_of_while_one_of_its_name_is_open() {
        let (first, second) = (TableMetrics::new("m/left"), TableMetrics::new("m/left"));
        first.lookups.add(2);
        first.dropped.add(3);
        first.tell(-1, 4);
        drop(first);
        second.lookups.add(1);
        let told = text();
        for line in [
            r#"pagoda_embedding_lookups_total{table="m/left"} 3"#,
            r#"pagoda_embedding_keys_total{table="m/left",kind="dropped"} 3"#,
            r#"pagoda_embedding_stale_seconds{table="m/left"} -1"#,
            r#"pagoda_embedding_device_rows{table="m/left"} 4"#,
        ] {
            assert!(told.contains(line), "{line} in {told}");
        }
        drop(second);
        assert!(!text().contains("m/left"), "{}", text());
        let _third = TableMetrics::new("m/left");
        assert!(text().contains(r#"pagoda_embedding_lookups_total{table="m/left"} 0"#), "it is counted anew");
    }
}
