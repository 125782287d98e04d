//! Which keys a row of `HstuAttention` sees, as intervals.
//!
//! The specification states the mask pair by pair ([`crate::cpu::reference`] does it so). Seen from one row, the
//! visible history keys are one interval of positions, and the visible candidate keys are another: that is what the
//! fast kernels walk.

use std::ops::Range;

/// The mask of one user. Positions are `i64`: cached and new tokens together may pass `i32`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mask {
    /// Tokens of history, cached and new.
    pub history: i64,
    pub contextual: i64,
    pub group: i64,
    /// 0 = unlimited.
    pub window: i64,
}

impl Mask {
    /// Positions of the history that the row at position `row` sees.
    pub fn history_keys(&self, row: i64) -> Range<i64> {
        if row < self.contextual {
            return 0..self.history;
        }
        let last = row.min(self.history);
        // Contextual tokens all stand at place 0 or below: a window that reaches place 0 reaches them all.
        let unlimited = self.window == 0 || last - self.contextual < self.window;
        let first = if unlimited { 0 } else { last - self.window };
        first..(row + 1).min(self.history)
    }

    /// Candidates, counted from the first one, that the row at position `row` sees: its group up to itself.
    pub fn candidate_keys(&self, row: i64) -> Range<i64> {
        if row < self.history {
            return 0..0;
        }
        let candidate = row - self.history;
        candidate / self.group * self.group..candidate + 1
    }
}
