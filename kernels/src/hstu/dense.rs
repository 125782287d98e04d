//! What one call of the dense operators of an HSTU block carries, and every check of it.
//!
//! Rows are independent: the output of a row depends on the row and the weights alone. Statistics and sums
//! are in f32, the sum of a product in the order of its columns; each output is rounded once.

use crate::common::input_error::{expect, refuse};
use crate::{Element, InputError};

/// One call of the operator `HstuNorm`: layer norm.
#[derive(Clone, Copy, Debug)]
pub struct HstuNorm<'a, T> {
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// `[R, E]`.
    pub x: &'a [T],
    /// `[E]`.
    pub weight: &'a [T],
    /// `[E]`.
    pub bias: &'a [T],
    /// What is added to the variance.
    pub epsilon: f32,
}

/// One call of the operator `HstuProject`: u, v, q and k of every row.
#[derive(Clone, Copy, Debug)]
pub struct HstuProject<'a, T> {
    /// R.
    pub rows: usize,
    /// E.
    pub width: usize,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// `[R, E]`.
    pub x: &'a [T],
    /// `[4·H·D, E]`: the rows that make u, then those for v, q and k.
    pub weight: &'a [T],
    /// `[4·H·D]`.
    pub bias: Option<&'a [T]>,
    /// Which of the four go through SiLU.
    pub silu: Silu,
}

/// Which outputs of `HstuProject` go through SiLU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Silu {
    /// All four, as NVIDIA's models have it.
    All,
    /// u alone, as Meta's have it.
    U,
}

impl Silu {
    /// The one with this name: `all` or `u`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "all" => Some(Self::All),
            "u" => Some(Self::U),
            _ => None,
        }
    }

    /// How many of the four outputs, from the first on.
    pub(crate) fn outputs(self) -> usize {
        if self == Self::All { 4 } else { 1 }
    }
}

/// Some of the rows of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    /// R: how many there are.
    pub of: usize,
    /// `[S]`: which, each from 0 to R − 1.
    pub index: &'a [i64],
}

/// One call of the operator `HstuGate`: what was attended, normed, times u.
#[derive(Clone, Copy, Debug)]
pub struct HstuGate<'a, T> {
    /// S: rows of the output.
    pub rows: usize,
    /// Which rows of what was attended and of u they are of; without it all, and R is S.
    pub taken: Option<Taken<'a>>,
    /// H.
    pub heads: usize,
    /// D.
    pub head_size: usize,
    /// `[R, H, D]`.
    pub attended: &'a [T],
    /// `[R, H·D]`.
    pub u: &'a [T],
    /// `[H·D]`, of a norm by group `[H]`.
    pub weight: &'a [T],
    /// As the weight.
    pub bias: &'a [T],
    /// What is added to the variance.
    pub epsilon: f32,
    /// What is normed together.
    pub norm: GateNorm,
    /// Whether u and what was attended stand in front: `[S, 3·H·D]` instead of `[S, H·D]`.
    pub concat: bool,
}

/// What `HstuGate` norms together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GateNorm {
    /// All of a row.
    Layer,
    /// Each head on its own, with one weight and one bias for all of a head.
    Group,
}

impl GateNorm {
    /// The one with this name: `layer` or `group`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "layer" => Some(Self::Layer),
            "group" => Some(Self::Group),
            _ => None,
        }
    }
}

/// One call of the operator `HstuOutput`: the projection back to the width of the model, and the residual.
#[derive(Clone, Copy, Debug)]
pub struct HstuOutput<'a, T> {
    /// S: rows of y and of the output.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// E.
    pub width: usize,
    /// `[S, K]`.
    pub y: &'a [T],
    /// `[E, K]`.
    pub weight: &'a [T],
    /// `[E]`.
    pub bias: Option<&'a [T]>,
    /// `[R, E]`.
    pub residual: Option<&'a [T]>,
    /// Which rows of the residual they are added to; without it all, and R is S.
    pub taken: Option<Taken<'a>>,
}

impl Taken<'_> {
    /// Where a row comes from.
    pub(crate) fn source(taken: Option<Self>, row: usize) -> usize {
        taken.map_or(row, |taken| taken.index[row] as usize)
    }

    /// How many rows are taken. Refuses another number of them, and rows that do not exist.
    fn check(taken: Option<Self>, rows: usize) -> Result<usize, InputError> {
        let Some(Self { of, index }) = taken else { return Ok(rows) };
        expect("index", index.len(), &[rows])?;
        let stray = |row: &i64| usize::try_from(*row).map_or(true, |row| row >= of);
        if let Some(at) = index.iter().position(stray) {
            let message = format!("row {} at {at}, expected rows of the {of} that there are", index[at]);
            return refuse("index", None, message);
        }
        Ok(of)
    }
}

impl<T: Element> HstuNorm<'_, T> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, width, .. } = *self;
        check_epsilon(self.epsilon)?;
        expect("x", self.x.len(), &[rows, width])?;
        expect("weight", self.weight.len(), &[width])?;
        expect("bias", self.bias.len(), &[width])?;
        expect("y", output, &[rows, width])
    }
}

impl<T: Element> HstuProject<'_, T> {
    /// W: the elements of u, and of v, q and k each.
    pub fn part(&self) -> usize {
        self.heads * self.head_size
    }

    /// Refuses everything that would lead outside a tensor, for outputs of so many elements. Writes nothing.
    pub fn check(&self, outputs: [usize; 4]) -> Result<(), InputError> {
        let Self { rows, width, heads, head_size, .. } = *self;
        expect("x", self.x.len(), &[rows, width])?;
        expect("weight", self.weight.len(), &[4, heads, head_size, width])?;
        if let Some(bias) = self.bias {
            expect("bias", bias.len(), &[4, heads, head_size])?;
        }
        for (name, len) in ["u", "v", "q", "k"].into_iter().zip(outputs) {
            expect(name, len, &[rows, heads, head_size])?;
        }
        Ok(())
    }
}

impl<T: Element> HstuGate<'_, T> {
    /// W.
    pub fn width(&self) -> usize {
        self.heads * self.head_size
    }

    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, heads, head_size, .. } = *self;
        check_epsilon(self.epsilon)?;
        let given = Taken::check(self.taken, rows)?;
        expect("attended", self.attended.len(), &[given, heads, head_size])?;
        expect("u", self.u.len(), &[given, heads, head_size])?;
        let learned = if self.norm == GateNorm::Group { heads } else { self.width() };
        expect("weight", self.weight.len(), &[learned])?;
        expect("bias", self.bias.len(), &[learned])?;
        expect("y", output, &[rows, if self.concat { 3 } else { 1 }, heads, head_size])
    }
}

impl<T: Element> HstuOutput<'_, T> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, inner, width, .. } = *self;
        expect("y", self.y.len(), &[rows, inner])?;
        expect("weight", self.weight.len(), &[width, inner])?;
        if let Some(bias) = self.bias {
            expect("bias", bias.len(), &[width])?;
        }
        if self.residual.is_none() && self.taken.is_some() {
            return refuse("index", None, "there is no residual whose rows it could name".into());
        }
        if let Some(residual) = self.residual {
            expect("residual", residual.len(), &[Taken::check(self.taken, rows)?, width])?;
        }
        expect("output", output, &[rows, width])
    }
}

/// Refuses an epsilon that no norm can have.
pub fn check_epsilon(epsilon: f32) -> Result<(), InputError> {
    if !epsilon.is_finite() || epsilon < 0.0 {
        return refuse("epsilon", None, format!("{epsilon}, expected a number of at least 0"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_another_length_are_refused_by_name() {
        let numbers = [0.0_f32; 64];
        let output = HstuOutput {
            rows: 2,
            inner: 3,
            width: 4,
            y: &numbers[..6],
            weight: &numbers[..12],
            bias: Some(&numbers[..4]),
            residual: Some(&numbers[..8]),
            taken: None,
        };
        assert_eq!(output.check(8), Ok(()));
        let refused = |call: HstuOutput<'_, f32>, len| call.check(len).unwrap_err().to_string();
        assert!(refused(HstuOutput { y: &numbers[..5], ..output }, 8).starts_with("y: 5 elements"));
        assert!(refused(HstuOutput { weight: &numbers[..11], ..output }, 8).starts_with("weight: 11"));
        assert!(refused(HstuOutput { bias: Some(&numbers[..3]), ..output }, 8).starts_with("bias: 3"));
        assert!(refused(HstuOutput { residual: Some(&[]), ..output }, 8).starts_with("residual: 0"));
        assert!(refused(output, 7).starts_with("output: 7"));
        assert!(refused(HstuOutput { inner: usize::MAX, ..output }, 8).contains("do not make the shape"));
        assert!(check_epsilon(f32::NAN).is_err() && check_epsilon(-1e-5).is_err() && check_epsilon(0.0).is_ok());
    }

    #[test]
    fn rows_that_there_are_not_are_refused() {
        let numbers = [0.0_f32; 64];
        let check = |rows: usize, of: usize, index: &[i64]| {
            let taken = Some(Taken { of, index });
            let gate = HstuGate {
                rows,
                taken,
                heads: 1,
                head_size: 2,
                attended: &numbers[..10],
                u: &numbers[..10],
                weight: &numbers[..2],
                bias: &numbers[..2],
                epsilon: 1e-5,
                norm: GateNorm::Layer,
                concat: false,
            };
            let (y, weight, residual) = (&numbers[..rows * 3], &numbers[..12], Some(&numbers[..20]));
            let output = HstuOutput { rows, inner: 3, width: 4, y, weight, bias: None, residual, taken };
            (gate.check(rows * 2), output.check(rows * 4))
        };
        assert_eq!(check(3, 5, &[4, 0, 4]), (Ok(()), Ok(())));
        assert_eq!(check(0, 5, &[]), (Ok(()), Ok(())));
        for (rows, of, index, messages) in [
            (2, 5, vec![0, 5], ["index: row 5 at 1, expected rows of the 5 that there are"; 2]),
            (1, 5, vec![-1], ["index: row -1 at 0"; 2]),
            (1, 5, vec![i64::MIN], ["index: row -9223372036854775808 at 0"; 2]),
            (2, 5, vec![0], ["index: 1 elements do not make the shape [2]"; 2]),
            (1, 4, vec![0], ["attended: 10 elements", "residual: 20 elements"]),
        ] {
            let (gate, output) = check(rows, of, &index);
            for (refused, message) in [gate, output].into_iter().zip(messages) {
                let refused = refused.unwrap_err().to_string();
                assert!(refused.starts_with(message), "{refused}");
            }
        }
    }
}
