//! What one call of the operator `Linear` carries, and every check of it.

use crate::common::input_error::{expect, refuse};
use crate::{Element, GluActivation, InputError};

/// One call of the operator `Linear`: the product of rows with a matrix, with the nodes of a decoder that stand around it. Rows
/// are normed in front of it; behind it are the gate of a GLU, the residual, or the cut into queries, keys and values. Sums
/// are f32, and an output is rounded once. It depends on its row of x, its row of the residual and the weights alone.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a, T> {
    /// T.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// N.
    pub columns: usize,
    /// `[T, K]`.
    pub x: &'a [T],
    /// `[N, K]`; with an activation the rows that make the gates, then as many that make the ups.
    pub weight: &'a [T],
    /// `[N]`; none: 0.
    pub bias: Option<&'a [T]>,
    /// `[T, W]`, added last.
    pub residual: Option<&'a [T]>,
    /// The norm of x. What is multiplied is rounded to T, as a node of its own would have it.
    pub norm: Option<RmsNorm<'a, T>>,
    /// What the gates go through; none: there are no gates.
    pub activation: Option<GluActivation>,
    /// The columns of the second and of the third output; 0: there is none.
    pub cut: [usize; 2],
}

/// `x / √(mean(x²) + ε) · weight`, of every row.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a, T> {
    /// `[K]`.
    pub weight: &'a [T],
    /// What is added to the mean of the squares.
    pub epsilon: f32,
}

impl<T: Element> Linear<'_, T> {
    /// W: the columns that come out, those of all outputs.
    pub fn width(&self) -> usize {
        if self.activation.is_some() { self.columns / 2 } else { self.columns }
    }

    /// The columns of each output, or `None` where the cuts are more than there is.
    pub fn widths(&self) -> Option<[usize; 3]> {
        let [second, third] = self.cut;
        let first = self.width().checked_sub(second)?.checked_sub(third)?;
        Some([first, second, third])
    }

    /// Refuses everything that would make an access stray, for outputs of so many elements. Writes nothing.
    pub fn check(&self, outputs: [usize; 3]) -> Result<(), InputError> {
        let Self { rows, inner, columns, .. } = *self;
        expect("x", self.x.len(), &[rows, inner])?;
        expect("weight", self.weight.len(), &[columns, inner])?;
        if self.activation.is_some() && !columns.is_multiple_of(2) {
            let message =
                format!("{columns} rows, expected an even number: first those of the gates, then as many ups");
            return refuse("weight", None, message);
        }
        if let Some(bias) = self.bias {
            expect("bias", bias.len(), &[columns])?;
        }
        if let Some(residual) = self.residual {
            expect("residual", residual.len(), &[rows, self.width()])?;
        }
        if let Some(norm) = self.norm {
            expect("norm", norm.weight.len(), &[inner])?;
        }
        let Some(widths) = self.widths() else {
            let [second, third] = self.cut;
            let message = format!("{second} and {third} columns are cut off, there are {}", self.width());
            return refuse("width2", None, message);
        };
        if self.cut != [0, 0] && (self.activation.is_some() || self.residual.is_some()) {
            return refuse("width2", None, "columns are cut off: that goes without activation and residual".into());
        }
        for ((name, output), width) in ["y", "y2", "y3"].into_iter().zip(outputs).zip(widths) {
            expect(name, output, &[rows, width])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_make_the_shape_are_refused_by_name() {
        let (x, weight, four) = ([1.0_f32; 6], [1.0; 12], [1.0; 4]);
        let call = Linear {
            rows: 2,
            inner: 3,
            columns: 4,
            x: &x,
            weight: &weight,
            bias: Some(&four),
            residual: None,
            norm: Some(RmsNorm { weight: &four[..3], epsilon: 1e-5 }),
            activation: None,
            cut: [0, 0],
        };
        assert_eq!(call.check([8, 0, 0]), Ok(()));
        assert_eq!(Linear { cut: [1, 2], ..call }.check([2, 2, 4]), Ok(()));
        let gated = Linear { activation: Some(GluActivation::Silu), residual: Some(&four), ..call };
        assert_eq!(gated.check([4, 0, 0]), Ok(()));
        let refused = |call: Linear<'_, f32>| call.check([8, 0, 0]).unwrap_err().to_string();
        assert_eq!(refused(Linear { x: &x[1..], ..call }), "x: 5 elements do not make the shape [2, 3]");
        assert!(refused(Linear { weight: &weight[1..], ..call }).starts_with("weight: 11 elements"));
        assert!(refused(Linear { bias: Some(&four[1..]), ..call }).starts_with("bias: 3 elements"));
        assert!(refused(Linear { residual: Some(&four), ..call }).ends_with("the shape [2, 4]"));
        let norm = Some(RmsNorm { weight: &four[..], epsilon: 1e-5 });
        assert_eq!(refused(Linear { norm, ..call }), "norm: 4 elements do not make the shape [3]");
        assert_eq!(refused(gated), "y: 8 elements do not make the shape [2, 2]");
        assert_eq!(refused(Linear { cut: [3, 2], ..call }), "width2: 3 and 2 columns are cut off, there are 4");
        assert!(refused(Linear { cut: [usize::MAX, 2], ..call }).starts_with("width2: "));
        assert!(refused(Linear { cut: [1, 0], ..gated }).ends_with("without activation and residual"));
        assert_eq!(refused(Linear { cut: [1, 0], ..call }), "y: 8 elements do not make the shape [2, 3]");
        let odd = Linear { columns: 3, weight: &weight[..9], ..gated };
        assert!(refused(odd).starts_with("weight: 3 rows, expected an even number"));
    }
}
