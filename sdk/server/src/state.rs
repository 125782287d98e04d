//! What all requests share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use crate::config::Limits;
use crate::models::Models;
use crate::run::RunningRequests;

/// What all requests share.
pub struct State {
    /// The models.
    pub models: Models,
    /// The limits.
    pub limits: Limits,
    /// The requests that run.
    pub running: Arc<RunningRequests>,
    /// One for each request that may be answered now.
    pub slots: Arc<Semaphore>,
    ending: AtomicBool,
}

impl State {
    /// Of models that are open.
    pub fn new(models: Models, limits: Limits) -> Self {
        let slots = Arc::new(Semaphore::new(limits.requests as usize));
        Self { models, limits, running: Arc::default(), slots, ending: AtomicBool::new(false) }
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
