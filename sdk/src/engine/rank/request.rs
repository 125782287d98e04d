//! The request and the response of a ranking.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::runtime::Cancel;

/// Keys by feature: one column for each feature, all of the same length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Columns(#[cfg_attr(feature = "serde", serde(with = "super::as_object"))] Vec<(String, Vec<i64>)>);

impl Columns {
    /// No columns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the keys of a feature, by its name in pagoda.json. -1 (`no_key`) means no key.
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

    /// The number of rows of the first column; 0 without columns.
    pub fn rows(&self) -> usize {
        self.0.first().map_or(0, |(_, keys)| keys.len())
    }
}

/// The events of a user, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Events {
    /// The keys of each item feature and each action feature.
    pub keys: Columns,
    /// The time of each event, in seconds. May be empty if the model has no times.
    pub times: Vec<i64>,
}

/// A request: score candidates for a user.
#[derive(Clone, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct RankRequest {
    /// The user.
    pub user: u64,
    /// The position of the first of `events` in the user's history. `None`: `events` are the whole history, and the
    /// engine finds out which of them are new.
    pub start: Option<u64>,
    /// The whole history, or its new events. May be empty.
    pub events: Events,
    /// The key of each user feature. May be empty if `start` is above 0: then they are unchanged. If they are sent,
    /// they are compared with the remembered ones. Without remembered ones it is a gap.
    #[cfg_attr(feature = "serde", serde(with = "super::as_object"))]
    pub user_keys: Vec<(String, i64)>,
    /// The keys of each item feature, one for each candidate.
    pub candidates: Columns,
    /// The time of the request, in seconds. It is the time of the candidates if the model has times. `None`: now.
    pub time: Option<i64>,
    /// The time limit. After it the caller gets CANCELLED at once. Other requests in its batch go on.
    pub timeout: Option<Duration>,
    /// Cancels the request.
    #[cfg_attr(feature = "serde", serde(skip))]
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

/// The response to a request.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub struct RankResponse {
    /// A score for each candidate and task, candidate by candidate, in the order of the tasks.
    pub scores: Vec<f32>,
    /// The number of tasks.
    pub tasks: usize,
    /// The version of the model that answered.
    pub version: Arc<str>,
    /// Rows of the history that were cached.
    pub cached_rows: u64,
    /// Rows of the history that were computed.
    pub computed_rows: u64,
    /// The number of other requests in the same batch.
    pub batched_with: usize,
    /// From the arrival of the request to the start of its batch.
    pub queue_time: Duration,
    /// The run time of ONNX Runtime.
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
