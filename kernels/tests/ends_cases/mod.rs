//! Random calls of the operators around the layers, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::reference;
use pagoda_kernels::{Element, HstuSelect, HstuUnit};

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

/// A call of `HstuSelect`.
pub struct Select<T> {
    pub rows: usize,
    pub index: Vec<i64>,
    /// Widths and tensors.
    pub tensors: Vec<(usize, Vec<T>)>,
}

impl<T: Element> Select<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, count: usize, widths: &[usize]) -> Self {
        let index = (0..count).map(|_| numbers.0.below(rows) as i64).collect();
        Self { rows, index, tensors: widths.iter().map(|width| (*width, numbers.tensor(rows * width, 1.0))).collect() }
    }

    pub fn expected(&self) -> Vec<Vec<T>> {
        self.with(|call| reference::hstu_select(&call).unwrap())
    }

    /// Lends the call.
    pub fn with<R>(&self, use_it: impl FnOnce(HstuSelect<'_, T>) -> R) -> R {
        let tensors: Vec<(usize, &[T])> = self.tensors.iter().map(|(width, tensor)| (*width, &tensor[..])).collect();
        use_it(HstuSelect { rows: self.rows, index: &self.index, tensors: &tensors })
    }
}
