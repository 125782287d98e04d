//! Random calls of `Glu`, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{Glu, GluActivation};
use pagoda_test_support::Random;

/// A call of `Glu`. Gates lie where the activations are curved, and some far out.
pub struct Gated<T> {
    pub rows: usize,
    pub width: usize,
    pub x: Vec<T>,
    pub activation: GluActivation,
}

impl<T: OperatorElement> Gated<T> {
    pub fn new(random: &mut Random, rows: usize, width: usize, activation: GluActivation) -> Self {
        let x = (0..rows * 2 * width).map(|_| {
            let scale = if random.once_in(10) { 60.0 } else { 5.0 };
            T::from_f32(random.number() * scale)
        });
        Self { rows, width, x: x.collect(), activation }
    }

    pub fn call(&self) -> Glu<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> Glu<'_, T> {
        let Self { width, activation, .. } = *self;
        Glu { rows, width, x: &self.x[first * 2 * width..(first + rows) * 2 * width], activation }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::glu(&self.call()).unwrap()
    }
}

/// The largest error of a number in parts of its allowance: some units of f32, more of them as the exponent of a negative gate
/// grows, and half a unit of the type.
pub fn worst<T: OperatorElement>(glu: &Gated<T>, found: &[T], expected: &[f64]) -> f64 {
    let unit = match T::NAME {
        "f32" => 0.0,
        "f16" => 2.0_f64.powi(-11),
        _ => 2.0_f64.powi(-8),
    };
    // Half of the smallest step: an f16 below 2^-14 has no more digits.
    let step = if T::NAME == "f16" { 2.0_f64.powi(-25) } else { 1e-38 };
    let parts = found.iter().zip(expected).enumerate().map(|(at, (found, expected))| {
        let at = at / glu.width * 2 * glu.width + at % glu.width;
        let [gate, up] = [at, at + glu.width].map(|at| f64::from(glu.x[at].to_f32()));
        let exponent = match glu.activation {
            GluActivation::Silu => gate.abs(),
            GluActivation::Gelu => gate * gate / 2.0,
            GluActivation::GeluTanh => 1.6 * (gate.abs() + 0.044715 * gate.abs().powi(3)),
        };
        let relative = 6e-7 + if gate < 0.0 { 2e-7 * exponent } else { 0.0 };
        // The smallest factor of an up is 2^-126, where the true one is smaller still.
        let least = step + (gate * up).abs() * 1.2e-38;
        (f64::from(found.to_f32()) - expected).abs() / (expected.abs() * (relative + unit * 1.001) + least)
    });
    // Not `max`, which passes over NaN.
    parts.fold(0.0, |most, part| if part <= most { most } else { part })
}
