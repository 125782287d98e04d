//! Random calls of `Linear`, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{GluActivation, Linear, RmsNorm};
use pagoda_test_support::Random;

/// What of a call there is beside x and the weight.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    pub bias: bool,
    pub residual: bool,
    pub norm: bool,
    pub activation: Option<GluActivation>,
    pub cut: [usize; 2],
}

/// A call of `Linear`.
pub struct Product<T> {
    pub rows: usize,
    pub inner: usize,
    pub columns: usize,
    pub parts: Parts,
    pub x: Vec<T>,
    pub weight: Vec<T>,
    pub bias: Vec<T>,
    pub residual: Vec<T>,
    pub norm: Vec<T>,
}

pub const EPSILON: f32 = 1e-5;

impl<T: OperatorElement> Product<T> {
    pub fn new(random: &mut Random, rows: usize, inner: usize, columns: usize, parts: Parts) -> Self {
        let mut numbers =
            |len: usize, scale: f32| -> Vec<T> { (0..len).map(|_| T::from_f32(random.number() * scale)).collect() };
        let width = if parts.activation.is_some() { columns / 2 } else { columns };
        Self {
            rows,
            inner,
            columns,
            parts,
            x: numbers(rows * inner, 2.0),
            // Sums are about as large as the numbers of x.
            weight: numbers(columns * inner, 2.0 / (inner as f32).sqrt().max(1.0)),
            bias: numbers(columns, 1.0),
            residual: numbers(rows * width, 3.0),
            norm: numbers(inner, 1.5),
        }
    }

    pub fn call(&self) -> Linear<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> Linear<'_, T> {
        let Self { inner, columns, parts, .. } = *self;
        let width = self.residual.len().checked_div(self.rows).unwrap_or(0);
        Linear {
            rows,
            inner,
            columns,
            x: &self.x[first * inner..(first + rows) * inner],
            weight: &self.weight,
            bias: parts.bias.then_some(&self.bias),
            residual: parts.residual.then_some(&self.residual[first * width..(first + rows) * width]),
            norm: parts.norm.then_some(RmsNorm { weight: &self.norm, epsilon: EPSILON }),
            activation: parts.activation,
            cut: parts.cut,
        }
    }

    /// The columns of all outputs side by side, as the reference has them.
    pub fn together(&self, outputs: &[Vec<T>; 3]) -> Vec<T> {
        let widths = self.call().widths().unwrap();
        let row = |row: usize| {
            let parts = outputs.iter().zip(widths);
            parts.flat_map(move |(output, width)| output[row * width..][..width].iter().copied())
        };
        (0..self.rows).flat_map(row).collect()
    }

    /// The largest error of a number in parts of its allowance: what sums in f32 lose, half a unit of the type for the output,
    /// and one for each number that was normed.
    pub fn worst(&self, found: &[T]) -> f64 {
        let (unit, step) = match T::NAME {
            "f32" => (0.0, 1e-38),
            "f16" => (2.0_f64.powi(-11), 2.0_f64.powi(-25)),
            _ => (2.0_f64.powi(-8), 1e-38),
        };
        let call = self.call();
        let expected = reference::linear(&call).unwrap();
        assert_eq!(found.len(), expected.len());
        let sums = Linear { activation: None, residual: None, cut: [0, 0], ..call };
        let sizes = Self {
            x: sizes(&self.x),
            weight: sizes(&self.weight),
            bias: sizes(&self.bias),
            norm: sizes(&self.norm),
            residual: vec![],
            parts: Parts { residual: false, activation: None, cut: [0, 0], ..self.parts },
            ..*self
        };
        let lost = 3e-6 + if self.parts.norm { unit * 1.001 } else { 0.0 };
        let (sums, sizes) = (reference::linear(&sums).unwrap(), reference::linear(&sizes.call()).unwrap());
        let width = call.width();
        let parts = found.iter().zip(&expected).enumerate().map(|(at, (found, expected))| {
            let at = at / width.max(1) * self.columns + at % width.max(1);
            let off = lost * sizes[at] + 1e-38;
            let off = match self.parts.activation {
                None => off,
                // No activation is steeper than 1.13, or larger than its gate; those of the CPU are right to some units.
                Some(_) => {
                    let (gate, up, up_off) = (sums[at].abs(), sums[at + width].abs(), lost * sizes[at + width]);
                    1.13 * off * (up + up_off) + gate * up_off + 2e-6 * gate * up
                }
            };
            (f64::from(found.to_f32()) - expected).abs() / (off + (expected.abs() + off) * (unit * 1.001 + 1e-7) + step)
        });
        // Not `max`, which passes over NaN.
        parts.fold(0.0, |most, part| if part <= most { most } else { part })
    }
}

fn sizes<T: OperatorElement>(numbers: &[T]) -> Vec<T> {
    numbers.iter().map(|number| T::from_f32(number.to_f32().abs())).collect()
}

/// Every way in which a call has its parts, for so many columns.
pub fn all_parts(columns: usize) -> Vec<Parts> {
    let mut all = Vec::new();
    for bits in 0..8 {
        let parts = Parts { bias: bits & 1 != 0, norm: bits & 2 != 0, residual: bits & 4 != 0, ..Parts::default() };
        all.push(parts);
        if columns.is_multiple_of(2) {
            let activations = GluActivation::ALL.into_iter();
            all.extend(activations.map(|activation| Parts { activation: Some(activation), ..parts }));
        }
        if !parts.residual {
            all.push(Parts { cut: [columns / 3, columns / 5], ..parts });
            all.push(Parts { cut: [0, columns / 2], ..parts });
        }
    }
    all
}
