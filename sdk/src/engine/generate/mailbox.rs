//! The events of one stream. Adding one does not wake the reader: a step adds the tokens of all sequences first, and then wakes
//! their readers. One thread that reads many streams is woken once a step, and not once a token.

use std::collections::VecDeque;
#[cfg(feature = "futures")]
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
#[cfg(feature = "futures")]
use std::task::{Context, Poll, Waker};

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
    waker: Option<Waker>,
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
            // Not under the lock: it runs code of the task's executor, whose panic must not end the generator's thread.
            let waker = self.0.state.lock().waker.take();
            if let Some(waker) = waker
                && catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err()
            {
                log::error!("the waker of a task that reads a stream panicked");
            }
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
    pub(super) fn poll_take(&self, task: &Context<'_>) -> Poll<Option<Event>> {
        let mut state = self.0.state.lock();
        if let Some(event) = state.events.pop_front() {
            return Poll::Ready(Some(event));
        }
        if state.closed {
            return Poll::Ready(None);
        }
        if !state.waker.as_ref().is_some_and(|waker| waker.will_wake(task.waker())) {
            let before = state.waker.replace(task.waker().clone());
            drop(state);
            // Not under the lock: with its last waker a task goes, and with the task whatever it owns.
            drop(before);
        }
        Poll::Pending
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
        #[cfg(feature = "futures")]
        let _waker = state.waker.take();
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

    #[cfg(feature = "futures")]
    mod wakers {
        use std::sync::atomic::{AtomicUsize, Ordering};
        use std::task::Wake;

        use super::*;

        /// Counts how often it is woken. `tied` goes with it.
        #[derive(Default)]
        struct Counted {
            woken: AtomicUsize,
            tied: Mutex<Option<Sender>>,
        }

        impl Wake for Counted {
            fn wake(self: Arc<Self>) {
                self.woken.fetch_add(1, Ordering::Relaxed);
            }
        }

        fn poll(receiver: &Receiver, task: &Arc<Counted>) -> Poll<Option<u32>> {
            receiver.poll_take(&Context::from_waker(&Waker::from(Arc::clone(task)))).map(id)
        }

        fn task() -> Arc<Counted> {
            Arc::default()
        }

        #[test]
        fn the_task_that_asked_last_is_woken_once() {
            let (sender, receiver) = mailbox();
            let (first, second) = (task(), task());
            assert_eq!(poll(&receiver, &first), Poll::Pending);
            assert_eq!(poll(&receiver, &second), Poll::Pending);
            assert_eq!(poll(&receiver, &second), Poll::Pending);
            assert_eq!((Arc::strong_count(&first), Arc::strong_count(&second)), (1, 2), "wakers that are kept");
            assert!(sender.push(event(1)) && sender.push(event(2)));
            sender.wake();
            sender.wake();
            assert_eq!([&first, &second].map(|task| task.woken.load(Ordering::Relaxed)), [0, 1]);
            assert_eq!(
                [poll(&receiver, &second), poll(&receiver, &second)],
                [Poll::Ready(Some(1)), Poll::Ready(Some(2))]
            );
            assert_eq!(poll(&receiver, &second), Poll::Pending);
            drop(sender);
            assert_eq!(second.woken.load(Ordering::Relaxed), 2, "the end wakes too");
            assert_eq!(poll(&receiver, &second), Poll::Ready(None));
        }

        #[test]
        fn a_receiver_that_goes_lets_go_of_its_task() {
            let (sender, receiver) = mailbox();
            let waiting = task();
            assert_eq!(poll(&receiver, &waiting), Poll::Pending);
            drop(receiver);
            assert_eq!(Arc::strong_count(&waiting), 1);
            sender.wake();
            assert_eq!(waiting.woken.load(Ordering::Relaxed), 0);
        }

        #[test]
        fn a_task_that_goes_with_its_waker_may_end_the_stream() {
            let (sender, receiver) = mailbox();
            let first = task();
            *first.tied.lock() = Some(sender);
            assert_eq!(poll(&receiver, &first), Poll::Pending);
            drop(first);
            // The last waker of the first task is replaced, and with it goes the sender.
            let second = task();
            assert_eq!(poll(&receiver, &second), Poll::Pending);
            assert_eq!(second.woken.load(Ordering::Relaxed), 1);
            assert_eq!(poll(&receiver, &second), Poll::Ready(None));
        }

        #[test]
        fn a_waker_that_panics_ends_nothing() {
            struct Panics;
            impl Wake for Panics {
                fn wake(self: Arc<Self>) {
                    panic!("a waker panics, as this test wants");
                }
            }
            let (sender, receiver) = mailbox();
            let waker = Waker::from(Arc::new(Panics));
            assert!(receiver.poll_take(&Context::from_waker(&waker)).is_pending());
            assert!(sender.push(event(5)));
            sender.wake();
            assert_eq!(id(receiver.try_take()), Some(5));
        }
    }

    #[test]
    fn a_sender_learns_that_the_reader_is_gone() {
        let (sender, receiver) = mailbox();
        assert!(sender.push(event(1)));
        drop(receiver);
        assert!(!sender.push(event(2)));
    }
}
