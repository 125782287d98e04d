//! What Prometheus reads, the library's counters and the server's own.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::models::{Kind, Models};

/// The type of what [`Metrics::text`] writes.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// The line that ends an exposition.
const END: &str = "# EOF\n";

/// The server's own counters.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    seconds: Family<PathLabels, Histogram>,
    first_token: Family<ModelLabels, Histogram>,
    in_flight: Gauge,
    waiting: Family<ModelLabels, Gauge<u64, AtomicU64>>,
    running: Family<ModelLabels, Gauge<u64, AtomicU64>>,
    pages: Family<PageLabels, Gauge<u64, AtomicU64>>,
    tiers: Family<TierLabels, Gauge<u64, AtomicU64>>,
    /// Held while the gauges of models are filled and written.
    scrape: Mutex<()>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PathLabels {
    path: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PageLabels {
    model: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    model: String,
    tier: &'static str,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("pagoda_http");
        let requests = Family::default();
        registry.register("requests", "Requests, by path and status", requests.clone());
        // 64 µs to about 2 minutes.
        let seconds: Family<PathLabels, Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(64e-6, 2.0, 22)));
        registry.register(
            "request_seconds",
            "Time from the head of a request to the end of its response",
            seconds.clone(),
        );
        // 1 ms to about half a minute.
        let first_token: Family<ModelLabels, Histogram> =
            Family::new_with_constructor(|| Histogram::new(exponential_buckets(1e-3, 2.0, 16)));
        registry.register(
            "first_token_seconds",
            "Time from a request to a language model to the first token of an answer",
            first_token.clone(),
        );
        let in_flight = Gauge::default();
        registry.register("requests_in_flight", "Requests that have not ended", in_flight.clone());
        let waiting = Family::default();
        registry.register("model_waiting", "Sequences or requests that wait for their turn", waiting.clone());
        let running = Family::default();
        registry.register("model_running", "Sequences that run", running.clone());
        let pages = Family::default();
        registry.register("model_pages", "Pages of the pool of keys and values", pages.clone());
        let tiers = Family::default();
        registry.register("model_tier_bytes", "Bytes of histories in a tier under the pool", tiers.clone());
        Self {
            registry,
            requests,
            seconds,
            first_token,
            in_flight,
            waiting,
            running,
            pages,
            tiers,
            scrape: Mutex::default(),
        }
    }
}

impl Metrics {
    /// A request has come.
    pub fn begin(&self) {
        self.in_flight.inc();
    }

    /// A request has ended. `path` is the route, not what the client wrote: there are few of them.
    pub fn end(&self, path: &str, status: u16, took: Duration) {
        self.in_flight.dec();
        let path = path.to_owned();
        self.seconds.get_or_create(&PathLabels { path: path.clone() }).observe(took.as_secs_f64());
        self.requests.get_or_create(&RequestLabels { path, status }).inc();
    }

    /// The times to the first tokens of a model.
    pub fn first_token(&self, model: &str) -> Histogram {
        self.first_token.get_or_create(&ModelLabels { model: model.to_owned() }).clone()
    }

    /// All counters of the process.
    pub fn text(&self, models: &Models) -> String {
        let _alone = self.scrape.lock();
        // Of models that are served no more nothing is left.
        self.waiting.clear();
        self.running.clear();
        self.pages.clear();
        self.tiers.clear();
        for served in models.all() {
            let of = ModelLabels { model: served.name.clone() };
            let (waiting, running, kv, tiers) = match &served.kind {
                Kind::Generate(generator) => {
                    let stats = generator.stats();
                    (stats.waiting, stats.running, Some(generator.kv_stats()), generator.tiers())
                }
                Kind::Rank(engine) => (engine.stats().waiting, 0, engine.kv_stats(), engine.tiers()),
                Kind::Plain(_) => continue,
            };
            self.waiting.get_or_create(&of).set(waiting);
            self.running.get_or_create(&of).set(running);
            for tier in tiers {
                let labels = TierLabels { model: served.name.clone(), tier: tier.name };
                self.tiers.get_or_create(&labels).set(tier.used_bytes);
            }
            let Some(kv) = kv else { continue };
            let states = [("free", kv.free_pages), ("used", kv.pages - kv.free_pages), ("shared", kv.shared_pages)];
            for (state, count) in states {
                self.pages.get_or_create(&PageLabels { model: served.name.clone(), state }).set(count);
            }
        }
        let mut text = pagoda::metrics::text();
        if text.ends_with(END) {
            text.truncate(text.len() - END.len());
        }
        // Writing to a String does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
