//! When what happened to a sequence.

use std::time::Instant;

/// When what happened to a sequence.
#[derive(Clone)]
pub(super) struct Clock {
    pub(super) arrived: Instant,
    pub(super) started: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
}

impl Clock {
    /// There is another token.
    pub(super) fn tick(&mut self) {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }
}
