//! Rows times the rows of a weight, for the dense operators: bias, SiLU and residual on the way out.
//!
//! As in the attention kernel, rows are in the lanes of vectors, and a lane adds up its products in the order of the
//! inner dimension: the bits of a row do not depend on the other rows. So x is transposed once for each
//! call; the weight is read in place, which costs nothing where rows are few.

// Loops over const ranges with indices on both sides are what unrolls into registers, and what reads as arithmetic.
#![allow(clippy::needless_range_loop)]

use crate::common::parallel::{Parallel, Serial, run_once};
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::{Simd, Work, groups, run_on};
use crate::cpu::common::{Isa, Shared};
use crate::{Element, Taken};

/// Columns of the output that a task has, a multiple of what `multiply` takes at once, and rows.
const COLUMNS: usize = 48;
const ROWS: usize = 256;

/// How much of the inner dimension is gone through at once: what a group of rows and a tile of the weight have of it
/// stays in the nearest cache.
const DEPTH: usize = 96;

/// Products below which handing work to another thread costs more than it saves.
const SERIAL_BELOW: usize = 1 << 18;

/// x `[rows, depth]` times weightᵀ (`[columns, depth]`).
pub(super) struct Product<'a, T> {
    pub rows: usize,
    pub depth: usize,
    pub columns: usize,
    pub x: &'a [T],
    pub weight: &'a [T],
    pub bias: Option<&'a [T]>,
    /// Columns from the first on that go through SiLU.
    pub silu: usize,
    pub residual: Option<&'a [T]>,
    /// Of the residual.
    pub taken: Option<Taken<'a>>,
}

impl<T: Element> Product<'_, T> {
    /// Computes the columns into the outputs, which have an equal share each. Lengths were checked.
    pub fn run<const N: usize>(&self, isa: Isa, outputs: [&mut [T]; N], parallel: &dyn Parallel) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        let products = self.rows.saturating_mul(self.depth).saturating_mul(self.columns);
        let parallel = if products < SERIAL_BELOW { &Serial } else { parallel };
        // Whole vectors of any set.
        let padded = self.rows.next_multiple_of(16);
        let mut turned: Vec<f32> = vec![0.0; padded * self.depth];
        let turn = Turn { product: self, to: Shared(turned.as_mut_ptr()) };
        let row_blocks = self.rows.div_ceil(ROWS);
        // SAFETY: `isa` is available, as its caller checked; there is room for every row and the lanes beside it, a
        // block of rows is one task's, and each task runs once.
        run_once(parallel, row_blocks, &|task| unsafe { run_on(isa, &turn, task) });
        let outputs = outputs.map(|output| Shared(output.as_mut_ptr()));
        let multiply = Multiply { product: self, turned: &turned, outputs: &outputs };
        let tasks = row_blocks * self.columns.div_ceil(COLUMNS);
        // SAFETY: as above; a task writes its own rows and columns of the outputs, which are as long as was checked.
        run_once(parallel, tasks, &|task| unsafe { run_on(isa, &multiply, task) });
    }

    fn row_block(&self, block: usize) -> std::ops::Range<usize> {
        block * ROWS..self.rows.min((block + 1) * ROWS)
    }
}

/// Turns x about: group by group of rows, `[depth][lanes]`, where those of a group begin at its first row times the
/// depth.
struct Turn<'a, T> {
    product: &'a Product<'a, T>,
    to: Shared<f32>,
}

impl<T: Element> Work for Turn<'_, T> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let Product { depth, x, .. } = *self.product;
        let rows = self.product.row_block(task);
        let row = &mut scratch.row.at_least(depth)[..depth];
        for (group, vectors) in groups::<S>(rows.len()) {
            let (first, lanes) = (rows.start + group.start, vectors * S::LANES);
            for lane in 0..group.len() {
                // SAFETY: the caller's instructions. Every group before this one is full, so the lanes of this one fit
                // in front of those of the next, or of the end.
                unsafe {
                    T::widen::<S>(&x[(first + lane) * depth..(first + lane + 1) * depth], row);
                    let to = self.to.pointer().add(first * depth + lane);
                    for (k, value) in row.iter().enumerate() {
                        *to.add(k * lanes) = *value;
                    }
                }
            }
        }
    }
}

struct Multiply<'a, T> {
    product: &'a Product<'a, T>,
    turned: &'a [f32],
    outputs: &'a [Shared<T>],
}

impl<T: Element> Work for Multiply<'_, T> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let blocks = self.product.rows.div_ceil(ROWS);
        let rows = self.product.row_block(task % blocks);
        let first = task / blocks * COLUMNS;
        let columns = first..self.product.columns.min(first + COLUMNS);
        // SAFETY: the caller's.
        unsafe { self.block::<S>(rows, columns, scratch) };
    }
}

impl<T: Element> Multiply<'_, T> {
    /// # Safety
    /// The CPU has the instructions of `S`; no other task has these rows and columns of the outputs.
    #[inline(always)]
    unsafe fn block<S: Simd>(
        &self,
        rows: std::ops::Range<usize>,
        columns: std::ops::Range<usize>,
        scratch: &mut Scratch,
    ) {
        let Product { depth, weight, .. } = *self.product;
        let sums = scratch.outputs.at_least(COLUMNS * rows.len().next_multiple_of(S::LANES));
        sums.fill(0.0);
        // Columns beyond the last are computed from what was there and not used: nothing of NaN gets into other
        // columns.
        let tile = scratch.weights.at_least(COLUMNS * DEPTH);
        for start in (0..depth).step_by(DEPTH) {
            let deep = DEPTH.min(depth - start);
            for (line, column) in columns.clone().enumerate() {
                let at = column * depth + start;
                // SAFETY: the caller's instructions; what is asked for ahead may be anywhere.
                unsafe {
                    T::widen::<S>(&weight[at..at + deep], &mut tile[line * DEPTH..][..deep]);
                    // Rows of the weight are far from one another, so the CPU does not see by itself what comes next.
                    let next = weight.as_ptr().wrapping_add(at + DEPTH).cast::<u8>();
                    (0..DEPTH * size_of::<T>()).step_by(64).for_each(|byte| S::prefetch(next.wrapping_add(byte)));
                }
            }
            for (group, vectors) in groups::<S>(rows.len()) {
                let lanes = vectors * S::LANES;
                let step = Step {
                    x: self.turned[(rows.start + group.start) * depth + start * lanes..].as_ptr(),
                    tile: tile.as_ptr(),
                    sums: sums[group.start * COLUMNS..].as_mut_ptr(),
                    columns: columns.len(),
                    depth: deep,
                };
                // SAFETY: there are `deep` lines of `lanes` numbers, a tile of COLUMNS lines, and sums for as many.
                unsafe {
                    match vectors {
                        4 if S::MAX_VECTORS >= 4 => step.multiply::<S, 6, 4>(),
                        2 if S::MAX_VECTORS >= 4 => step.multiply::<S, 12, 2>(),
                        2 if S::MAX_VECTORS >= 2 => step.multiply::<S, 6, 2>(),
                        _ if S::MAX_VECTORS >= 2 => step.multiply::<S, 12, 1>(),
                        _ => step.multiply::<S, 6, 1>(),
                    }
                }
            }
        }
        for (group, vectors) in groups::<S>(rows.len()) {
            let lanes = vectors * S::LANES;
            let sums = &mut sums[group.start * COLUMNS..][..COLUMNS * lanes];
            // SAFETY: the caller's instructions.
            unsafe { self.add_bias::<S>(sums, &columns, lanes) };
            for lane in 0..group.len() {
                let row = &mut scratch.row.at_least(2 * COLUMNS)[..2 * COLUMNS];
                for (line, value) in row[..columns.len()].iter_mut().enumerate() {
                    *value = sums[line * lanes + lane];
                }
                // SAFETY: the caller's.
                unsafe { self.write::<S>(rows.start + group.start + lane, &columns, row) };
            }
        }
    }

    /// # Safety
    /// The CPU has the instructions of `S`.
    #[inline(always)]
    unsafe fn add_bias<S: Simd>(&self, sums: &mut [f32], columns: &std::ops::Range<usize>, lanes: usize) {
        for (line, column) in columns.clone().enumerate() {
            let bias = self.product.bias.map_or(0.0, |bias| bias[column].to_f32());
            for at in (line * lanes..(line + 1) * lanes).step_by(S::LANES) {
                let at = sums[at..at + S::LANES].as_mut_ptr();
                // SAFETY: a whole vector is there.
                unsafe {
                    let sum = S::add(S::load(at), S::splat(bias));
                    S::store(at, if column < self.product.silu { S::silu(sum) } else { sum });
                }
            }
        }
    }

    /// Writes the columns of one row, which stand at the front of `values`; there is as much room behind them.
    ///
    /// # Safety
    /// As for [`block`](Self::block).
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, row: usize, columns: &std::ops::Range<usize>, values: &mut [f32]) {
        let (values, residual) = values.split_at_mut(COLUMNS);
        let values = &mut values[..columns.len()];
        if let Some(from) = self.product.residual {
            let at = Taken::source(self.product.taken, row) * self.product.columns;
            let residual = &mut residual[..columns.len()];
            // SAFETY: the caller's instructions.
            unsafe { T::widen::<S>(&from[at + columns.start..at + columns.end], residual) };
            values.iter_mut().zip(residual).for_each(|(value, residual)| *value += *residual);
        }
        let part = self.product.columns / self.outputs.len();
        let mut column = columns.start;
        while column < columns.end {
            let (which, inside) = (column / part, column % part);
            let count = (part - inside).min(columns.end - column);
            // SAFETY: the output has `rows` rows of `part` columns, of which these are the task's own.
            unsafe {
                let to = self.outputs[which].pointer().add(row * part + inside);
                let to = std::slice::from_raw_parts_mut(to, count);
                T::narrow::<S>(&values[column - columns.start..][..count], to);
            }
            column += count;
        }
    }
}

/// A group of rows and a tile of the weight.
struct Step {
    /// `[depth][lanes]`.
    x: *const f32,
    /// `[COLUMNS][DEPTH]`.
    tile: *const f32,
    /// `[COLUMNS][lanes]`.
    sums: *mut f32,
    columns: usize,
    depth: usize,
}

impl Step {
    /// # Safety
    /// The CPU has the instructions of `S`; the pointers are good for those layouts, with lanes for `VECTORS` vectors;
    /// COLUMNS is a multiple of `AT_ONCE`.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const AT_ONCE: usize, const VECTORS: usize>(&self) {
        const { assert!(COLUMNS.is_multiple_of(AT_ONCE)) };
        let lanes = VECTORS * S::LANES;
        for column in (0..self.columns).step_by(AT_ONCE) {
            // SAFETY: the caller's.
            unsafe {
                let (tile, to) = (self.tile.add(column * DEPTH), self.sums.add(column * lanes));
                let mut sums = [[S::splat(0.0); VECTORS]; AT_ONCE];
                for c in 0..AT_ONCE {
                    for v in 0..VECTORS {
                        sums[c][v] = S::load(to.add(c * lanes + v * S::LANES));
                    }
                }
                for k in 0..self.depth {
                    let mut x = [S::splat(0.0); VECTORS];
                    for v in 0..VECTORS {
                        x[v] = S::load(self.x.add(k * lanes + v * S::LANES));
                    }
                    for c in 0..AT_ONCE {
                        let weight = S::splat(*tile.add(c * DEPTH + k));
                        for v in 0..VECTORS {
                            sums[c][v] = S::fma(weight, x[v], sums[c][v]);
                        }
                    }
                }
                for c in 0..AT_ONCE {
                    for v in 0..VECTORS {
                        S::store(to.add(c * lanes + v * S::LANES), sums[c][v]);
                    }
                }
            }
        }
    }
}
