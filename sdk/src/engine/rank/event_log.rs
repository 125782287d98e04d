//! The event log: the events of users as they were sent, in memory up to a limit. From them a history can be computed
//! again.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::prepared_request::PreparedRequest;
use crate::sync::{Mutex, MutexGuard};

/// Approximate bytes of a user beside the numbers.
const USER_OVERHEAD: usize = 200;

/// The events of many users. The least recently used users are evicted first.
pub(super) struct EventLog {
    capacity: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    /// The meaning of the numbers. Requests with another signature neither read nor record events.
    signature: Vec<String>,
    users: HashMap<u64, UserEvents>,
    /// Users by the time of their last use.
    order: BTreeMap<u64, u64>,
    clock: u64,
    bytes: u64,
}

/// The events of one user.
struct UserEvents {
    /// The position of the first event.
    first: u64,
    /// The numbers of each event, one event after the other.
    numbers: Vec<i64>,
    keys: Vec<i64>,
    stamp: u64,
    /// The version that answered last. The cache of another version may lack some of these events.
    version: Arc<str>,
}

/// The events of a request, to be recorded.
pub(super) struct SentEvents<'a> {
    pub(super) user: u64,
    /// The position of the first event.
    pub(super) start: u64,
    pub(super) events: &'a [i64],
    /// The number of numbers of an event.
    pub(super) width: usize,
    pub(super) keys: Option<&'a [i64]>,
    /// The version that answered.
    pub(super) version: &'a Arc<str>,
}

impl<'a> SentEvents<'a> {
    pub(super) fn new(work: &'a PreparedRequest) -> Self {
        let PreparedRequest { serving, user, start, events, .. } = work;
        let (width, keys, version) = (serving.layout.event_width(), work.user_keys.as_deref(), &serving.version);
        Self { user: *user, start: *start, events, width, keys, version }
    }
}

/// The last events of a user.
#[derive(Default)]
pub(super) struct Tail {
    /// The requested events, if all are known.
    pub(super) events: Option<Vec<i64>>,
    /// The user's own keys; empty if they are not known.
    pub(super) keys: Vec<i64>,
    /// The version that answered last.
    pub(super) version: Option<Arc<str>>,
}

impl EventLog {
    pub(super) fn new(capacity: u64, signature: &[String]) -> Self {
        let signature = signature.to_vec();
        let inner = Inner { signature, users: HashMap::new(), order: BTreeMap::new(), clock: 0, bytes: 0 };
        Self { capacity, inner: Mutex::new(inner) }
    }

    /// Sets the meaning of events. If it changes, all events are forgotten.
    pub(super) fn set_signature(&self, signature: &[String]) {
        let mut inner = self.lock();
        if inner.signature != signature {
            let clock = inner.clock;
            *inner =
                Inner { signature: signature.to_vec(), users: HashMap::new(), order: BTreeMap::new(), clock, bytes: 0 };
        }
    }

    /// The events from `from` up to, not including, `to`, and the user's keys.
    pub(super) fn tail(&self, user: u64, (from, to): (u64, u64), width: usize, signature: &[String]) -> Tail {
        let inner = self.lock();
        let Some(known) = inner.users.get(&user).filter(|_| inner.signature == signature) else {
            return Tail::default();
        };
        let end = known.first + (known.numbers.len() / width) as u64;
        let events = (known.first <= from && to <= end).then(|| {
            let at = |event: u64| (event - known.first) as usize * width;
            known.numbers[at(from)..at(to)].to_vec()
        });
        Tail { events, keys: known.keys.clone(), version: Some(Arc::clone(&known.version)) }
    }

    /// Whether the known events of a user differ from the sent ones, or another version answered last.
    pub(super) fn differs(&self, sent: &SentEvents<'_>, signature: &[String]) -> bool {
        let inner = self.lock();
        let Some(known) = inner.users.get(&sent.user).filter(|_| inner.signature == signature) else { return false };
        // The first event that both have.
        let from = known.first.max(sent.start);
        let after =
            |first: u64, numbers: &[i64]| ((from - first) as usize).saturating_mul(sent.width).min(numbers.len());
        let ours = &known.numbers[after(known.first, &known.numbers)..];
        let theirs = &sent.events[after(sent.start, sent.events)..];
        let overlap = ours.len().min(theirs.len());
        known.version != *sent.version || ours[..overlap] != theirs[..overlap]
    }

    /// The number of known events, counted from the first event of the history.
    pub(super) fn known_events(&self, user: u64, width: usize, signature: &[String]) -> u64 {
        let inner = self.lock();
        let known = inner.users.get(&user).filter(|known| known.first == 0 && inner.signature == signature);
        known.map_or(0, |known| (known.numbers.len() / width) as u64)
    }

    /// Records the events of a request. Known later events stay, unless the request changes an earlier one.
    pub(super) fn record(&self, sent: &SentEvents<'_>, signature: &[String]) {
        if self.capacity == 0 {
            return;
        }
        let mut inner = self.lock();
        let inner = &mut *inner;
        if inner.signature != signature {
            return;
        }
        inner.clock += 1;
        let stamp = inner.clock;
        let known = inner.users.entry(sent.user).or_insert_with(|| {
            let new = UserEvents {
                first: sent.start,
                numbers: Vec::new(),
                keys: Vec::new(),
                stamp,
                version: Arc::clone(sent.version),
            };
            inner.bytes += new.bytes();
            new
        });
        inner.order.remove(&known.stamp);
        inner.order.insert(stamp, sent.user);
        let before = known.bytes();
        known.stamp = stamp;
        known.version = Arc::clone(sent.version);
        known.merge(sent);
        inner.bytes = inner.bytes + known.bytes() - before;
        while inner.bytes > self.capacity
            && let Some((_, user)) = inner.order.pop_first()
        {
            let gone = inner.users.remove(&user).expect("every user in the order has an entry");
            inner.bytes -= gone.bytes();
        }
    }

    /// Forgets a user. Returns whether the user was known.
    pub(super) fn forget(&self, user: u64) -> bool {
        let mut inner = self.lock();
        let Some(gone) = inner.users.remove(&user) else { return false };
        inner.order.remove(&gone.stamp);
        inner.bytes -= gone.bytes();
        true
    }

    /// The number of users and their bytes.
    pub(super) fn size(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.users.len() as u64, inner.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

impl UserEvents {
    /// Allocated bytes, with unused capacity.
    fn bytes(&self) -> u64 {
        (USER_OVERHEAD + 8 * (self.numbers.capacity() + self.keys.capacity())) as u64
    }

    fn merge(&mut self, sent: &SentEvents<'_>) {
        if let Some(keys) = sent.keys {
            self.keys.clear();
            self.keys.extend_from_slice(keys);
        }
        let end = self.first + (self.numbers.len() / sent.width) as u64;
        if sent.start < self.first || sent.start > end {
            // A gap: the known events do not connect to the sent ones.
            self.first = sent.start;
            self.numbers.clear();
        }
        let at = (sent.start - self.first) as usize * sent.width;
        let known = &self.numbers[at..];
        // Known events behind the sent ones stay if the sent ones are equal to the known ones.
        if known.len() <= sent.events.len() || known[..sent.events.len()] != *sent.events {
            self.numbers.truncate(at);
            self.numbers.extend_from_slice(sent.events);
        }
        if self.numbers.capacity() / 2 > self.numbers.len() {
            self.numbers.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn sent(user: u64, start: u64, events: &[i64]) -> SentEvents<'_> {
        SentEvents { user, start, events, width: 1, keys: None, version: version() }
    }

    fn version() -> &'static Arc<str> {
        static VERSION: LazyLock<Arc<str>> = LazyLock::new(|| "one".into());
        &VERSION
    }

    fn all(remembered: &EventLog, user: u64, to: u64) -> Option<Vec<i64>> {
        remembered.tail(user, (0, to), 1, &[]).events
    }

    #[test]
    fn consecutive_events_are_joined() {
        let remembered = EventLog::new(1 << 20, &[]);
        remembered.record(&sent(7, 0, &[1, 2, 3]), &[]);
        remembered.record(&sent(7, 3, &[4]), &[]);
        assert_eq!(all(&remembered, 7, 4), Some(vec![1, 2, 3, 4]));
        assert_eq!(all(&remembered, 7, 5), None);
        // Sent again, whole or in part: nothing is forgotten.
        remembered.record(&sent(7, 1, &[2, 3]), &[]);
        remembered.record(&sent(7, 0, &[1]), &[]);
        assert_eq!(all(&remembered, 7, 4), Some(vec![1, 2, 3, 4]));
        // Edited: the later events are dropped.
        remembered.record(&sent(7, 1, &[9]), &[]);
        assert_eq!((all(&remembered, 7, 2), all(&remembered, 7, 3)), (Some(vec![1, 9]), None));
        // A gap: the earlier events are dropped.
        remembered.record(&sent(7, 5, &[6, 7]), &[]);
        assert_eq!((all(&remembered, 7, 2), remembered.known_events(7, 1, &[])), (None, 0));
        assert_eq!(remembered.tail(7, (6, 7), 1, &[]).events, Some(vec![7]));
    }

    #[test]
    fn the_least_recently_used_are_evicted() {
        let each = (USER_OVERHEAD + 8 * 10) as u64;
        let remembered = EventLog::new(3 * each, &[]);
        for user in [1, 2, 3] {
            remembered.record(&sent(user, 0, &[5; 10]), &[]);
        }
        assert_eq!(remembered.size(), (3, 3 * each));
        remembered.record(&sent(1, 0, &[5; 10]), &[]);
        remembered.record(&sent(4, 0, &[5; 10]), &[]);
        assert_eq!(remembered.size(), (3, 3 * each));
        assert_eq!(all(&remembered, 2, 10), None);
        assert!(all(&remembered, 1, 10).is_some());
        assert!(remembered.forget(1) && !remembered.forget(1));
        assert_eq!(remembered.size(), (2, 2 * each));
        remembered.record(&sent(9, 0, &[5; 1000]), &[]);
        assert_eq!(remembered.size(), (0, 0), "one that is larger than the limit is evicted too");
    }

    #[test]
    fn sent_events_are_compared_where_both_have_events() {
        let remembered = EventLog::new(1 << 20, &[]);
        let differs = |sent: SentEvents<'_>| remembered.differs(&sent, &[]);
        assert!(!differs(sent(7, 0, &[1])), "nothing is known");
        remembered.record(&sent(7, 3, &[4, 5, 6]), &[]);
        for (start, events) in [(0, &[1, 2][..]), (0, &[1, 2, 3, 4]), (4, &[5]), (5, &[6, 7]), (6, &[7]), (9, &[1])] {
            assert!(!differs(sent(7, start, events)), "{start}: {events:?}");
        }
        for (start, events) in [(0, &[1, 2, 3, 9][..]), (3, &[9]), (4, &[5, 9]), (5, &[9, 7])] {
            assert!(differs(sent(7, start, events)), "{start}: {events:?}");
        }
        assert!(differs(SentEvents { version: &"two".into(), ..sent(7, 3, &[4]) }));
    }

    #[test]
    fn unused_capacity_is_counted_and_released() {
        let remembered = EventLog::new(1 << 20, &[]);
        remembered.record(&sent(7, 0, &[5; 1000]), &[]);
        remembered.record(&sent(7, 1000, &[5]), &[]);
        let (_, bytes) = remembered.size();
        assert!(bytes > (USER_OVERHEAD + 8 * 1001) as u64, "{bytes}: it has unused capacity");
        remembered.record(&sent(7, 2, &[9]), &[]);
        assert_eq!(remembered.size(), (1, (USER_OVERHEAD + 8 * 3) as u64));
    }

    #[test]
    fn events_of_another_signature_are_not_returned() {
        let (old, new) = (["item".to_owned()], ["film".to_owned()]);
        let remembered = EventLog::new(1 << 20, &old);
        remembered.record(&sent(7, 0, &[1, 2]), &old);
        assert_eq!(remembered.tail(7, (0, 2), 1, &new).events, None);
        remembered.set_signature(&old);
        assert_eq!(remembered.known_events(7, 1, &old), 2);
        remembered.set_signature(&new);
        remembered.record(&sent(7, 0, &[1, 2]), &old);
        assert_eq!((remembered.known_events(7, 1, &new), remembered.size()), (0, (0, 0)));
    }
}
