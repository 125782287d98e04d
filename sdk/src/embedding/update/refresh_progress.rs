//! How far the refresh of a table has come.

use std::time::{Duration, Instant};

/// The position and the times of a refresh. A pass reads every cached row of a table again, in steps.
pub(in crate::embedding) struct RefreshProgress {
    /// The cache of the next step: 0 for the one in host memory, 1 and more for those on GPUs.
    pub(super) cache: usize,
    /// Where in that cache the next step begins.
    pub(super) at: usize,
    /// When the current pass began.
    pub(super) began: Instant,
    /// Whether every tier has answered in the current pass.
    pub(super) answered: bool,
    /// When the last complete pass began in which every tier answered. No cached row is older than that.
    pub(super) complete: Instant,
    /// The time from one refresh to the next; `None` if the table is not refreshed.
    pub(in crate::embedding) interval: Option<Duration>,
}

impl RefreshProgress {
    /// The state after a complete pass.
    pub(in crate::embedding) fn now() -> Self {
        Self { cache: 0, at: 0, began: Instant::now(), answered: true, complete: Instant::now(), interval: None }
    }

    /// Whether the next step begins a new pass.
    pub(super) fn is_at_start(&self) -> bool {
        (self.cache, self.at) == (0, 0)
    }
}
