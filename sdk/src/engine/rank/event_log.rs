//! The events of users as they were sent, in memory up to a limit, so that a history can be computed anew.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::prepared_request::PreparedRequest;
use crate::sync::{Mutex, MutexGuard};

/// What a user takes beside the numbers, about.
const OVERHEAD: usize = 200;

/// Events of many users. The least recently used ones leave first.
pub(super) struct EventLog {
    most: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    /// What the numbers are; those that mean something else are neither given nor taken.
    signature: Vec<String>,
    users: HashMap<u64, User>,
    /// Who was used when.
    order: BTreeMap<u64, u64>,
    clock: u64,
    bytes: u64,
}

/// What is known of one user.
struct User {
    /// Which event comes first.
    first: u64,
    /// Event by event.
    numbers: Vec<i64>,
    keys: Vec<i64>,
    stamp: u64,
    /// The version that answered last: the cache of another one may not have seen all of this.
    version: Arc<str>,
}

/// What was done in a request, to be remembered.
pub(super) struct Sent<'a> {
    pub(super) user: u64,
    /// Which event comes first.
    pub(super) start: u64,
    pub(super) events: &'a [i64],
    /// Numbers of an event.
    pub(super) width: usize,
    pub(super) keys: Option<&'a [i64]>,
    /// The version that answered.
    pub(super) version: &'a Arc<str>,
}

impl<'a> Sent<'a> {
    pub(super) fn new(work: &'a PreparedRequest) -> Self {
        let PreparedRequest { serving, user, start, events, .. } = work;
        let (width, keys, version) = (serving.layout.width(), work.user_keys.as_deref(), &serving.version);
        Self { user: *user, start: *start, events, width, keys, version }
    }
}

/// What is known of a user's last events.
#[derive(Default)]
pub(super) struct Tail {
    /// The events that were asked for, if all are known.
    pub(super) events: Option<Vec<i64>>,
    /// The user's own keys; empty if they are not known.
    pub(super) keys: Vec<i64>,
    /// The version that answered last.
    pub(super) version: Option<Arc<str>>,
}

impl EventLog {
    pub(super) fn new(most: u64, signature: &[String]) -> Self {
        let signature = signature.to_vec();
        let inner = Inner { signature, users: HashMap::new(), order: BTreeMap::new(), clock: 0, bytes: 0 };
        Self { most, inner: Mutex::new(inner) }
    }

    /// From now on events mean something else; if they do, all are forgotten.
    pub(super) fn expect(&self, signature: &[String]) {
        let mut inner = self.lock();
        if inner.signature != signature {
            let clock = inner.clock;
            *inner =
                Inner { signature: signature.to_vec(), users: HashMap::new(), order: BTreeMap::new(), clock, bytes: 0 };
        }
    }

    /// The events from `from` to before `to`, and the user's keys.
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

    /// Whether other events are known of a user than those that are sent, or was told to another version.
    pub(super) fn differs(&self, sent: &Sent<'_>, signature: &[String]) -> bool {
        let inner = self.lock();
        let Some(known) = inner.users.get(&sent.user).filter(|_| inner.signature == signature) else { return false };
        // From the event on that both have.
        let from = known.first.max(sent.start);
        let after =
            |first: u64, numbers: &[i64]| ((from - first) as usize).saturating_mul(sent.width).min(numbers.len());
        let ours = &known.numbers[after(known.first, &known.numbers)..];
        let theirs = &sent.events[after(sent.start, sent.events)..];
        let overlap = ours.len().min(theirs.len());
        known.version != *sent.version || ours[..overlap] != theirs[..overlap]
    }

    /// How many events are known from the first one on.
    pub(super) fn known(&self, user: u64, width: usize, signature: &[String]) -> u64 {
        let inner = self.lock();
        let known = inner.users.get(&user).filter(|known| known.first == 0 && inner.signature == signature);
        known.map_or(0, |known| (known.numbers.len() / width) as u64)
    }

    /// Remembers what a request has sent. Events that are known and come after those stay, unless it has changed some.
    pub(super) fn note(&self, sent: &Sent<'_>, signature: &[String]) {
        if self.most == 0 {
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
            let new = User {
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
        known.take(sent);
        inner.bytes = inner.bytes + known.bytes() - before;
        while inner.bytes > self.most
            && let Some((_, user)) = inner.order.pop_first()
        {
            let gone = inner.users.remove(&user).expect("whoever has a place in the order is there");
            inner.bytes -= gone.bytes();
        }
    }

    /// Forgets a user, and says whether there was one.
    pub(super) fn forget(&self, user: u64) -> bool {
        let mut inner = self.lock();
        let Some(gone) = inner.users.remove(&user) else { return false };
        inner.order.remove(&gone.stamp);
        inner.bytes -= gone.bytes();
        true
    }

    /// How many users there are, and the bytes that they take.
    pub(super) fn size(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.users.len() as u64, inner.bytes)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

impl User {
    /// What it takes, with the room that it has for more.
    fn bytes(&self) -> u64 {
        (OVERHEAD + 8 * (self.numbers.capacity() + self.keys.capacity())) as u64
    }

    fn take(&mut self, sent: &Sent<'_>) {
        if let Some(keys) = sent.keys {
            self.keys.clear();
            self.keys.extend_from_slice(keys);
        }
        let end = self.first + (self.numbers.len() / sent.width) as u64;
        if sent.start < self.first || sent.start > end {
            // There is a gap to what is known.
            self.first = sent.start;
            self.numbers.clear();
        }
        let at = (sent.start - self.first) as usize * sent.width;
        let known = &self.numbers[at..];
        // What is known beyond what was sent stays if that is the same.
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

    fn sent(user: u64, start: u64, events: &[i64]) -> Sent<'_> {
        Sent { user, start, events, width: 1, keys: None, version: version() }
    }

    fn version() -> &'static Arc<str> {
        static VERSION: LazyLock<Arc<str>> = LazyLock::new(|| "one".into());
        &VERSION
    }

    fn all(remembered: &EventLog, user: u64, to: u64) -> Option<Vec<i64>> {
        remembered.tail(user, (0, to), 1, &[]).events
    }

    #[test]
    fn events_are_put_together() {
        let remembered = EventLog::new(1 << 20, &[]);
        remembered.note(&sent(7, 0, &[1, 2, 3]), &[]);
        remembered.note(&sent(7, 3, &[4]), &[]);
        assert_eq!(all(&remembered, 7, 4), Some(vec![1, 2, 3, 4]));
        assert_eq!(all(&remembered, 7, 5), None);
        // Sent again, or only the beginning of it: nothing is forgotten.
        remembered.note(&sent(7, 1, &[2, 3]), &[]);
        remembered.note(&sent(7, 0, &[1]), &[]);
        assert_eq!(all(&remembered, 7, 4), Some(vec![1, 2, 3, 4]));
        // Edited: what came after is not known any more.
        remembered.note(&sent(7, 1, &[9]), &[]);
        assert_eq!((all(&remembered, 7, 2), all(&remembered, 7, 3)), (Some(vec![1, 9]), None));
        // A gap: what came before is of no use.
        remembered.note(&sent(7, 5, &[6, 7]), &[]);
        assert_eq!((all(&remembered, 7, 2), remembered.known(7, 1, &[])), (None, 0));
        assert_eq!(remembered.tail(7, (6, 7), 1, &[]).events, Some(vec![7]));
    }

    #[test]
    fn the_least_recently_used_leave() {
        let each = (OVERHEAD + 8 * 10) as u64;
        let remembered = EventLog::new(3 * each, &[]);
        for user in [1, 2, 3] {
            remembered.note(&sent(user, 0, &[5; 10]), &[]);
        }
        assert_eq!(remembered.size(), (3, 3 * each));
        remembered.note(&sent(1, 0, &[5; 10]), &[]);
        remembered.note(&sent(4, 0, &[5; 10]), &[]);
        assert_eq!(remembered.size(), (3, 3 * each));
        assert_eq!(all(&remembered, 2, 10), None);
        assert!(all(&remembered, 1, 10).is_some());
        assert!(remembered.forget(1) && !remembered.forget(1));
        assert_eq!(remembered.size(), (2, 2 * each));
        remembered.note(&sent(9, 0, &[5; 1000]), &[]);
        assert_eq!(remembered.size(), (0, 0), "one that is larger than the limit stays no longer than the others");
    }

    #[test]
    fn what_is_sent_agrees_or_differs_where_both_have_events() {
        let remembered = EventLog::new(1 << 20, &[]);
        let differs = |sent: Sent<'_>| remembered.differs(&sent, &[]);
        assert!(!differs(sent(7, 0, &[1])), "nothing is known");
        remembered.note(&sent(7, 3, &[4, 5, 6]), &[]);
        for (start, events) in [(0, &[1, 2][..]), (0, &[1, 2, 3, 4]), (4, &[5]), (5, &[6, 7]), (6, &[7]), (9, &[1])] {
            assert!(!differs(sent(7, start, events)), "{start}: {events:?}");
        }
        for (start, events) in [(0, &[1, 2, 3, 9][..]), (3, &[9]), (4, &[5, 9]), (5, &[9, 7])] {
            assert!(differs(sent(7, start, events)), "{start}: {events:?}");
        }
        assert!(differs(Sent { version: &"two".into(), ..sent(7, 3, &[4]) }));
    }

    #[test]
    fn room_that_is_not_used_is_counted_and_given_back() {
        let remembered = EventLog::new(1 << 20, &[]);
        remembered.note(&sent(7, 0, &[5; 1000]), &[]);
        remembered.note(&sent(7, 1000, &[5]), &[]);
        let (_, bytes) = remembered.size();
        assert!(bytes > (OVERHEAD + 8 * 1001) as u64, "{bytes}: it has room for more");
        remembered.note(&sent(7, 2, &[9]), &[]);
        assert_eq!(remembered.size(), (1, (OVERHEAD + 8 * 3) as u64));
    }

    #[test]
    fn events_of_another_kind_are_not_given() {
        let (old, new) = (["item".to_owned()], ["film".to_owned()]);
        let remembered = EventLog::new(1 << 20, &old);
        remembered.note(&sent(7, 0, &[1, 2]), &old);
        assert_eq!(remembered.tail(7, (0, 2), 1, &new).events, None);
        remembered.expect(&old);
        assert_eq!(remembered.known(7, 1, &old), 2);
        remembered.expect(&new);
        remembered.note(&sent(7, 0, &[1, 2]), &old);
        assert_eq!((remembered.known(7, 1, &new), remembered.size()), (0, (0, 0)));
    }
}
