//! What the server did in the last minutes, second by second.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use crate::models::{Kind, Models};
use crate::state::State;
use crate::window::{Percentiles, Window};

/// The seconds that are kept.
const KEPT: usize = 300;

/// What happened in the last minutes.
#[derive(Default)]
pub struct History {
    state: Mutex<Kept>,
    /// The times of requests that have ended.
    times: Window,
}

#[derive(Default)]
struct Kept {
    seconds: VecDeque<Second>,
    /// The number of the next second, from 0.
    next: u64,
    /// What was counted up to the last second.
    before: Totals,
    requests: u64,
    errors: u64,
}

#[derive(Clone, Copy, Default)]
struct Totals {
    requests: u64,
    errors: u64,
    tokens: u64,
    ranked: u64,
}

/// One second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Second {
    /// Requests that ended.
    requests: u64,
    /// Those of them that were rejected or failed.
    errors: u64,
    /// Tokens that were generated.
    tokens: u64,
    /// Requests to rank that were answered.
    ranked: u64,
    /// Sequences and requests that wait, at its end.
    waiting: u64,
    /// Sequences that run, at its end.
    running: u64,
}

impl History {
    /// A request that computes has ended.
    pub fn ended(&self, status: u16, took: Duration) {
        let mut kept = self.lock();
        kept.requests += 1;
        kept.errors += u64::from(status >= 500 || status == 429);
        drop(kept);
        self.times.add(took);
    }

    /// The seconds from number `since` on, and the number of the next one.
    pub fn seconds(&self, since: u64) -> (Vec<Second>, u64) {
        let kept = self.lock();
        let new = kept.next.saturating_sub(since).min(kept.seconds.len() as u64) as usize;
        (kept.seconds.iter().skip(kept.seconds.len() - new).copied().collect(), kept.next)
    }

    /// The times of the last minute.
    pub fn percentiles(&self) -> Percentiles {
        self.times.percentiles()
    }

    fn tick(&self, models: &Models) {
        let (mut tokens, mut ranked, mut waiting, mut running) = (0, 0, 0, 0);
        for served in models.all() {
            match &served.kind {
                Kind::Generate(generator) => {
                    let stats = generator.stats();
                    tokens += stats.generated_tokens;
                    (waiting, running) = (waiting + stats.waiting, running + stats.running);
                }
                Kind::Rank(engine) => {
                    let stats = engine.stats();
                    (ranked, waiting) = (ranked + stats.answered, waiting + stats.waiting);
                }
                Kind::Plain(_) => {}
            }
        }
        let mut kept = self.lock();
        let now = Totals { requests: kept.requests, errors: kept.errors, tokens, ranked };
        let before = std::mem::replace(&mut kept.before, now);
        if kept.seconds.len() == KEPT {
            kept.seconds.pop_front();
        }
        kept.seconds.push_back(Second {
            requests: now.requests - before.requests,
            errors: now.errors - before.errors,
            tokens: now.tokens.saturating_sub(before.tokens),
            ranked: now.ranked.saturating_sub(before.ranked),
            waiting,
            running,
        });
        kept.next += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.state.lock()
    }
}

/// Writes down every second, until it is dropped.
pub async fn watch(state: Arc<State>) {
    let mut seconds = tokio::time::interval(Duration::from_secs(1));
    loop {
        seconds.tick().await;
        state.history.tick(&state.models);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_given_once() {
        let history = History::default();
        let models = Models::default();
        history.ended(200, Duration::from_millis(3));
        history.ended(429, Duration::from_millis(1));
        history.tick(&models);
        history.tick(&models);
        let (seconds, next) = history.seconds(0);
        assert_eq!((seconds.len(), next), (2, 2));
        assert_eq!((seconds[0].requests, seconds[0].errors, seconds[1].requests), (2, 1, 0));
        assert_eq!(history.seconds(2), (Vec::new(), 2));
        assert_eq!(history.seconds(1).0.len(), 1);
        // A number of a server before this one.
        assert_eq!(history.seconds(99), (Vec::new(), 2));
        (0..2 * KEPT).for_each(|_| history.tick(&models));
        assert_eq!(history.seconds(0).0.len(), KEPT);
    }
}
