//! A request, checked against its model and turned into numbers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use super::layout::Layout;
use super::request::{Columns, RankRequest};
use super::served_model::ServedModel;
use crate::error::{Error, Result, Status};

/// A request that was checked.
pub(super) struct PreparedRequest {
    /// The model that answers: the one that was served when the request arrived.
    pub(super) serving: Arc<ServedModel>,
    pub(super) user: u64,
    /// The position of the first of `events` in the history.
    pub(super) start: u64,
    /// The numbers of each event, one event after the other.
    pub(super) events: Vec<i64>,
    /// Whether no key of `events` needs a default row.
    pub(super) known_events: bool,
    /// The number of events of the history, with these.
    pub(super) total: u64,
    /// The user's keys, if the request has them.
    pub(super) user_keys: Option<Vec<i64>>,
    /// The keys of each candidate, one candidate after the other.
    pub(super) candidates: Vec<i64>,
    pub(super) num_candidates: usize,
    pub(super) time: i64,
    /// Whether an earlier preparation has loaded the history from the store.
    pub(super) was_onloaded: AtomicBool,
}

impl PreparedRequest {
    /// Checks everything that does not depend on the user's history.
    pub(super) fn new(serving: &Arc<ServedModel>, request: &RankRequest) -> Result<Self> {
        let (layout, limits) = (&serving.layout, &serving.folder.limits);
        let count = request.events.keys.rows();
        // The length is checked first, so that a history that is too long is not copied.
        let start = request.start.unwrap_or(0);
        let total = start.checked_add(count as u64).filter(|&total| total <= limits.max_history).ok_or_else(|| {
            let message = format!(
                "the history has {} events and this model takes {} at most (limits.max_history)",
                u128::from(start) + count as u128,
                limits.max_history
            );
            Error::invalid("events", message)
        })?;
        let num_candidates = request.candidates.rows();
        if num_candidates == 0 {
            return Err(Error::invalid("candidates", "there are none: send at least one to be scored"));
        }
        if num_candidates as u64 > limits.max_candidates {
            let most = limits.max_candidates;
            let message =
                format!("{num_candidates} are more than the {most} that this model takes (limits.max_candidates)");
            return Err(Error::invalid("candidates", message));
        }
        let width = layout.event_width();
        let (events, known_events) = interleave("events", &request.events.keys, layout, &layout.event_features, width)?;
        let events = with_times(events, count, request, layout)?;
        let candidate_features = &layout.candidate_features;
        let width = candidate_features.len();
        let (mut candidates, known) = interleave("candidates", &request.candidates, layout, candidate_features, width)?;
        for (place, &feature) in candidate_features.iter().enumerate().filter(|_| !known) {
            let feature = &layout.features[feature];
            for key in candidates.iter_mut().skip(place).step_by(width) {
                *key = feature.resolve(*key, layout.no_key).map_err(|error| error.about("candidates"))?;
            }
        }
        let user_keys = user_keys(layout, request, start)?;
        let work = Self {
            serving: Arc::clone(serving),
            user: request.user,
            start,
            events,
            known_events,
            total,
            user_keys,
            candidates,
            num_candidates,
            time: request.time.unwrap_or_else(unix_now),
            was_onloaded: AtomicBool::new(false),
        };
        work.check_keyed(request)?;
        Ok(work)
    }

    /// The number of rows of the history, with the new ones.
    pub(super) fn rows(&self) -> u64 {
        self.serving.layout.row_of(self.total)
    }

    /// Rejects keys that a table does not have; see [`refuse_unknown`](super::open_model::OpenModel::refuse_unknown).
    fn check_keyed(&self, request: &RankRequest) -> Result<()> {
        let serving = &self.serving;
        for feature in serving.layout.features.iter().filter(|feature| feature.keyed) {
            let own = request.user_keys.iter().find(|(name, _)| *name == feature.name).map(|(_, key)| vec![*key]);
            let places = [
                ("events", request.events.keys.get(&feature.name)),
                ("candidates", request.candidates.get(&feature.name)),
                ("user_keys", own.as_deref()),
            ];
            for (place, keys) in places {
                serving.refuse_unknown(place, feature, keys.unwrap_or_default())?;
            }
        }
        Ok(())
    }
}

/// Interleaves columns: `width` numbers for each row, of which the first are the keys of `features`. Returns also
/// whether no key needs a default row.
fn interleave(
    argument: &str,
    columns: &Columns,
    layout: &Layout,
    features: &[usize],
    width: usize,
) -> Result<(Vec<i64>, bool)> {
    let rows = columns.rows();
    if columns.iter().len() == 0 {
        return Ok((Vec::new(), true));
    }
    for (index, (name, keys)) in columns.iter().enumerate() {
        if !features.iter().any(|&feature| layout.features[feature].name == name) {
            let names: Vec<_> = features.iter().map(|&feature| layout.features[feature].name.as_str()).collect();
            let message = format!("{argument} have no feature {name:?}; they have {}", names.join(", "));
            return Err(Error::new(Status::NotFound, message).about(argument));
        }
        if columns.iter().take(index).any(|(other, _)| other == name) {
            return Err(Error::invalid(argument, format!("{name:?} is given twice")));
        }
        if keys.len() != rows {
            let first = columns.iter().next().map_or("", |(name, _)| name);
            let message = format!("{name:?} has {} keys and {first:?} has {rows}: give each as many", keys.len());
            return Err(Error::invalid(argument, message));
        }
    }
    let (mut numbers, mut known) = (vec![0; rows * width], true);
    for (place, &feature) in features.iter().enumerate() {
        let feature = &layout.features[feature];
        let keys = columns
            .get(&feature.name)
            .ok_or_else(|| Error::invalid(argument, format!("the keys of {:?} are missing", feature.name)))?;
        known &= feature.check(keys, layout.no_key).map_err(|error| error.about(argument))?;
        if width == 1 {
            numbers.copy_from_slice(keys);
            continue;
        }
        for (row, &key) in numbers.chunks_exact_mut(width).zip(keys) {
            // Unresolved: another model may have a row for it.
            row[place] = key;
        }
    }
    Ok((numbers, known))
}

/// Writes the time of each event behind its keys.
fn with_times(mut events: Vec<i64>, count: usize, request: &RankRequest, layout: &Layout) -> Result<Vec<i64>> {
    let times = &request.events.times;
    if times.len() != count && (layout.has_times || !times.is_empty()) {
        let message = format!("{} times for {count} events: give each event its time", times.len());
        return Err(Error::invalid("events.times", message));
    }
    if layout.has_times {
        let width = layout.event_width();
        for (event, &time) in events.chunks_exact_mut(width).zip(times) {
            event[width - 1] = time;
        }
    }
    Ok(events)
}

fn user_keys(layout: &Layout, request: &RankRequest, start: u64) -> Result<Option<Vec<i64>>> {
    if request.user_keys.is_empty() && (start > 0 || layout.user_features.is_empty()) {
        return Ok(layout.user_features.is_empty().then(Vec::new));
    }
    let named = |name: &str| layout.user_features.iter().any(|&feature| layout.features[feature].name == name);
    if let Some((name, _)) = request.user_keys.iter().find(|(name, _)| !named(name)) {
        let message = format!("users have no feature {name:?}");
        return Err(Error::new(Status::NotFound, message).about("user_keys"));
    }
    let key = |&feature: &usize| {
        let feature = &layout.features[feature];
        let mut given = request.user_keys.iter().filter(|(name, _)| *name == feature.name);
        match (given.next(), given.next()) {
            (Some((_, key)), None) => {
                feature.resolve(*key, layout.no_key).map_err(|error| error.about("user_keys"))?;
                Ok(*key)
            }
            (None, _) => Err(Error::invalid("user_keys", format!("the key of {:?} is missing", feature.name))),
            _ => Err(Error::invalid("user_keys", format!("{:?} is given twice", feature.name))),
        }
    };
    layout.user_features.iter().map(key).collect::<Result<_>>().map(Some)
}

fn unix_now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}
