//! `HstuEmbed` on the CPU.

use super::dense::{Rows, by_rows};
use crate::common::parallel::Parallel;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::Simd;
use crate::cpu::common::{Isa, Shared};
use crate::{Element, HstuEmbed, InputError};

impl HstuEmbed<'_> {
    /// Checks, then computes `y` (`[R, E]`). After an error it is as it was.
    pub fn run<T: Element>(&self, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits are the same for all.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with<T: Element>(&self, isa: Isa, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check(y.len())?;
        by_rows(isa, self.rows, self.width, EmbedRows { op: self, y: Shared(y.as_mut_ptr()) }, parallel);
        Ok(())
    }
}

struct EmbedRows<'a, T> {
    op: &'a HstuEmbed<'a>,
    y: Shared<T>,
}

impl<T: Element> Rows for EmbedRows<'_, T> {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, scratch: &mut Scratch) {
        let HstuEmbed { width, tables, scale, learned, .. } = *self.op;
        let line = &mut scratch.row.at_least(width)[..width];
        line.copy_from_slice(tables[0].of_key(row, width));
        for lookup in &tables[1..] {
            line.iter_mut().zip(lookup.of_key(row, width)).for_each(|(sum, x)| *sum += x);
        }
        line.iter_mut().for_each(|sum| *sum *= scale);
        for lookup in learned {
            line.iter_mut().zip(lookup.of_bucket(row, width)).for_each(|(sum, x)| *sum += x);
        }
        // SAFETY: the caller's; the output has a row of `width` for each row.
        unsafe { T::narrow::<S>(line, std::slice::from_raw_parts_mut(self.y.pointer().add(row * width), width)) };
    }
}
