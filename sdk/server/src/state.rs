//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tokio::sync::Semaphore;

use crate::access::{Keys, Origins};
use crate::config::{Config, Limits};
use crate::logging::LogFormat;
use crate::metrics::Metrics;
use crate::models::Models;
use crate::page::History;
use crate::run::RunningRequests;

/// What all requests share.
pub struct State {
    /// The models.
    pub models: Models,
    /// The limits.
    pub limits: Limits,
    /// API keys; `None`: requests need none.
    pub keys: Option<Keys>,
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
    pub fn new(models: Models, keys: Option<Keys>, config: Config) -> Self {
        Self {
            models,
            keys,
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

    /// Whether the server takes no new requests.
    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// From now on no new requests are taken.
    pub fn set_ending(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }
}
