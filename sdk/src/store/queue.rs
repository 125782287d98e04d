//! The write queue, in order of sequence numbers.

use std::collections::VecDeque;
use std::sync::Arc;

use super::chain::Plan;
use super::sequence_number::SequenceNumber;
use super::ticket::Promise;
use super::{Key, Record, Room};
use crate::error::{Error, Result, Status};
use crate::sync::{Condvar, Mutex};

/// A write.
pub(super) struct Item {
    pub(super) seq: SequenceNumber,
    pub(super) key: Key,
    pub(super) plan: Plan,
    pub(super) what: What,
    /// Kept when it is done; `None` if a write counts as done when it is queued.
    pub(super) promise: Option<Promise>,
    /// Bytes of the queue's limit that it takes.
    pub(super) bytes: u64,
}

pub(super) enum What {
    Put(Arc<Record>),
    Cut {
        from: u64,
    },
    /// No write: it is done when everything before it is.
    Barrier,
}

/// What the writer has to do next.
pub(super) enum Work {
    Items(Vec<Item>),
    Compact(Promise),
    /// The queue is closed and empty.
    End,
}

pub(super) struct Queue {
    state: Mutex<State>,
    work: Condvar,
    room: Condvar,
    limit: u64,
}

struct State {
    items: VecDeque<Item>,
    compactions: VecDeque<Promise>,
    /// Bytes reserved by items that wait, are about to be queued, or are being written.
    bytes: u64,
    /// How many writes wait for room.
    waiting: usize,
    next_seq: SequenceNumber,
    closed: Option<Error>,
}

impl Queue {
    pub(super) fn new(limit: u64, next_seq: SequenceNumber) -> Self {
        let state = State {
            items: VecDeque::new(),
            compactions: VecDeque::new(),
            bytes: 0,
            waiting: 0,
            next_seq,
            closed: None,
        };
        Self { state: Mutex::new(state), work: Condvar::new(), room: Condvar::new(), limit }
    }

    /// Reserves room for a write. One that is larger than the limit goes in when the queue is empty.
    pub(super) fn reserve(&self, bytes: u64, room: Room) -> Result<()> {
        let mut state = self.state.lock();
        while state.bytes > 0 && state.bytes.saturating_add(bytes) > self.limit {
            if let Some(error) = &state.closed {
                return Err(error.clone());
            }
            if room == Room::OrRefuse {
                let message = format!(
                    "{} bytes wait to be written and {bytes} more exceed queue_bytes = {}: wait, or make it larger",
                    state.bytes, self.limit
                );
                return Err(Error::new(Status::Capacity, message));
            }
            state.waiting += 1;
            self.room.wait(&mut state);
            state.waiting -= 1;
        }
        state.bytes += bytes;
        Ok(())
    }

    /// Gives room back.
    pub(super) fn release(&self, bytes: u64) {
        if bytes > 0 {
            self.state.lock().bytes -= bytes;
            self.room.notify_all();
        }
    }

    /// Queues the item that `item` makes of the next sequence number, under the lock that keeps the order. Barriers
    /// take no number.
    pub(super) fn push(&self, item: impl FnOnce(SequenceNumber) -> Item) -> Result<SequenceNumber> {
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        let seq = state.next_seq;
        let item = item(seq);
        if !matches!(item.what, What::Barrier) {
            state.next_seq = seq.next();
        }
        state.items.push_back(item);
        self.work.notify_one();
        Ok(seq)
    }

    /// A sequence number for a record that is not queued.
    pub(super) fn take_seq(&self) -> SequenceNumber {
        let mut state = self.state.lock();
        let seq = state.next_seq;
        state.next_seq = seq.next();
        seq
    }

    pub(super) fn next_seq(&self) -> SequenceNumber {
        self.state.lock().next_seq
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    pub(super) fn ask_for_compaction(&self, promise: Promise) {
        let mut state = self.state.lock();
        if state.closed.is_none() {
            state.compactions.push_back(promise);
            self.work.notify_one();
        }
    }

    /// Waits for work. Items come before compactions, about `bytes` of them at once.
    pub(super) fn next(&self, bytes: u64) -> Work {
        let mut state = self.state.lock();
        loop {
            if !state.items.is_empty() {
                return Work::Items(take(&mut state, bytes));
            }
            if let Some(promise) = state.compactions.pop_front() {
                return Work::Compact(promise);
            }
            if state.closed.is_some() {
                return Work::End;
            }
            self.work.wait(&mut state);
        }
    }

    /// Items that are queued now, without waiting; about `bytes` of them.
    pub(super) fn now(&self, bytes: u64) -> Vec<Item> {
        take(&mut self.state.lock(), bytes)
    }

    /// Closes the queue: later pushes fail with `why`.
    pub(super) fn close(&self, why: Error) {
        self.state.lock().closed.get_or_insert(why);
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Fails everything that is left, after the writer has ended.
    pub(super) fn clear(&self) {
        let mut state = self.state.lock();
        let left = (std::mem::take(&mut state.items), std::mem::take(&mut state.compactions));
        drop(state);
        drop(left);
    }
}

fn take(state: &mut State, bytes: u64) -> Vec<Item> {
    let mut sum = 0;
    let mut items = Vec::new();
    while let Some(item) = state.items.front() {
        sum += item.bytes;
        if sum > bytes && !items.is_empty() {
            break;
        }
        items.extend(state.items.pop_front());
    }
    items
}

#[cfg(test)]
mod tests {
    use super::super::{Owner, Space};
    use super::*;

    fn item(seq: SequenceNumber, bytes: u64) -> Item {
        let plan = Plan { prev_seq: SequenceNumber::NONE, history_start: 0 };
        Item {
            seq,
            key: Key { space: Space(0), owner: Owner(0) },
            plan,
            what: What::Cut { from: 0 },
            promise: None,
            bytes,
        }
    }

    #[test]
    fn room_is_refused_or_waited_for() {
        let queue = Queue::new(100, SequenceNumber::FIRST);
        queue.reserve(500, Room::OrRefuse).expect("a large one goes in alone");
        assert_eq!(queue.reserve(1, Room::OrRefuse).unwrap_err().status(), Status::Capacity);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.reserve(60, Room::Wait));
            while queue.state.lock().waiting == 0 {
                std::thread::yield_now();
            }
            assert!(!waiting.is_finished());
            queue.release(500);
            waiting.join().unwrap().unwrap();
        });
        assert_eq!(queue.bytes(), 60);
        queue.reserve(40, Room::OrRefuse).unwrap();
    }

    #[test]
    fn items_leave_in_order_and_in_batches() {
        let queue = Queue::new(100, SequenceNumber(5));
        for bytes in [10, 10, 50] {
            queue.push(|seq| item(seq, bytes)).unwrap();
        }
        let Work::Items(items) = queue.next(20) else { panic!("there are items") };
        assert_eq!(items.iter().map(|item| item.seq.0).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(queue.now(20).len(), 1);
        queue.close(Error::new(Status::Internal, "closed"));
        assert!(matches!(queue.next(20), Work::End));
        assert!(queue.push(|seq| item(seq, 1)).is_err());
    }
}
