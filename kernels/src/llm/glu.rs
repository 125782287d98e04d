//! What one call of the operator `Glu` carries, and every check of it.

use crate::common::input_error::expect;
use crate::{Element, InputError};

/// One call of the operator `Glu`: `activation(gate) · up` of every row. An output depends on its gate and its up alone; it is
/// computed in f32 and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Glu<'a, T> {
    /// T.
    pub rows: usize,
    /// F.
    pub width: usize,
    /// `[T, 2·F]`: the gates of a row, then its ups.
    pub x: &'a [T],
    /// What the gates go through.
    pub activation: GluActivation,
}

/// What the gates of `Glu` go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GluActivation {
    /// `x / (1 + e^-x)`: SwiGLU.
    Silu,
    /// `x · Φ(x)`, Φ by the error function: GeGLU.
    Gelu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715·x³)))`: GeGLU with the approximation by tanh.
    GeluTanh,
}

impl GluActivation {
    /// Every activation.
    pub const ALL: [Self; 3] = [Self::Silu, Self::Gelu, Self::GeluTanh];

    /// The one with this name: `silu`, `gelu` or `gelu_tanh`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|activation| activation.name() == name)
    }

    /// The name in the attribute.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
        }
    }
}

impl<T: Element> Glu<'_, T> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, width, .. } = *self;
        // The factor on its own: twice the width may be more than a number holds.
        expect("x", self.x.len(), &[rows, 2, width])?;
        expect("y", output, &[rows, width])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_make_the_shape_are_refused_by_name() {
        let glu = Glu { rows: 2, width: 3, x: &[1.0_f32; 12], activation: GluActivation::Silu };
        assert_eq!(glu.check(6), Ok(()));
        let refused = |call: Glu<'_, f32>, len| call.check(len).unwrap_err().to_string();
        assert_eq!(refused(Glu { x: &[1.0; 11], ..glu }, 6), "x: 11 elements do not make the shape [2, 2, 3]");
        assert_eq!(refused(glu, 12), "y: 12 elements do not make the shape [2, 3]");
        assert!(refused(Glu { width: usize::MAX, ..glu }, 6).starts_with("x: 12 elements"));
    }

    #[test]
    fn activations_have_the_names_of_the_attribute() {
        for activation in GluActivation::ALL {
            assert_eq!(GluActivation::named(activation.name()), Some(activation));
        }
        assert_eq!(GluActivation::named("relu"), None);
    }
}
