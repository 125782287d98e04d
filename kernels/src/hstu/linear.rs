//! What one call of the operator `HstuLinear` carries, and every check of it.

use crate::InputError;
use crate::common::input_error::expect;

/// One call of the operator `HstuLinear`: a layer of an MLP in f32.
#[derive(Clone, Copy, Debug)]
pub struct HstuLinear<'a> {
    /// R.
    pub rows: usize,
    /// K.
    pub inner: usize,
    /// N.
    pub width: usize,
    /// `[R, K]`.
    pub x: &'a [f32],
    /// `[N, K]`.
    pub weight: &'a [f32],
    /// `[N]`.
    pub bias: Option<&'a [f32]>,
    /// What every sum goes through.
    pub activation: Activation,
}

/// What the sums of `HstuLinear` go through. cuda/hstu/dense.cuh has the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Activation {
    /// Nothing.
    None,
    /// max(x, 0).
    Relu,
    /// x · sigmoid(x).
    Silu,
    /// 1 / (1 + e⁻ˣ).
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// Every one, with its name.
    pub const ALL: [(&'static str, Self); 5] = [
        ("none", Self::None),
        ("relu", Self::Relu),
        ("silu", Self::Silu),
        ("sigmoid", Self::Sigmoid),
        ("tanh", Self::Tanh),
    ];

    /// The one with this name: `none`, `relu`, `silu`, `sigmoid` or `tanh`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(known, _)| *known == name).map(|(_, activation)| activation)
    }
}

impl HstuLinear<'_> {
    /// Refuses everything that would make an access stray, for an output of `output` elements. Writes nothing.
    pub fn check(&self, output: usize) -> Result<(), InputError> {
        let Self { rows, inner, width, .. } = *self;
        expect("x", self.x.len(), &[rows, inner])?;
        expect("weight", self.weight.len(), &[width, inner])?;
        if let Some(bias) = self.bias {
            expect("bias", bias.len(), &[width])?;
        }
        expect("y", output, &[rows, width])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_another_length_are_refused_by_name() {
        let (x, weight, bias, activation) = (&[0.0; 6], &[0.0; 12], Some(&[0.0; 4][..]), Activation::Relu);
        let linear = HstuLinear { rows: 2, inner: 3, width: 4, x, weight, bias, activation };
        assert_eq!(linear.check(8), Ok(()));
        assert_eq!(HstuLinear { bias: None, ..linear }.check(8), Ok(()));
        let refused = |call: HstuLinear<'_>, len| call.check(len).unwrap_err().to_string();
        assert!(refused(HstuLinear { x: &[0.0; 5], ..linear }, 8).starts_with("x: 5 elements"));
        assert!(refused(HstuLinear { weight: &[0.0; 11], ..linear }, 8).starts_with("weight: 11"));
        assert!(refused(HstuLinear { bias: Some(&[0.0; 3]), ..linear }, 8).starts_with("bias: 3"));
        assert!(refused(linear, 7).starts_with("y: 7"));
    }

    #[test]
    fn activations_have_names() {
        assert_eq!(Activation::named("silu"), Some(Activation::Silu));
        assert_eq!(Activation::named("gelu"), None);
    }
}
