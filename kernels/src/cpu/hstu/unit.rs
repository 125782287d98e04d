//! The operators around the layers of a model on the CPU.

use super::dense::{Rows, by_rows, sum};
use crate::common::parallel::Parallel;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::Simd;
use crate::cpu::common::{Isa, Shared};
use crate::{Element, HstuUnit, InputError};

impl<T: Element> HstuUnit<'_, T> {
    /// Checks, then computes `y` (`[R, E]`). After an error it is as it was.
    pub fn run(&self, y: &mut [f32], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, y: &mut [f32], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check(y.len())?;
        by_rows(isa, self.rows, self.width, UnitRows { op: self, y: Shared(y.as_mut_ptr()) }, parallel);
        Ok(())
    }
}

struct UnitRows<'a, T> {
    op: &'a HstuUnit<'a, T>,
    y: Shared<f32>,
}

impl<T: Element> Rows for UnitRows<'_, T> {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, _: &mut Scratch) {
        let HstuUnit { width, x, epsilon, .. } = *self.op;
        // SAFETY: the output has a row of `width` for each row of x, and only this task has this one.
        let y = unsafe { std::slice::from_raw_parts_mut(self.y.pointer().add(row * width), width) };
        // SAFETY: the caller's instructions.
        unsafe { T::widen::<S>(&x[row * width..(row + 1) * width], y) };
        let length = sum(y, |x| x * x).sqrt();
        // Not `max`, which takes epsilon for a length that is not a number.
        let length = if length < epsilon { epsilon } else { length };
        y.iter_mut().for_each(|x| *x /= length);
    }
}
