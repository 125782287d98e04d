//! A request, checked against its model and turned into numbers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{SystemTime, UNIX_EPOCH};

use super::layout::Layout;
use super::open_model::OpenModel;
use super::request::{Columns, RankRequest};
use crate::error::{Error, Result, Status};

/// What there is to do for one request.
pub(super) struct PreparedRequest {
    /// The model that answers: the one that was served when the request came.
    pub(super) serving: Arc<OpenModel>,
    pub(super) user: u64,
    /// Which event of the history is the first of `events`.
    pub(super) start: u64,
    /// The numbers of each event, one event after the other.
    pub(super) events: Vec<i64>,
    /// Whether all of their keys are looked up as they are.
    pub(super) known_events: bool,
    /// How many events the history has, with these.
    pub(super) total: u64,
    /// The user's own keys, if the request has them.
    pub(super) user_keys: Option<Vec<i64>>,
    /// The keys of each candidate, one candidate after the other.
    pub(super) candidates: Vec<i64>,
    pub(super) num_candidates: usize,
    pub(super) time: i64,
    /// Whether the history came from the store for a batch from which it was put back.
    pub(super) is_onloaded: AtomicBool,
}

impl PreparedRequest {
    /// Checks a request as far as that goes without knowing the user's history.
    pub(super) fn new(serving: &Arc<OpenModel>, request: &RankRequest) -> Result<Self> {
        let (layout, limits) = (&serving.layout, &serving.folder.limits);
        let count = request.events.keys.rows();
        // How many there are comes first: what is too long is not copied.
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
        let width = layout.width();
        let (events, known_events) = table("events", &request.events.keys, layout, &layout.of_event, width)?;
        let events = with_times(events, count, request, layout)?;
        let of_candidate = &layout.of_candidate;
        let width = of_candidate.len();
        let (mut candidates, known) = table("candidates", &request.candidates, layout, of_candidate, width)?;
        for (place, &feature) in of_candidate.iter().enumerate().filter(|_| !known) {
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
            time: request.time.unwrap_or_else(now),
            is_onloaded: AtomicBool::new(false),
        };
        work.check_keyed(request)?;
        Ok(work)
    }

    /// Rows of the history, with what is new.
    pub(super) fn rows(&self) -> u64 {
        self.serving.layout.row_of(self.total)
    }

    /// Refuses keys that no table has; see [`OpenModel::refuse_unknown`].
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

/// Puts columns side by side: `width` numbers for each row, of which the first are keys of `features`. Says whether all of
/// them are looked up as they are.
fn table(
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
            // Kept as it is: another model may know it.
            row[place] = key;
        }
    }
    Ok((numbers, known))
}

/// Puts its time after the keys of each event.
fn with_times(mut events: Vec<i64>, count: usize, request: &RankRequest, layout: &Layout) -> Result<Vec<i64>> {
    let times = &request.events.times;
    if times.len() != count && (layout.timed || !times.is_empty()) {
        let message = format!("{} times for {count} events: give each event its time", times.len());
        return Err(Error::invalid("events.times", message));
    }
    if layout.timed {
        let width = layout.width();
        for (event, &time) in events.chunks_exact_mut(width).zip(times) {
            event[width - 1] = time;
        }
    }
    Ok(events)
}

fn user_keys(layout: &Layout, request: &RankRequest, start: u64) -> Result<Option<Vec<i64>>> {
    if request.user_keys.is_empty() && (start > 0 || layout.of_user.is_empty()) {
        return Ok(layout.of_user.is_empty().then(Vec::new));
    }
    let named = |name: &str| layout.of_user.iter().any(|&feature| layout.features[feature].name == name);
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
    layout.of_user.iter().map(key).collect::<Result<_>>().map(Some)
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}
