//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::Semaphore;

use crate::access::{Caller, Keys, Origins, Rates};
use crate::config::{Config, Limits};
use crate::logging::LogFormat;
use crate::metrics::Metrics;
use crate::models::{Models, Served};
use crate::page::History;
use crate::run::RunningRequests;
use crate::tally::Tally;
use crate::traces::{ModelSpan, Traces};
use crate::window::Window;

/// What all requests share.
pub struct State {
    /// The models.
    pub models: Models,
    /// The limits.
    pub limits: Limits,
    /// API keys; `None`: requests need none.
    pub keys: Option<Keys>,
    /// What each key has used up.
    pub rates: Arc<Rates>,
    /// The times to first tokens.
    pub first_tokens: Arc<Window>,
    /// What takes traces, if they are sent anywhere.
    pub traces: Option<Arc<Traces>>,
    /// The origins of web pages that may ask.
    pub origins: Origins,
    /// How lines of requests are written.
    pub log: LogFormat,
    /// Whether requests may load and unload models.
    pub repository_control: bool,
    /// Held while a model is loaded or unloaded.
    pub loading: tokio::sync::Mutex<()>,
    /// What is counted.
    pub metrics: Metrics,
    /// What happened in the last minutes.
    pub history: History,
    /// When the server began.
    pub since: Instant,
    /// The requests that run.
    pub running: Arc<RunningRequests>,
    /// One for each request that may be answered now.
    pub slots: Arc<Semaphore>,
    ending: AtomicBool,
}

impl State {
    /// Of models that are open.
    pub fn new(models: Models, keys: Option<Keys>, traces: Option<Arc<Traces>>, config: Config) -> Self {
        let count = keys.as_ref().map_or(1, Keys::len);
        let limits = &config.limits;
        Self {
            models,
            keys,
            rates: Arc::new(Rates::new(limits.requests_per_minute, limits.tokens_per_minute, count)),
            first_tokens: Arc::default(),
            traces,
            origins: Origins::new(config.cors),
            log: config.log,
            repository_control: config.repository_control,
            loading: tokio::sync::Mutex::default(),
            metrics: Metrics::default(),
            history: History::default(),
            since: Instant::now(),
            running: Arc::default(),
            slots: Arc::new(Semaphore::new(config.limits.requests as usize)),
            limits: config.limits,
            ending: AtomicBool::new(false),
        }
    }

    /// What counts the tokens of a request to a model.
    pub fn tally(&self, served: &Served, caller: Caller) -> Tally {
        Tally {
            since: Instant::now(),
            histogram: self.metrics.first_token(&served.name),
            statistics: Arc::clone(&served.statistics),
            window: Arc::clone(&self.first_tokens),
            rates: Arc::clone(&self.rates),
            caller,
            span: caller
                .span
                .zip(self.traces.as_ref())
                .map(|(span, traces)| ModelSpan::new(traces, span, &served.name)),
        }
    }

    /// Whether the server takes no new requests.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// From now on no new requests are taken.
    pub fn set_ending(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }
}
