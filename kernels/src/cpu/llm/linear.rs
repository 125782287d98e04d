//! `Linear` on the CPU.
//!
//! The plain form of what graphs for Hopper GPUs have: it is there for tests and for hosts without such a GPU, and takes no
//! trouble to be fast. A row of the weight becomes f32 once for all rows of x.

use std::ops::Range;

use super::glu::gated;
use crate::common::parallel::{Parallel, run_once};
use crate::cpu::Isa;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::{Element, InputError, Linear};

/// Columns of the output that a task has, a multiple of the lanes of every instruction set, and rows at most.
const COLUMNS: usize = 32;
const ROWS: usize = 128;
/// Independent sums, the same number for every instruction set.
const SUMS: usize = 16;

compiled! {
    /// An element type that [`Linear`] is compiled for.
    pub trait LinearElement {
        fn linear(
            op: &Linear<'_, Self>,
            isa: Isa,
            outputs: [&mut [Self]; 3],
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;
    }
}

impl<T: LinearElement> Linear<'_, T> {
    /// Checks, then computes the three outputs with the best instruction set; those without columns are empty. After an error
    /// they are as they were.
    pub fn run(&self, outputs: [&mut [T]; 3], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), outputs, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets, and within one set
    /// depend on nothing but its row of x, its row of the residual and the weights.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, outputs: [&mut [T]; 3], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::linear(self, isa, outputs, parallel)
    }
}

fn linear<T: Element>(
    op: &Linear<'_, T>,
    isa: Isa,
    outputs: [&mut [T]; 3],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
    op.check(outputs.each_ref().map(|output| output.len()))?;
    let width = op.width();
    if op.rows == 0 || width == 0 {
        return Ok(());
    }
    let mut x = vec![0.0; op.x.len()];
    let panels = op.rows.div_ceil(ROWS);
    let normed = Normed { op, to: Shared(x.as_mut_ptr()) };
    // SAFETY: the set is available; each task runs once, on rows of its own, which are as long as was checked.
    run_once(parallel, panels, &|task| unsafe { run_on(isa, &normed, task) });
    let parts = width.div_ceil(COLUMNS);
    let products = Products { op, x: &x, parts, outputs: outputs.map(|output| Shared(output.as_mut_ptr())) };
    // SAFETY: as above; a task writes its own rows and columns of the outputs.
    run_once(parallel, panels * parts, &|task| unsafe { run_on(isa, &products, task) });
    Ok(())
}

impl<T> Linear<'_, T> {
    fn panel(&self, panel: usize) -> Range<usize> {
        panel * ROWS..self.rows.min((panel + 1) * ROWS)
    }
}

/// The rows of x in f32, normed where there is a norm.
struct Normed<'a, T> {
    op: &'a Linear<'a, T>,
    to: Shared<f32>,
}

impl<T: Element> Work for Normed<'_, T> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, panel: usize, _: &mut Scratch) {
        let Linear { inner, x, norm, .. } = *self.op;
        for row in self.op.panel(panel) {
            // SAFETY: the caller's; there is room for all rows, and only this task has this one.
            let to = unsafe {
                let to = std::slice::from_raw_parts_mut(self.to.pointer().add(row * inner), inner);
                T::widen::<S>(&x[row * inner..][..inner], to);
                to
            };
            if let Some(norm) = norm {
                let scale = 1.0 / (dot(to, to) / inner as f32 + norm.epsilon).sqrt();
                for (x, weight) in to.iter_mut().zip(norm.weight) {
                    *x = T::from_f32(*x * scale * weight.to_f32()).to_f32();
                }
            }
        }
    }
}

/// The outputs of a call, in tasks of [`ROWS`] rows and [`COLUMNS`] columns.
struct Products<'a, T> {
    op: &'a Linear<'a, T>,
    /// `[T, K]`.
    x: &'a [f32],
    /// The tasks that all columns make.
    parts: usize,
    outputs: [Shared<T>; 3],
}

impl<T: Element> Work for Products<'_, T> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (op, width) = (self.op, self.op.width());
        let rows = op.panel(task / self.parts);
        let first = task % self.parts * COLUMNS;
        let columns = first..width.min(first + COLUMNS);
        // Of each row the sums of the columns, then those of the ups to these.
        let sums = &mut scratch.outputs.at_least(ROWS * 2 * COLUMNS)[..rows.len() * 2 * COLUMNS];
        let weight = &mut scratch.weights.at_least(op.inner)[..op.inner];
        let ups = if op.activation.is_some() { columns.clone() } else { 0..0 };
        let gates = columns.clone().zip(0..);
        for (column, place) in gates.chain(ups.map(|column| column + width).zip(COLUMNS..)) {
            // SAFETY: the caller's instructions.
            unsafe { T::widen::<S>(&op.weight[column * op.inner..][..op.inner], weight) };
            let bias = op.bias.map_or(0.0, |bias| bias[column].to_f32());
            for (row, sums) in rows.clone().zip(sums.chunks_exact_mut(2 * COLUMNS)) {
                sums[place] = dot(weight, &self.x[row * op.inner..][..op.inner]) + bias;
            }
        }
        for (row, sums) in rows.zip(sums.chunks_exact_mut(2 * COLUMNS)) {
            // SAFETY: the caller's; no other task has these rows and columns.
            unsafe { self.write::<S>(row, columns.clone(), sums) };
        }
    }
}

impl<T: Element> Products<'_, T> {
    /// Writes some columns of a row from its sums.
    ///
    /// # Safety
    /// The CPU has the instructions of `S`; no other task has these columns of the row.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, row: usize, columns: Range<usize>, sums: &mut [f32]) {
        let (values, others) = sums.split_at_mut(COLUMNS);
        if let Some(activation) = self.op.activation {
            // SAFETY: the caller's instructions; both halves hold whole vectors.
            unsafe { gated::<S>(activation, values, others, columns.len()) };
        }
        let values = &mut values[..columns.len()];
        if let Some(residual) = self.op.residual {
            let others = &mut others[..columns.len()];
            // SAFETY: the caller's instructions.
            unsafe { T::widen::<S>(&residual[row * self.op.width()..][columns.clone()], others) };
            values.iter_mut().zip(others).for_each(|(value, residual)| *value += *residual);
        }
        let mut start = 0;
        for (output, width) in self.outputs.iter().zip(self.op.widths().unwrap_or_default()) {
            let here = columns.start.max(start)..columns.end.min(start + width);
            if !here.is_empty() {
                // SAFETY: the caller's; the output has a row of `width` for each row of x.
                unsafe {
                    let to = output.pointer().add(row * width + here.start - start);
                    let values = &values[here.start - columns.start..][..here.len()];
                    T::narrow::<S>(values, std::slice::from_raw_parts_mut(to, here.len()));
                }
            }
            start += width;
        }
    }
}

/// The sum of the products, in an order of its own that is the same for every instruction set.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; SUMS];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<SUMS>(), b.as_chunks::<SUMS>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::reference;
    use crate::parallel::Serial;
    use crate::{GluActivation, RmsNorm};

    /// All types and sizes are in tests/llm_linear.rs; this is for Miri.
    #[test]
    fn every_part_of_a_call_is_as_in_the_reference() {
        let (rows, inner, columns) = (3, 37, 42);
        let numbers = |len: usize, seed: usize| -> Vec<f32> {
            (0..len).map(|at| ((at * 7 + seed) % 23) as f32 / 11.0 - 1.0).collect()
        };
        let (x, weight, bias) = (numbers(rows * inner, 1), numbers(columns * inner, 2), numbers(columns, 3));
        let (residual, norm) = (numbers(rows * columns, 4), numbers(inner, 5));
        let plain = Linear {
            rows,
            inner,
            columns,
            x: &x,
            weight: &weight,
            bias: Some(&bias),
            residual: None,
            norm: Some(RmsNorm { weight: &norm, epsilon: 1e-3 }),
            activation: None,
            cut: [0, 0],
        };
        let activation = Some(GluActivation::Silu);
        let calls = [
            Linear { residual: Some(&residual), ..plain },
            Linear { activation, residual: Some(&residual[..rows * columns / 2]), norm: None, ..plain },
            Linear { cut: [5, 1], ..plain },
        ];
        for call in calls {
            let expected = reference::linear(&call).unwrap();
            for isa in Isa::available() {
                let mut y = call.widths().unwrap().map(|width| vec![f32::NAN; rows * width]);
                call.run_with(isa, y.each_mut().map(|y| &mut y[..]), &Serial).unwrap();
                let found = (0..rows).flat_map(|row| {
                    let widths = call.widths().unwrap();
                    y.iter().zip(widths).flat_map(move |(y, width)| y[row * width..][..width].to_vec())
                });
                for (found, expected) in found.zip(&expected) {
                    assert!((f64::from(found) - expected).abs() < 1e-4, "{isa:?}: {found} {expected} {call:?}");
                }
            }
        }
    }
}
