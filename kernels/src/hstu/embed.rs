//! What one call of the operator `HstuEmbed` carries, and every check of it.
//!
//! Indices may hold anything at all: every number means a row.

use crate::InputError;
use crate::common::input_error::{expect, refuse};

/// How many tables `HstuEmbed` takes: those that are added up, and those that are added to the sum.
pub const TABLES: usize = 8;
/// As [`TABLES`].
pub const LEARNED: usize = 2;

/// One call of the operator `HstuEmbed`: what the keys of each row give, added up and scaled, and what is learned of
/// its position and time added to that.
#[derive(Clone, Copy, Debug)]
pub struct HstuEmbed<'a> {
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// Keys and their tables, at least one and up to [`TABLES`], in the order in which they are added up. The last row
    /// of a table is for keys below 0, which are none; the one before it for keys beyond the table: so there are two or
    /// more.
    pub tables: &'a [Lookup<'a>],
    /// What the sum is multiplied by.
    pub scale: f32,
    /// Positions and times, up to [`LEARNED`], with their tables of at least one row; those before the first mean the
    /// first, those beyond the last the last.
    pub learned: &'a [Lookup<'a>],
}

/// A row of a table for each row of the output.
#[derive(Clone, Copy, Debug)]
pub struct Lookup<'a> {
    /// `[N, E]`.
    pub table: &'a [f32],
    /// `[R]`.
    pub index: &'a [i64],
}

impl HstuEmbed<'_> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, width, tables, learned, .. } = *self;
        check_scale(self.scale)?;
        if !(1..=TABLES).contains(&tables.len()) || learned.len() > LEARNED {
            let message = format!("{} and {}, expected 1 to {TABLES} and up to {LEARNED}", tables.len(), learned.len());
            return refuse("tables", None, message);
        }
        if width == 0 {
            return refuse("tables", None, "rows of no elements, expected some".to_owned());
        }
        tables.iter().try_for_each(|lookup| lookup.check("table", "keys", rows, width, 2))?;
        learned.iter().try_for_each(|lookup| lookup.check("learned table", "index", rows, width, 1))?;
        expect("y", output, &[rows, width])
    }
}

impl Lookup<'_> {
    fn check(
        &self,
        table: &'static str,
        index: &'static str,
        rows: usize,
        width: usize,
        least: usize,
    ) -> Result<(), InputError> {
        let found = self.table.len() / width;
        expect(table, self.table.len(), &[found, width])?;
        if found < least {
            return refuse(table, None, format!("{found} rows, expected {least} or more"));
        }
        expect(index, self.index.len(), &[rows])
    }

    /// The row of the table that the key of a row means. Only after `check`.
    pub(crate) fn of_key(&self, row: usize, width: usize) -> &[f32] {
        let last = self.table.len() / width - 1;
        let at = usize::try_from(self.index[row]).map_or(last, |key| key.min(last - 1));
        &self.table[at * width..(at + 1) * width]
    }

    /// The row of the table that the position or time of a row means. Only after `check`.
    pub(crate) fn of_bucket(&self, row: usize, width: usize) -> &[f32] {
        let last = self.table.len() / width - 1;
        let at = usize::try_from(self.index[row]).map_or(0, |bucket| bucket.min(last));
        &self.table[at * width..(at + 1) * width]
    }
}

/// Refuses a scale that no sum can be multiplied by.
pub fn check_scale(scale: f32) -> Result<(), InputError> {
    if !scale.is_finite() {
        return refuse("scale", None, format!("{scale}, expected a finite number"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_means_a_row() {
        let lookup = Lookup { table: &[0.0, 1.0, 2.0, 3.0], index: &[0, 1, 2, 3, i64::MAX, -1, i64::MIN] };
        let keys: Vec<f32> = (0..7).map(|row| lookup.of_key(row, 1)[0]).collect();
        assert_eq!(keys, [0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0]);
        let buckets: Vec<f32> = (0..7).map(|row| lookup.of_bucket(row, 1)[0]).collect();
        assert_eq!(buckets, [0.0, 1.0, 2.0, 3.0, 3.0, 0.0, 0.0]);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let (numbers, index) = ([0.0_f32; 12], [0_i64; 5]);
        let good = [Lookup { table: &numbers[..6], index: &index[..4] }];
        let refused = |tables: &[Lookup<'_>], learned: &[Lookup<'_>], scale, output| {
            let call = HstuEmbed { rows: 4, width: 3, tables, scale, learned };
            call.check(output).map_err(|error| error.to_string())
        };
        assert_eq!(refused(&good, &good, 1.0, 12), Ok(()));
        let few = [Lookup { table: &numbers[..3], ..good[0] }];
        let none = [Lookup { table: &[], ..good[0] }];
        let torn = [Lookup { table: &numbers[..7], ..good[0] }];
        let long = [Lookup { index: &index, ..good[0] }];
        for (outcome, message) in [
            (refused(&[], &[], 1.0, 12), "tables: 0 and 0, expected 1 to 8 and up to 2"),
            (refused(&[good[0]; 9], &[], 1.0, 12), "tables: 9 and 0"),
            (refused(&good, &[good[0]; 3], 1.0, 12), "tables: 1 and 3"),
            (refused(&few, &few, 1.0, 12), "table: 1 rows, expected 2 or more"),
            (refused(&good, &none, 1.0, 12), "learned table: 0 rows, expected 1 or more"),
            (refused(&torn, &[], 1.0, 12), "table: 7 elements"),
            (refused(&long, &[], 1.0, 12), "keys: 5 elements"),
            (refused(&good, &long, 1.0, 12), "index: 5 elements"),
            (refused(&good, &[], f32::INFINITY, 12), "scale: inf, expected a finite number"),
            (refused(&good, &[], 1.0, 11), "y: 11 elements"),
        ] {
            let refused = outcome.unwrap_err();
            assert!(refused.starts_with(message), "{refused}");
        }
    }
}
