//! What of a user's history is there and what has to be computed.

use std::sync::atomic::Ordering;

use super::event_log::{EventLog, Sent};
use super::prepared_request::PreparedRequest;
use crate::error::{Error, Result, Status};
use crate::kv::{KvCache, Lease, Owner, Owners, Request, Tiers};

/// A request that can run: it is known which rows the model has to be given.
pub(super) struct PreparedHistory {
    /// Where keys and values go; `None` if the model keeps none.
    pub(super) lease: Option<Lease>,
    /// Whether what is computed becomes part of the cached history.
    keeps: bool,
    /// Rows of the history that are cached.
    pub(super) cached: u64,
    /// The events and the user's keys, if they are not those of the request.
    recalled: Option<Recalled>,
}

/// A history from its beginning on.
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

    /// The number of an event, and the numbers of all from there on.
    pub(super) fn events<'a>(&'a self, work: &'a PreparedRequest) -> (u64, &'a [i64]) {
        match &self.recalled {
            Some(recalled) => (0, &recalled.events),
            None => (work.start, &work.events),
        }
    }

    /// Whether the keys of those events are looked up as they are.
    pub(super) fn are_known(&self, work: &PreparedRequest) -> bool {
        work.known_events && self.recalled.is_none()
    }

    /// Rows that the model is given.
    pub(super) fn rows(&self, work: &PreparedRequest) -> u64 {
        work.rows() - self.cached + work.num_candidates as u64
    }

    /// Counts what was found of the history: it is going to run.
    pub(super) fn count(&self, work: &PreparedRequest) {
        if let Some(lease) = &self.lease {
            lease.count(work.is_onloaded.load(Ordering::Relaxed));
        }
    }

    /// Lets go of all, for a request that is going to be prepared again.
    pub(super) fn put_back(self, work: &PreparedRequest) {
        if self.lease.is_some_and(|lease| lease.is_onloading()) {
            work.is_onloaded.store(true, Ordering::Relaxed);
        }
    }

    /// Has what the model computed become part of the history.
    pub(super) fn commit(self) -> Result<()> {
        match self.lease {
            Some(lease) if self.keeps => lease.commit().map(drop),
            _ => Ok(()),
        }
    }
}

impl Recalled {
    /// Another version may have been told these, whose tables had other keys.
    fn check(&self, work: &PreparedRequest) -> Result<()> {
        let (serving, layout) = (&work.serving, &work.serving.layout);
        for (number, feature) in layout.features.iter().enumerate().filter(|(_, feature)| feature.keyed) {
            if let Some(column) = layout.of_event.iter().position(|&of| of == number) {
                let keys: Vec<i64> = self.events.iter().skip(column).step_by(layout.width()).copied().collect();
                serving.refuse_unknown("events", feature, &keys)?;
            }
            if let Some(column) = layout.of_user.iter().position(|&of| of == number) {
                serving.refuse_unknown("user_keys", feature, &self.user_keys[column..=column])?;
            }
        }
        Ok(())
    }
}

/// Finds out what is there of the history of a request, and makes room for what is new. `items` is a buffer.
pub(super) fn prepare(work: &PreparedRequest, remembered: &EventLog, items: &mut Vec<u64>) -> Result<PreparedHistory> {
    let serving = &work.serving;
    if work.start == 0 {
        return anew(work, None, remembered, items);
    }
    if let Some(kv) = serving.kv.as_ref().filter(|_| serving.keeps)
        && let Some(ready) = continued(work, kv, remembered, items)?
    {
        return Ok(ready);
    }
    let layout = &serving.layout;
    let known = remembered.tail(work.user, (0, work.start), layout.width(), &layout.signature);
    let Some(mut events) = known.events else { return Err(gap(work, remembered)) };
    events.extend_from_slice(&work.events);
    let user_keys = work.user_keys.clone().unwrap_or(known.keys);
    if user_keys.len() != layout.of_user.len() {
        return Err(Error::invalid("user_keys", "they are not known here: send them"));
    }
    let recalled = Recalled { events, user_keys };
    recalled.check(work)?;
    anew(work, Some(recalled), remembered, items)
}

/// A history of which everything is known, from its beginning on.
fn anew(
    work: &PreparedRequest,
    recalled: Option<Recalled>,
    remembered: &EventLog,
    items: &mut Vec<u64>,
) -> Result<PreparedHistory> {
    let serving = &work.serving;
    let mut ready = PreparedHistory { lease: None, keeps: serving.keeps, cached: 0, recalled };
    let Some(kv) = &serving.kv else { return Ok(ready) };
    let rows = work.rows();
    items.clear();
    // Without a cache there is nothing to compare with.
    if serving.keeps {
        let (user_keys, events) = (ready.user_keys(work), ready.events(work));
        serving.layout.history_rows(0..rows, user_keys, events).fingerprints(items);
    }
    let request = Request {
        owner: Owner(work.user),
        start: 0,
        tokens: rows as u32,
        candidates: work.num_candidates as u32,
        items,
    };
    let before = if serving.keeps { end(kv, work.user) } else { 0 };
    let lease = match kv.prepare_uncounted(&[request]) {
        // All of it is known here, so what it replaces may go first.
        Err(error) if is_crowded(work, &error) => {
            kv.evict(Owners::These(&[Owner(work.user)]), Tiers::ALL).and_then(|_| kv.prepare_uncounted(&[request]))
        }
        lease => lease,
    };
    let lease = lease.map_err(plain)?;
    ready.cached = leased(&lease);
    ready.keeps &= !is_beginning(work, before, ready.cached, remembered);
    ready.lease = Some(lease);
    Ok(ready)
}

/// A history that goes on after what is cached; `None` if that is not what is cached.
fn continued(
    work: &PreparedRequest,
    kv: &KvCache,
    remembered: &EventLog,
    items: &mut Vec<u64>,
) -> Result<Option<PreparedHistory>> {
    let (layout, page) = (&work.serving.layout, u64::from(work.serving.folder.kv.page_size));
    let first_row = layout.row_of(work.start);
    // Pages are compared as a whole: as much as there is before in the page in which the new rows begin, is compared
    // too.
    let from = layout.event_at(first_row / page * page);
    let tail = remembered.tail(work.user, (from, work.start), layout.width(), &layout.signature);
    // Another version was told since of what this one's cache may not have heard of.
    if tail.version.as_ref().is_some_and(|version| *version != work.serving.version) {
        return Ok(None);
    }
    // Every row depends on the user's keys. If none are remembered, nothing tells whether these are new.
    if work.user_keys.as_ref().is_some_and(|own| *own != tail.keys) {
        return Ok(None);
    }
    let before = end(kv, work.user);
    let user_keys = work.user_keys.as_ref().unwrap_or(&tail.keys);
    items.clear();
    match tail.events {
        Some(events) if from > 0 || user_keys.len() == layout.of_user.len() => {
            let rows = if from == 0 { 0 } else { layout.row_of(from) }..first_row;
            layout.history_rows(rows, user_keys, (from, &events)).fingerprints(items);
        }
        // Nothing tells whether what is cached of the same events is what they are now.
        _ if before > first_row => return Ok(None),
        _ => {}
    }
    layout.history_rows(first_row..work.rows(), user_keys, (work.start, &work.events)).fingerprints(items);
    let tokens = (work.rows() - first_row) as u32;
    let candidates = work.num_candidates as u32;
    let lease =
        match kv.prepare_uncounted(&[Request { owner: Owner(work.user), start: first_row, tokens, candidates, items }])
        {
            Ok(lease) => lease,
            // What is cached ends before, or is not the same.
            Err(error) if error.status() == Status::InvalidArgument => return Ok(None),
            // Nor is there room for it beside what it replaces.
            Err(error) if is_crowded(work, &error) => return Ok(None),
            Err(error) => return Err(plain(error)),
        };
    let cached = leased(&lease);
    let keeps = !is_beginning(work, before, cached, remembered);
    Ok(Some(PreparedHistory { lease: Some(lease), keeps, cached, recalled: None }))
}

/// Whether a history is the beginning of a longer one that is cached: that stays, for the request may be a late one.
/// The cache compares whole pages; what comes after the last one is compared with what is remembered. The keys must be
/// the same for sure: whoever sends the rest need not tell them again.
fn is_beginning(work: &PreparedRequest, before: u64, cached: u64, remembered: &EventLog) -> bool {
    let (layout, page) = (&work.serving.layout, u64::from(work.serving.folder.kv.page_size));
    let same_keys = || {
        let known = || remembered.tail(work.user, (0, 0), layout.width(), &layout.signature).keys;
        cached >= layout.begin_rows() || work.user_keys.as_ref().is_none_or(|own| *own == known())
    };
    before > work.rows()
        && cached >= work.rows() / page * page
        && same_keys()
        && !remembered.differs(&Sent::new(work), &layout.signature)
}

/// Whether there is no room for a history because of what it is to replace, which is resident as long as it is not. Others
/// who leave no room now are no reason: they end.
fn is_crowded(work: &PreparedRequest, error: &Error) -> bool {
    let never_fits = error.status() == Status::Capacity && error.argument() == Some("batch");
    never_fits && work.serving.fits(work.rows())
}

/// Where what is cached of a user ends.
fn end(kv: &KvCache, user: u64) -> u64 {
    kv.lookup(&[Owner(user)]).first().map_or(0, |cached| cached.start + u64::from(cached.tokens))
}

/// How many rows of the one user of a lease are cached.
fn leased(lease: &Lease) -> u64 {
    lease.owners().next().map_or(0, |user| u64::from(user.cached))
}

/// An error of the cache's, without the place in a batch that no caller knows of.
fn plain(error: Error) -> Error {
    Error::new(error.status(), error.message())
}

fn gap(work: &PreparedRequest, remembered: &EventLog) -> Error {
    let PreparedRequest { serving, user, start, .. } = work;
    let layout = &serving.layout;
    let cached = serving.kv.as_ref().filter(|_| serving.keeps).map_or(0, |kv| layout.event_at(end(kv, *user)));
    let known = remembered.known(*user, layout.width(), &layout.signature).max(cached);
    let from = if known < *start { known } else { 0 };
    let message =
        format!("a gap: events {from} to {} of user {user} are not known here; send the whole history", start - 1);
    Error::new(Status::NotFound, message).about("start")
}
