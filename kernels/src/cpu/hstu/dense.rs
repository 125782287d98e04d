//! The dense operators of an HSTU block on the CPU.

use super::gemm::Product;
use crate::common::parallel::{Parallel, run_once};
use crate::cpu::common::copy::CHUNK_BYTES;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::cpu::common::{Isa, Shared};
use crate::{Element, GateNorm, HstuGate, HstuNorm, HstuOutput, HstuProject, InputError, Taken};

/// Independent sums, the same number for every instruction set.
const SUMS: usize = 16;

compiled! {
    /// An element type that [`HstuNorm`], [`HstuProject`], [`HstuGate`] and [`HstuOutput`] are compiled for.
    pub trait HstuDenseElement {
        fn hstu_norm(op: &HstuNorm<'_, Self>, isa: Isa, y: &mut [Self], parallel: &dyn Parallel) -> Result<(), InputError>;

        fn hstu_project(
            op: &HstuProject<'_, Self>,
            isa: Isa,
            outputs: [&mut [Self]; 4],
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;

        fn hstu_gate(op: &HstuGate<'_, Self>, isa: Isa, y: &mut [Self], parallel: &dyn Parallel) -> Result<(), InputError>;

        fn hstu_output(
            op: &HstuOutput<'_, Self>,
            isa: Isa,
            output: &mut [Self],
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;
    }
}

impl<T: HstuDenseElement> HstuNorm<'_, T> {
    /// Checks, then computes `y` (`[R, E]`). After an error it is as it was.
    pub fn run(&self, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::hstu_norm(self, isa, y, parallel)
    }
}

fn hstu_norm<T: Element>(
    op: &HstuNorm<'_, T>,
    isa: Isa,
    y: &mut [T],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    op.check(y.len())?;
    by_rows(isa, op.rows, op.width, NormRows { op, y: Shared(y.as_mut_ptr()) }, parallel);
    Ok(())
}

impl<T: HstuDenseElement> HstuProject<'_, T> {
    /// Checks, then computes `[u, v, q, k]`, each `[R, H·D]`. After an error they are as they were.
    pub fn run(&self, outputs: [&mut [T]; 4], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), outputs, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of a result may differ between sets, and within
    /// one set depend on nothing but the row's own inputs.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, outputs: [&mut [T]; 4], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::hstu_project(self, isa, outputs, parallel)
    }
}

fn hstu_project<T: Element>(
    op: &HstuProject<'_, T>,
    isa: Isa,
    outputs: [&mut [T]; 4],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    op.check(outputs.each_ref().map(|output| output.len()))?;
    expect_available(isa);
    let product = Product {
        rows: op.rows,
        depth: op.width,
        columns: 4 * op.part(),
        x: op.x,
        weight: op.weight,
        bias: op.bias,
        silu: op.silu.outputs() * op.part(),
        residual: None,
        taken: None,
    };
    product.run(isa, outputs, parallel);
    Ok(())
}

impl<T: HstuDenseElement> HstuGate<'_, T> {
    /// Checks, then computes `y` (`[S, H·D]`, or `[S, 3·H·D]` with `concat`). After an error it is as it was.
    pub fn run(&self, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, y: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::hstu_gate(self, isa, y, parallel)
    }
}

fn hstu_gate<T: Element>(
    op: &HstuGate<'_, T>,
    isa: Isa,
    y: &mut [T],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    op.check(y.len())?;
    by_rows(isa, op.rows, op.width(), GateRows { op, y: Shared(y.as_mut_ptr()) }, parallel);
    Ok(())
}

impl<T: HstuDenseElement> HstuOutput<'_, T> {
    /// Checks, then computes `output` (`[S, E]`). After an error it is as it was.
    pub fn run(&self, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), output, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given; see [`HstuProject::run_with`].
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(&self, isa: Isa, output: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        T::hstu_output(self, isa, output, parallel)
    }
}

fn hstu_output<T: Element>(
    op: &HstuOutput<'_, T>,
    isa: Isa,
    output: &mut [T],
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    op.check(output.len())?;
    expect_available(isa);
    let product = Product {
        rows: op.rows,
        depth: op.inner,
        columns: op.width,
        x: op.y,
        weight: op.weight,
        bias: op.bias,
        silu: 0,
        residual: op.residual,
        taken: op.taken,
    };
    product.run(isa, [output], parallel);
    Ok(())
}

pub(super) fn expect_available(isa: Isa) {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
}

/// Something that is done row by row, each of which writes its own part of the output.
pub(super) trait Rows: Sync {
    /// # Safety
    /// The CPU has the instructions of `S`; no other task does this row.
    unsafe fn row<S: Simd>(&self, row: usize, scratch: &mut Scratch);
}

struct Chunks<R> {
    rows: usize,
    chunk: usize,
    each: R,
}

impl<R: Rows> Work for Chunks<R> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        for row in task * self.chunk..self.rows.min((task + 1) * self.chunk) {
            // SAFETY: the caller's; a row is in one task.
            unsafe { self.each.row::<S>(row, scratch) };
        }
    }
}

pub(super) fn by_rows(isa: Isa, rows: usize, width: usize, each: impl Rows, parallel: &dyn Parallel) {
    expect_available(isa);
    if width == 0 {
        return;
    }
    let chunk = (CHUNK_BYTES / size_of::<f32>() / width).max(1);
    let work = Chunks { rows, chunk, each };
    // SAFETY: the set is available; each task runs once, on rows of its own.
    run_once(parallel, rows.div_ceil(chunk), &|task| unsafe { run_on(isa, &work, task) });
}

struct NormRows<'a, T> {
    op: &'a HstuNorm<'a, T>,
    y: Shared<T>,
}

impl<T: Element> Rows for NormRows<'_, T> {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, scratch: &mut Scratch) {
        let HstuNorm { width, x, weight, bias, epsilon, .. } = *self.op;
        let line = &mut scratch.row.at_least(2 * width)[..2 * width];
        let (line, learned) = line.split_at_mut(width);
        // SAFETY: the caller's; the output has a row of `width` for each row of x.
        unsafe {
            T::widen::<S>(&x[row * width..(row + 1) * width], line);
            norm(line, epsilon);
            T::widen::<S>(weight, learned);
            line.iter_mut().zip(&*learned).for_each(|(value, weight)| *value *= weight);
            T::widen::<S>(bias, learned);
            line.iter_mut().zip(&*learned).for_each(|(value, bias)| *value += bias);
            T::narrow::<S>(line, std::slice::from_raw_parts_mut(self.y.pointer().add(row * width), width));
        }
    }
}

struct GateRows<'a, T> {
    op: &'a HstuGate<'a, T>,
    y: Shared<T>,
}

impl<T: Element> Rows for GateRows<'_, T> {
    #[inline(always)]
    unsafe fn row<S: Simd>(&self, row: usize, scratch: &mut Scratch) {
        let (op, width) = (self.op, self.op.width());
        let from = Taken::source(op.taken, row) * width;
        let (attended, u) = (&op.attended[from..][..width], &op.u[from..][..width]);
        let out_width = if op.concat { 3 * width } else { width };
        // SAFETY: the output has a row of `out_width` for each row, and only this task has this one.
        let y = unsafe { std::slice::from_raw_parts_mut(self.y.pointer().add(row * out_width), out_width) };
        let y = if op.concat {
            let (front, y) = y.split_at_mut(2 * width);
            front[..width].copy_from_slice(u);
            front[width..].copy_from_slice(attended);
            y
        } else {
            y
        };
        let line = &mut scratch.row.at_least(2 * width)[..2 * width];
        let (line, other) = line.split_at_mut(width);
        // SAFETY: the caller's instructions.
        unsafe {
            T::widen::<S>(attended, line);
            if op.norm == GateNorm::Group {
                for (head, part) in line.chunks_exact_mut(op.head_size).enumerate() {
                    norm(part, op.epsilon);
                    let (weight, bias) = (op.weight[head].to_f32(), op.bias[head].to_f32());
                    part.iter_mut().for_each(|value| *value = *value * weight + bias);
                }
            } else {
                norm(line, op.epsilon);
                T::widen::<S>(op.weight, other);
                line.iter_mut().zip(&*other).for_each(|(value, weight)| *value *= weight);
                T::widen::<S>(op.bias, other);
                line.iter_mut().zip(&*other).for_each(|(value, bias)| *value += bias);
            }
            T::widen::<S>(u, other);
            line.iter_mut().zip(&*other).for_each(|(value, u)| *value *= u);
            T::narrow::<S>(line, y);
        }
    }
}

/// The row less its mean, over its standard deviation.
#[inline(always)]
fn norm(row: &mut [f32], epsilon: f32) {
    let count = row.len() as f32;
    let mean = sum(row, |x| x) / count;
    let variance = sum(row, |x| (x - mean) * (x - mean)) / count;
    let scale = 1.0 / (variance + epsilon).sqrt();
    row.iter_mut().for_each(|x| *x = (*x - mean) * scale);
}

#[inline(always)]
pub(super) fn sum(row: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; SUMS];
    let (chunks, rest) = row.as_chunks::<SUMS>();
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += f(*x);
        }
    }
    sums.iter_mut().zip(rest).for_each(|(sum, x)| *sum += f(*x));
    sums.iter().sum()
}
