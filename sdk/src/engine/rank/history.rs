//! Which rows of a user's history are cached, and which the model has to compute.

use std::sync::atomic::Ordering;

use super::event_log::{EventLog, SentEvents};
use super::prepared_request::PreparedRequest;
use crate::error::{Error, Result, Status};
use crate::kv::{KvCache, KvLease, KvRequest, Owner, Owners, Tiers};

/// The history of a request that can run.
pub(super) struct PreparedHistory {
    /// The pages for keys and values; `None` if the model has no pools.
    pub(super) lease: Option<KvLease>,
    /// Whether the computed rows become part of the cached history.
    commits: bool,
    /// The number of cached rows.
    pub(super) cached: u64,
    /// The whole history, if the request has only a part of the events that the model needs.
    recalled: Option<Recalled>,
}

/// A whole history from the event log.
struct Recalled {
    events: Vec<i64>,
    user_keys: Vec<i64>,
}

impl PreparedHistory {
    /// The user's keys.
    pub(super) fn user_keys<'a>(&'a self, work: &'a PreparedRequest) -> &'a [i64] {
        match &self.recalled {
            Some(recalled) => &recalled.user_keys,
            None => work.user_keys.as_deref().unwrap_or_default(),
        }
    }

    /// The position of the first event, and the numbers of all events from there on.
    pub(super) fn events<'a>(&'a self, work: &'a PreparedRequest) -> (u64, &'a [i64]) {
        match &self.recalled {
            Some(recalled) => (0, &recalled.events),
            None => (work.start, &work.events),
        }
    }

    /// Whether no key of those events needs a default row.
    pub(super) fn has_known_keys(&self, work: &PreparedRequest) -> bool {
        work.known_events && self.recalled.is_none()
    }

    /// The number of rows in the batch.
    pub(super) fn rows(&self, work: &PreparedRequest) -> u64 {
        work.rows() - self.cached + work.num_candidates as u64
    }

    /// Counts cache hits, when the request is about to run.
    pub(super) fn count_hits(&self, work: &PreparedRequest) {
        if let Some(lease) = &self.lease {
            lease.count(work.was_onloaded.load(Ordering::Relaxed));
        }
    }

    /// Releases everything. The request will be prepared again.
    pub(super) fn unprepare(self, work: &PreparedRequest) {
        if self.lease.is_some_and(|lease| lease.is_onloading()) {
            work.was_onloaded.store(true, Ordering::Relaxed);
        }
    }

    /// Makes the computed rows part of the cached history.
    pub(super) fn commit(self) -> Result<()> {
        match self.lease {
            Some(lease) if self.commits => lease.commit().map(drop),
            _ => Ok(()),
        }
    }
}

impl Recalled {
    /// Checks the keys: they may have been sent to another version, whose tables had other keys.
    fn check(&self, work: &PreparedRequest) -> Result<()> {
        let (serving, layout) = (&work.serving, &work.serving.layout);
        for (number, feature) in layout.features.iter().enumerate().filter(|(_, feature)| feature.keyed) {
            if let Some(column) = layout.event_features.iter().position(|&of| of == number) {
                let keys: Vec<i64> = self.events.iter().skip(column).step_by(layout.event_width()).copied().collect();
                serving.refuse_unknown("events", feature, &keys)?;
            }
            if let Some(column) = layout.user_features.iter().position(|&of| of == number) {
                serving.refuse_unknown("user_keys", feature, &self.user_keys[column..=column])?;
            }
        }
        Ok(())
    }
}

/// Finds the cached part of a history and allocates pages for the rest. `items` is a reusable buffer.
pub(super) fn prepare(work: &PreparedRequest, remembered: &EventLog, items: &mut Vec<u64>) -> Result<PreparedHistory> {
    let serving = &work.serving;
    if work.start == 0 {
        return prepare_whole(work, None, remembered, items);
    }
    if let Some(kv) = serving.kv.as_ref().filter(|_| serving.caches_kv)
        && let Some(ready) = prepare_continuation(work, kv, remembered, items)?
    {
        return Ok(ready);
    }
    let layout = &serving.layout;
    let known = remembered.tail(work.user, (0, work.start), layout.event_width(), &layout.signature);
    let Some(mut events) = known.events else { return Err(gap_error(work, remembered)) };
    events.extend_from_slice(&work.events);
    let user_keys = work.user_keys.clone().unwrap_or(known.keys);
    if user_keys.len() != layout.user_features.len() {
        return Err(Error::invalid("user_keys", "the engine does not know them: send them"));
    }
    let recalled = Recalled { events, user_keys };
    recalled.check(work)?;
    prepare_whole(work, Some(recalled), remembered, items)
}

/// Prepares a history of which all events are known.
fn prepare_whole(
    work: &PreparedRequest,
    recalled: Option<Recalled>,
    remembered: &EventLog,
    items: &mut Vec<u64>,
) -> Result<PreparedHistory> {
    let serving = &work.serving;
    let mut ready = PreparedHistory { lease: None, commits: serving.caches_kv, cached: 0, recalled };
    let Some(kv) = &serving.kv else { return Ok(ready) };
    let rows = work.rows();
    items.clear();
    // Without a cache there is nothing to compare with.
    if serving.caches_kv {
        let (user_keys, events) = (ready.user_keys(work), ready.events(work));
        serving.layout.history_rows(0..rows, user_keys, events).fingerprints(items);
    }
    let request = KvRequest {
        owner: Owner(work.user),
        start: 0,
        tokens: rows as u32,
        candidates: work.num_candidates as u32,
        items,
        ..KvRequest::default()
    };
    let before = if serving.caches_kv { cached_end(kv, work.user) } else { 0 };
    let lease = match kv.prepare_uncounted(&[request]) {
        // All events are known, so the pages of the old history can be evicted first.
        Err(error) if needs_own_pages(work, &error) => kv
            .evict(Owners::These(Owner::slice(&[work.user])), Tiers::ALL)
            .and_then(|_| kv.prepare_uncounted(&[request])),
        lease => lease,
    };
    let lease = lease.map_err(without_argument)?;
    ready.cached = cached_rows(&lease);
    ready.commits &= !is_prefix_of_cached(work, before, ready.cached, remembered);
    ready.lease = Some(lease);
    Ok(ready)
}

/// Prepares a history that continues the cached one; `None` if the cached rows do not match.
fn prepare_continuation(
    work: &PreparedRequest,
    kv: &KvCache,
    remembered: &EventLog,
    items: &mut Vec<u64>,
) -> Result<Option<PreparedHistory>> {
    let (layout, page) = (&work.serving.layout, u64::from(work.serving.folder.kv.page_size));
    let first_row = layout.row_of(work.start);
    // The cache compares whole pages. So the comparison starts at the page in which the new rows begin.
    let from = layout.event_at(first_row / page * page);
    let tail = remembered.tail(work.user, (from, work.start), layout.event_width(), &layout.signature);
    // The last request went to another version: the cache of this one may lack its events.
    if tail.version.as_ref().is_some_and(|version| *version != work.serving.version) {
        return Ok(None);
    }
    // Every row depends on the user's keys. Without remembered keys it is unknown whether they have changed.
    if work.user_keys.as_ref().is_some_and(|own| *own != tail.keys) {
        return Ok(None);
    }
    let before = cached_end(kv, work.user);
    let user_keys = work.user_keys.as_ref().unwrap_or(&tail.keys);
    items.clear();
    match tail.events {
        Some(events) if from > 0 || user_keys.len() == layout.user_features.len() => {
            let rows = if from == 0 { 0 } else { layout.row_of(from) }..first_row;
            layout.history_rows(rows, user_keys, (from, &events)).fingerprints(items);
        }
        // It is unknown whether the cached rows of these events are still the same.
        _ if before > first_row => return Ok(None),
        _ => {}
    }
    layout.history_rows(first_row..work.rows(), user_keys, (work.start, &work.events)).fingerprints(items);
    let tokens = (work.rows() - first_row) as u32;
    let candidates = work.num_candidates as u32;
    let lease = match kv.prepare_uncounted(&[KvRequest {
        owner: Owner(work.user),
        start: first_row,
        tokens,
        candidates,
        items,
        ..KvRequest::default()
    }]) {
        Ok(lease) => lease,
        // The cached history ends earlier, or differs.
        Err(error) if error.status() == Status::InvalidArgument => return Ok(None),
        // It does not fit beside the history that it replaces.
        Err(error) if needs_own_pages(work, &error) => return Ok(None),
        Err(error) => return Err(without_argument(error)),
    };
    let cached = cached_rows(&lease);
    let commits = !is_prefix_of_cached(work, before, cached, remembered);
    Ok(Some(PreparedHistory { lease: Some(lease), commits, cached, recalled: None }))
}

/// Whether a history is a prefix of a longer cached one. The longer one then stays: the request may be delayed or
/// repeated. The cache compares whole pages; the rows behind the last whole page are compared with the event log. The
/// user's keys must be known to be equal, because a later request need not send them again.
fn is_prefix_of_cached(work: &PreparedRequest, before: u64, cached: u64, remembered: &EventLog) -> bool {
    let (layout, page) = (&work.serving.layout, u64::from(work.serving.folder.kv.page_size));
    let same_keys = || {
        let known = || remembered.tail(work.user, (0, 0), layout.event_width(), &layout.signature).keys;
        cached >= layout.begin_rows() || work.user_keys.as_ref().is_none_or(|own| *own == known())
    };
    before > work.rows()
        && cached >= work.rows() / page * page
        && same_keys()
        && !remembered.differs(&SentEvents::new(work), &layout.signature)
}

/// Whether a history fits only if the history that it replaces is evicted first. Pages of other running requests are no
/// reason: those requests will end.
fn needs_own_pages(work: &PreparedRequest, error: &Error) -> bool {
    let never_fits = error.status() == Status::Capacity && error.argument() == Some("requests");
    never_fits && work.serving.fits(work.rows())
}

/// The end of the cached history of a user, in rows.
fn cached_end(kv: &KvCache, user: u64) -> u64 {
    kv.lookup(Owner::slice(&[user])).first().map_or(0, |cached| cached.start + u64::from(cached.length))
}

/// The cached rows of a lease of one user.
fn cached_rows(lease: &KvLease) -> u64 {
    lease.owners().next().map_or(0, |user| u64::from(user.cached))
}

/// An error of the cache, without its argument: a position in a batch that the caller does not know.
fn without_argument(error: Error) -> Error {
    Error::new(error.status(), error.message())
}

fn gap_error(work: &PreparedRequest, remembered: &EventLog) -> Error {
    let PreparedRequest { serving, user, start, .. } = work;
    let layout = &serving.layout;
    let cached =
        serving.kv.as_ref().filter(|_| serving.caches_kv).map_or(0, |kv| layout.event_at(cached_end(kv, *user)));
    let known = remembered.known_events(*user, layout.event_width(), &layout.signature).max(cached);
    let from = if known < *start { known } else { 0 };
    let message =
        format!("a gap: events {from} to {} of user {user} are not known here; send the whole history", start - 1);
    Error::new(Status::NotFound, message).about("start")
}
