//! What one call of the operators around the layers of a model carries, and every check of it.

use crate::batch::refuse;
use crate::dense::{check_epsilon, expect};
use crate::{Element, InputError};

/// One call of the operator `HstuUnit`: rows of length 1.
#[derive(Clone, Copy, Debug)]
pub struct HstuUnit<'a, T> {
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// `[R, E]`.
    pub x: &'a [T],
    /// What a row is divided by where it is shorter.
    pub epsilon: f32,
}

/// One call of the operator `HstuSelect`: some of the rows of several tensors.
#[derive(Clone, Copy, Debug)]
pub struct HstuSelect<'a, T> {
    /// R.
    pub rows: usize,
    /// `[S]`: which rows, each from 0 to R − 1.
    pub index: &'a [i64],
    /// The tensors, each with the width of its rows.
    pub tensors: &'a [(usize, &'a [T])],
}

/// How many tensors `HstuSelect` takes, and what each is called.
pub const SELECTED: [&str; 3] = ["a", "b", "c"];

impl<T: Element> HstuUnit<'_, T> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, width, .. } = *self;
        check_epsilon(self.epsilon)?;
        expect("x", self.x.len(), &[rows, width])?;
        expect("y", output, &[rows, width])
    }
}

impl<T: Element> HstuSelect<'_, T> {
    /// Refuses everything that would make an access stray, for outputs of so many elements. Writes nothing.
    ///
    /// # Panics
    /// Where there are more tensors than [`SELECTED`] has names, or another number of outputs.
    pub fn check(&self, outputs: &[usize]) -> Result<(), InputError> {
        assert_eq!(self.tensors.len(), outputs.len(), "an output for each tensor");
        for ((name, (width, tensor)), output) in SELECTED.into_iter().zip(self.tensors).zip(outputs) {
            expect(name, tensor.len(), &[self.rows, *width])?;
            expect(name, *output, &[self.index.len(), *width])?;
        }
        let stray = |row: &i64| usize::try_from(*row).map_or(true, |row| row >= self.rows);
        if let Some(at) = self.index.iter().position(stray) {
            let message = format!("row {} at {at}, expected rows of the {} that there are", self.index[at], self.rows);
            return refuse("index", None, message);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_another_length_are_refused_by_name() {
        let unit = HstuUnit { rows: 2, width: 3, x: &[1.0_f32; 6], epsilon: 1e-6 };
        assert_eq!(unit.check(6), Ok(()));
        let refused = |call: HstuUnit<'_, f32>, len| call.check(len).unwrap_err().to_string();
        assert!(refused(HstuUnit { x: &[1.0; 5], ..unit }, 6).starts_with("x: 5 elements"));
        assert!(refused(unit, 7).starts_with("y: 7 elements"));
        assert!(refused(HstuUnit { epsilon: -1.0, ..unit }, 6).starts_with("epsilon: -1"));
    }

    #[test]
    fn rows_that_there_are_not_are_refused() {
        let numbers = [0.0_f32; 8];
        let check = |index: &[i64], outputs: [usize; 2]| {
            HstuSelect { rows: 2, index, tensors: &[(3, &numbers[..6]), (4, &numbers)] }.check(&outputs)
        };
        assert_eq!(check(&[1, 0, 1], [9, 12]), Ok(()));
        assert_eq!(check(&[], [0, 0]), Ok(()));
        for (index, outputs, message) in [
            (vec![0, 2], [6, 8], "index: row 2 at 1, expected rows of the 2 that there are"),
            (vec![-1], [3, 4], "index: row -1 at 0"),
            (vec![i64::MIN], [3, 4], "index: row -9223372036854775808 at 0"),
            (vec![0], [4, 4], "a: 4 elements"),
            (vec![0], [3, 3], "b: 3 elements"),
        ] {
            let refused = check(&index, outputs).unwrap_err().to_string();
            assert!(refused.starts_with(message), "{refused}");
        }
        let short = HstuSelect { rows: 2, index: &[0], tensors: &[(3, &numbers[..5])] };
        assert!(short.check(&[3]).unwrap_err().to_string().starts_with("a: 5 elements"));
    }
}
