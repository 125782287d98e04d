//! How many rows of prompts a step may have while sequences decode, learned from the times of earlier steps.

use std::time::Duration;

use super::draft::Costs;

/// Rows of a chunk before anything is known, and the fewest ever: a prompt always advances.
const SMALLEST_CHUNK: usize = 4;
/// The rows of drafts that take as long as a step without any, before anything is known.
const FIRST_ROWS: f64 = 8.0;
/// The part of what drafts cost more than at first that is forgotten with each step without any.
const FORGOTTEN: f64 = 0.01;
/// The weight of a new measurement.
const WEIGHT: f64 = 0.2;

/// The times of steps.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Seconds of a step without prompts.
    decode: Option<f64>,
    /// Seconds that each row of a prompt adds.
    row: Option<f64>,
    /// Seconds that each row of a draft adds.
    draft_row: Option<f64>,
}

impl Pace {
    /// A step took this long.
    pub(super) fn measured(&mut self, decode_rows: usize, prompt_rows: usize, took: Duration) {
        let took = took.as_secs_f64();
        if prompt_rows == 0 {
            average(&mut self.decode, took);
            // What one draft took longer by chance must not stop drafts for good.
            if let Some(row) = &mut self.draft_row {
                *row += FORGOTTEN * (took / FIRST_ROWS - *row).min(0.0);
            }
        } else if decode_rows == 0 {
            average(&mut self.row, took / prompt_rows as f64);
        } else if let Some(decode) = self.decode {
            // What one step took longer by chance must not stop prompts for good.
            average(&mut self.row, (took - decode).max(decode * 0.01) / prompt_rows as f64);
        }
    }

    /// A step of drafts, without prompts, took this long.
    pub(super) fn measured_drafts(&mut self, draft_rows: usize, took: Duration) {
        if let Some(decode) = self.decode {
            // A row costs less than a step of its own.
            let row = (took.as_secs_f64() - decode) / draft_rows as f64;
            average(&mut self.draft_row, row.clamp(decode * 0.01, decode * 0.9));
        }
    }

    /// What steps cost in which so many sequences decode, if any was measured. `drafting`: seconds that a token takes to draft.
    pub(super) fn costs(&self, sequences: usize, drafting: f64) -> Option<Costs> {
        let row = |step: f64| self.draft_row.unwrap_or(step / FIRST_ROWS);
        self.decode.map(|step| Costs { step, row: row(step) + drafting, sequences: sequences as f64 })
    }

    /// Forgets what drafts cost.
    pub(super) fn forget_drafts(&mut self) {
        self.draft_row = None;
    }

    /// The rows of prompts that stretch a step to at most `stretch` times its length without them.
    pub(super) fn chunk(&self, stretch: f32) -> usize {
        if stretch == 0.0 {
            return usize::MAX;
        }
        match (self.decode, self.row) {
            (Some(decode), Some(row)) => ((decode * (f64::from(stretch) - 1.0) / row) as usize).max(SMALLEST_CHUNK),
            _ => SMALLEST_CHUNK,
        }
    }
}

fn average(of: &mut Option<f64>, new: f64) {
    *of = Some(of.map_or(new, |old| old + WEIGHT * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_draft_is_forgotten_after_a_while() {
        let mut pace = Pace::default();
        let ms = Duration::from_millis;
        assert!(pace.costs(1, 0.0).is_none());
        pace.measured(1, 0, ms(10));
        let row = |pace: &Pace| pace.costs(1, 0.0).unwrap().row;
        assert!((row(&pace) - 0.01 / FIRST_ROWS).abs() < 1e-9);
        pace.measured_drafts(4, ms(18));
        assert!((row(&pace) - 0.002).abs() < 1e-9);
        pace.measured_drafts(1, ms(5000));
        let slow = row(&pace);
        assert!(slow > 0.003 && slow < 0.009);
        for _ in 0..500 {
            pace.measured(1, 0, ms(10));
        }
        assert!(row(&pace) < 0.0014, "{}", row(&pace));
        pace.forget_drafts();
        assert!((row(&pace) - 0.01 / FIRST_ROWS).abs() < 1e-9);
    }

    #[test]
    fn chunks_follow_what_rows_cost() {
        let mut pace = Pace::default();
        assert_eq!(pace.chunk(2.0), SMALLEST_CHUNK, "nothing is known");
        pace.measured(8, 0, Duration::from_millis(80));
        pace.measured(8, 16, Duration::from_millis(96));
        // 80 ms more at 1 ms a row.
        assert_eq!(pace.chunk(2.0), 80);
        assert_eq!(pace.chunk(1.5), 40);
        assert_eq!(pace.chunk(1.01), SMALLEST_CHUNK, "a prompt always advances");
        assert_eq!(pace.chunk(0.0), usize::MAX);
        for _ in 0..100 {
            pace.measured(8, 80, Duration::from_millis(240));
        }
        assert!((38..=42).contains(&pace.chunk(2.0)), "{}", pace.chunk(2.0));
    }
}
