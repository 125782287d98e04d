//! What one call of the operators around the layers of a model carries, and every check of it.

use super::dense::check_epsilon;
use crate::common::input_error::expect;
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

impl<T: Element> HstuUnit<'_, T> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, width, .. } = *self;
        check_epsilon(self.epsilon)?;
        expect("x", self.x.len(), &[rows, width])?;
        expect("y", output, &[rows, width])
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
}
