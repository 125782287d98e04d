//! Random calls of the operators around the layers, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::reference;
use pagoda_kernels::{Element, HstuUnit};

use crate::dense_cases::Numbers;

/// A call of `HstuUnit`. Some rows are shorter than its epsilon.
pub struct Unit<T> {
    pub rows: usize,
    pub width: usize,
    pub x: Vec<T>,
}

impl<T: Element> Unit<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, width: usize) -> Self {
        let x = (0..rows).flat_map(|row| numbers.tensor(width, if row % 5 == 4 { 1e-3 } else { 4.0 })).collect();
        Self { rows, width, x }
    }

    pub fn call(&self) -> HstuUnit<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> HstuUnit<'_, T> {
        let width = self.width;
        HstuUnit { rows, width, x: &self.x[first * width..(first + rows) * width], epsilon: 0.1 }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_unit(&self.call()).unwrap()
    }
}
