//! The events of one stream. Adding one does not wake the reader: a step adds the tokens of all sequences first, and then wakes
//! their readers. One thread that reads many streams is woken once a step, and not once a token.

use std::collections::VecDeque;
use std::sync::Arc;

use super::request::Event;
use crate::sync::{Condvar, Mutex};

/// A mailbox, from both sides.
pub(super) fn mailbox() -> (Sender, Receiver) {
    let shared = Arc::new(Shared::default());
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

/// The side that adds events.
pub(super) struct Sender(Arc<Shared>);

/// The side that takes events.
pub(super) struct Receiver(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    /// No event will be added.
    closed: bool,
    /// No event will be taken.
    abandoned: bool,
    /// The task that waits for an event.
    #[cfg(feature = "futures")]
    waker: Option<std::task::Waker>,
}

impl Sender {
    /// Adds an event. Returns false if nothing takes it.
    pub(super) fn push(&self, event: Event) -> bool {
        let mut state = self.0.state.lock();
        if !state.abandoned {
            state.events.push_back(event);
        }
        !state.abandoned
    }

    /// Wakes the reader, if it waits.
    pub(super) fn wake(&self) {
        self.0.changed.notify_all();
        #[cfg(feature = "futures")]
        {
            // Not under the lock: it runs code of the task's executor.
            let waker = self.0.state.lock().waker.take();
            waker.into_iter().for_each(std::task::Waker::wake);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.0.state.lock().closed = true;
        self.wake();
    }
}

impl Receiver {
    /// Waits for an event. `None` if none will come.
    pub(super) fn take(&self) -> Option<Event> {
        let mut state = self.0.state.lock();
        loop {
            if let Some(event) = state.events.pop_front() {
                return Some(event);
            }
            if state.closed {
                return None;
            }
            self.0.changed.wait(&mut state);
        }
    }

    /// Takes an event, or has the task woken when there is one. `None` if none will come.
    #[cfg(feature = "futures")]
    pub(super) fn poll_take(&self, task: &std::task::Context<'_>) -> std::task::Poll<Option<Event>> {
        let mut state = self.0.state.lock();
        match state.events.pop_front() {
            Some(event) => std::task::Poll::Ready(Some(event)),
            None if state.closed => std::task::Poll::Ready(None),
            None => {
                state.waker = Some(task.waker().clone());
                std::task::Poll::Pending
            }
        }
    }

    /// Takes an event, if there is one.
    pub(super) fn try_take(&self) -> Option<Event> {
        self.0.state.lock().events.pop_front()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.abandoned = true;
        let events = std::mem::take(&mut state.events);
        drop(state);
        drop(events);
    }
}

#[cfg(test)]
mod tests {
    use super::super::request::Token;
    use super::*;

    fn event(id: u32) -> Event {
        Event::Token(Token { choice: 0, id, text: String::new(), logprobs: None, finish_reason: None })
    }

    fn id(event: Option<Event>) -> Option<u32> {
        match event? {
            Event::Token(token) => Some(token.id),
            Event::End(_) => None,
        }
    }

    #[test]
    fn events_come_in_order_and_then_the_end() {
        let (sender, receiver) = mailbox();
        assert!(receiver.try_take().is_none());
        assert!(sender.push(event(1)) && sender.push(event(2)) && sender.push(event(3)));
        assert_eq!(id(receiver.try_take()), Some(1));
        assert_eq!(id(receiver.take()), Some(2));
        drop(sender);
        assert_eq!(id(receiver.take()), Some(3));
        assert!(receiver.take().is_none() && receiver.try_take().is_none());
    }

    #[test]
    fn a_reader_that_waits_is_woken() {
        let (sender, receiver) = mailbox();
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || std::iter::from_fn(|| id(receiver.take())).collect::<Vec<_>>());
            for number in 0..100 {
                sender.push(event(number));
                sender.wake();
            }
            drop(sender);
            assert_eq!(reader.join().unwrap(), (0..100).collect::<Vec<_>>());
        });
    }

    #[test]
    fn a_sender_learns_that_the_reader_is_gone() {
        let (sender, receiver) = mailbox();
        assert!(sender.push(event(1)));
        drop(receiver);
        assert!(!sender.push(event(2)));
    }
}
