//! What a caller asks, and what it gets.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Cancel;

/// Keys by feature: a column for each, all of one length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns(Vec<(String, Vec<i64>)>);

impl Columns {
    /// None.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the keys of a feature, which goes by its name in pagoda.json. -1 (`no_key`) stands for none.
    #[must_use]
    pub fn with(mut self, feature: impl Into<String>, keys: impl Into<Vec<i64>>) -> Self {
        self.0.push((feature.into(), keys.into()));
        self
    }

    /// The features and their keys, in the order they were added.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &[i64])> {
        self.0.iter().map(|(name, keys)| (name.as_str(), keys.as_slice()))
    }

    /// The keys of one feature.
    pub fn get(&self, feature: &str) -> Option<&[i64]> {
        self.iter().find(|(name, _)| *name == feature).map(|(_, keys)| keys)
    }

    /// How many rows the first column has; 0 without columns.
    pub fn rows(&self) -> usize {
        self.0.first().map_or(0, |(_, keys)| keys.len())
    }
}

/// Things that a user did, the earliest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The keys of each item feature and each action feature.
    pub keys: Columns,
    /// When they were, in seconds; may be empty if the model has no times.
    pub times: Vec<i64>,
}

/// A request: score candidates for a user.
#[derive(Clone, Default)]
pub struct RankRequest {
    /// The user.
    pub user: u64,
    /// Which event of the user's history is the first of `events`. `None`: `events` are the whole history, and the
    /// engine works out what of it is new.
    pub start: Option<u64>,
    /// The whole history, or what is new of it; there may be none.
    pub events: Events,
    /// The key of each user feature. May be left empty where `start` is beyond 0: then they are what they were.
    /// Sent, they are compared with those remembered; where none are, it is a gap.
    pub user_keys: Vec<(String, i64)>,
    /// The keys of each item feature, one of each for every candidate.
    pub candidates: Columns,
    /// The time of the request, in seconds, which candidates have if the model has times. `None`: now.
    pub time: Option<i64>,
    /// How long it may take. After that the caller gets CANCELLED at once; requests that ran with it go on.
    pub timeout: Option<Duration>,
    /// Ends it before that.
    pub cancel: Option<Arc<Cancel>>,
}

impl fmt::Debug for RankRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankRequest")
            .field("user", &self.user)
            .field("start", &self.start)
            .field("events", &self.events)
            .field("user_keys", &self.user_keys)
            .field("candidates", &self.candidates)
            .field("time", &self.time)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// The answer to a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankResponse {
    /// A score for each candidate and task: those of the first candidate, in the order of the tasks, then the next.
    pub scores: Vec<f32>,
    /// How many tasks there are.
    pub tasks: usize,
    /// The version of the model that answered.
    pub version: Arc<str>,
    /// Rows of the history that were cached.
    pub cached_rows: u64,
    /// Rows of the history that were computed.
    pub computed_rows: u64,
    /// How many other requests ran in the same batch.
    pub batched_with: usize,
    /// From when it came to when its batch was put together.
    pub queue_time: Duration,
    /// How long ONNX Runtime ran.
    pub run_time: Duration,
}

impl RankResponse {
    /// The scores of one candidate, in the order of the tasks.
    ///
    /// # Panics
    /// If there is no such candidate.
    pub fn candidate(&self, candidate: usize) -> &[f32] {
        &self.scores[candidate * self.tasks..][..self.tasks]
    }
}
