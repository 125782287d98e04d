//! A request, checked against its model and turned into numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use super::layout::Layout;
use super::own::Own;
use super::request::{Columns, RankRequest};
use super::serving::Serving;
use crate::error::{Error, Result, Status};

/// What there is to do for one request.
pub(super) struct Work {
    /// The model that answers: the one that was served when the request came.
    pub(super) serving: Arc<Serving>,
    pub(super) user: u64,
    /// Which event of the history is the first of `events`.
    pub(super) start: u64,
    /// The numbers of each event, one event after the other.
    pub(super) events: Vec<i64>,
    /// How many events the history has, with these.
    pub(super) total: u64,
    /// The user's own keys, if the request has them.
    pub(super) user_keys: Option<Vec<i64>>,
    /// The keys of each candidate, one candidate after the other.
    pub(super) candidates: Vec<i64>,
    pub(super) num_candidates: usize,
    pub(super) time: i64,
    /// Its rows, if there was time to make them ahead.
    pub(super) own: OnceLock<Own>,
    /// Whether someone makes them, or has.
    pub(super) is_made: AtomicBool,
}

impl Work {
    /// Checks a request as far as that goes without knowing the user's history.
    pub(super) fn new(serving: &Arc<Serving>, request: &RankRequest) -> Result<Self> {
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
        let events = table("events", &request.events.keys, layout, &layout.of_event, layout.width())?;
        let events = with_times(events, count, request, layout)?;
        let of_candidate = &layout.of_candidate;
        let mut candidates = table("candidates", &request.candidates, layout, of_candidate, of_candidate.len())?;
        for (place, &feature) in of_candidate.iter().enumerate() {
            let feature = &layout.features[feature];
            for key in candidates.iter_mut().skip(place).step_by(of_candidate.len()) {
                *key = feature.resolve(*key, layout.no_key).map_err(|error| error.about("candidates"))?;
            }
        }
        let user_keys = user_keys(layout, request, start)?;
        let work = Self {
            serving: Arc::clone(serving),
            user: request.user,
            start,
            events,
            total,
            user_keys,
            candidates,
            num_candidates,
            time: request.time.unwrap_or_else(now),
            own: OnceLock::new(),
            is_made: AtomicBool::new(false),
        };
        work.check_keyed(request)?;
        Ok(work)
    }

    /// Rows of the history, with what is new.
    pub(super) fn rows(&self) -> u64 {
        self.serving.layout.row_of(self.total)
    }

    /// Whether its rows are to be made ahead; who asks is to do it.
    pub(super) fn is_to_be_made(&self) -> bool {
        !self.is_made.swap(true, Ordering::Relaxed)
    }

    /// Makes the rows ahead, for those who run it; whoever waits for other requests has the time.
    pub(super) fn make_ahead(&self) {
        // What panics here panics again where it becomes the error of this request.
        if let Ok(own) = catch_unwind(AssertUnwindSafe(|| Own::of(self))) {
            let _ = self.own.set(own);
        }
    }

    /// Refuses keys that no table has; see [`Serving::refuse_unknown`].
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

/// Puts columns side by side: `width` numbers for each row, of which the first are keys of `features`.
fn table(argument: &str, columns: &Columns, layout: &Layout, features: &[usize], width: usize) -> Result<Vec<i64>> {
    let rows = columns.rows();
    if columns.iter().len() == 0 {
        return Ok(Vec::new());
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
    let mut numbers = vec![0; rows * width];
    for (place, &feature) in features.iter().enumerate() {
        let feature = &layout.features[feature];
        let keys = columns
            .get(&feature.name)
            .ok_or_else(|| Error::invalid(argument, format!("the keys of {:?} are missing", feature.name)))?;
        feature.check(keys, layout.no_key).map_err(|error| error.about(argument))?;
        for (row, &key) in numbers.chunks_exact_mut(width).zip(keys) {
            // Kept as it is: another model may know it.
            row[place] = key;
        }
    }
    Ok(numbers)
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
