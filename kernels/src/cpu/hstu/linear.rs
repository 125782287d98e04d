//! `HstuLinear` on the CPU.

use super::dense::{Rows, by_rows, expect_available};
use super::gemm::Product;
use crate::common::parallel::Parallel;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::Simd;
use crate::cpu::common::{Isa, Shared};
use crate::{Activation, HstuLinear, InputError};

impl HstuLinear<'_> {
    /// Checks, then computes `y` (`[R, N]`). After an error it is as it was.
    pub fn run(&self, y: &mut [f32], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given; see
    /// [`HstuProject::run_with`](crate::HstuProject::run_with).
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, y: &mut [f32], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check(y.len())?;
        expect_available(isa);
        let product = Product {
            rows: self.rows,
            depth: self.inner,
            columns: self.width,
            x: self.x,
            weight: self.weight,
            bias: self.bias,
            silu: if self.activation == Activation::Silu { self.width } else { 0 },
            residual: None,
            taken: None,
        };
        product.run(isa, [&mut *y], parallel);
        let through: fn(f32) -> f32 = match self.activation {
            Activation::None | Activation::Silu => return Ok(()),
            // Not `max`, which takes 0 for what is not a number.
            Activation::Relu => |x| if x < 0.0 { 0.0 } else { x },
            Activation::Sigmoid => |x| 1.0 / (1.0 + (-x).exp()),
            Activation::Tanh => f32::tanh,
        };
        let each = ThroughRows { width: self.width, through, y: Shared(y.as_mut_ptr()) };
        by_rows(isa, self.rows, self.width, each, parallel);
        Ok(())
    }
}

/// Rows that go through an activation where they are.
struct ThroughRows {
    width: usize,
    through: fn(f32) -> f32,
    y: Shared<f32>,
}

impl Rows for ThroughRows {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, _: &mut Scratch) {
        // SAFETY: there are rows of `width`, and only this task has this one.
        let y = unsafe { std::slice::from_raw_parts_mut(self.y.pointer().add(row * self.width), self.width) };
        y.iter_mut().for_each(|x| *x = (self.through)(*x));
    }
}
