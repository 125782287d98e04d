//! `BlockLinear` on the CPU.
//!
//! Weights become f32 in registers, and inputs stay as they are. Few rows, as decoding has them, are multiplied with weights as
//! these are read. For more rows a few rows of the matrix are first written out as f32. An output has the same bits either way:
//! its products are added in the same order.

use std::ops::Range;

use crate::InputError;
use crate::common::parallel::{Parallel, run_once};
use crate::cpu::Isa;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::shared::Shared;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::llm::block_linear::{BLOCK, BlockLinear, CodeBits, OUTPUT_BLOCK};

/// Rows of x that are multiplied as weights are read; for more, weights are written out first.
const FEW: usize = 8;
/// Rows of x that a task has at most: they stay in the second-level cache.
const PANEL: usize = if cfg!(miri) { 12 } else { 128 };
/// Weights that a task has: a few microseconds for one row.
const TASK: usize = if cfg!(miri) { 1 << 10 } else { 32 << 10 };
/// How many times the rows at hand weights are asked for ahead of their use.
const AHEAD: usize = 4;
/// Sums that are made of vectors at once.
const SUMS: usize = 16;
/// Rows of the matrix, and rows of x, that are multiplied at once where weights are written out.
const SIDE: usize = 4;

impl BlockLinear<'_> {
    /// Checks, then computes `y` (`[T, N]`) with the best instruction set, and in `maxima` (`[T, N / 32]`, rounded up) the largest
    /// of each [`OUTPUT_BLOCK`] outputs of a row; NaN is no maximum, and where there is nothing else it is −∞. After an error
    /// both are as they were.
    pub fn run(&self, y: &mut [f32], maxima: Option<&mut [f32]>, parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_with(Isa::detect(), y, maxima, parallel)
    }

    /// As [`run`](Self::run), with the instruction set given. The bits of an output may differ between sets, and within one set
    /// depend on nothing but its row of x and its row of the matrix.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_with(
        &self,
        isa: Isa,
        y: &mut [f32],
        maxima: Option<&mut [f32]>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
        self.check(y.len(), maxima.as_ref().map(|maxima| maxima.len()))?;
        if y.is_empty() {
            return Ok(());
        }
        let outputs = (TASK / self.inner.max(1)).next_multiple_of(OUTPUT_BLOCK).max(OUTPUT_BLOCK);
        let parts = self.width.div_ceil(outputs);
        let maxima = maxima.map(|maxima| Shared(maxima.as_mut_ptr()));
        let work = Products { op: self, outputs, parts, y: Shared(y.as_mut_ptr()), maxima };
        // SAFETY: the set is available; each task runs once, on outputs of its own.
        run_once(parallel, parts * self.rows.div_ceil(PANEL), &|task| unsafe { run_on(isa, &work, task) });
        Ok(())
    }
}

/// The outputs of a call, in tasks of [`PANEL`] rows and some columns.
struct Products<'a> {
    op: &'a BlockLinear<'a>,
    /// The columns of a task, whole blocks of them.
    outputs: usize,
    /// The tasks that all columns make.
    parts: usize,
    y: Shared<f32>,
    maxima: Option<Shared<f32>>,
}

impl Work for Products<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (panel, part) = (task / self.parts, task % self.parts);
        let rows = panel * PANEL..self.op.rows.min((panel + 1) * PANEL);
        let outputs = part * self.outputs..self.op.width.min((part + 1) * self.outputs);
        // SAFETY: the caller's; no other task has these rows and columns.
        unsafe {
            match self.op.bits {
                CodeBits::Four => self.task::<S, Four>(rows.clone(), outputs.clone(), scratch),
                CodeBits::Eight => self.task::<S, Eight>(rows.clone(), outputs.clone(), scratch),
            }
            if let Some(maxima) = self.maxima {
                self.find_maxima::<S>(maxima.pointer(), rows, outputs);
            }
        }
    }
}

/// Codes as numbers. Each call gives two vectors: their weights are multiplied with two vectors of x, arranged alike.
trait Codes {
    const BYTES: usize;

    /// The codes of `2 · LANES` columns, less 2^(bits - 1).
    ///
    /// # Safety
    /// As for [`Simd`]; `block` is good for all of its bytes, and has more than `pair` times as many columns.
    unsafe fn pair<S: Simd>(block: *const u8, pair: usize) -> [S::V; 2];

    /// Rows of x in the order of the codes: as they are, or written to `to`.
    ///
    /// # Safety
    /// As for [`Simd`]; `x` is a multiple of [`BLOCK`] long, and `to` as long.
    unsafe fn arranged<S: Simd>(x: &[f32], to: &mut [f32]) -> *const f32;

    /// The numbers of x that are written.
    fn written(len: usize) -> usize;
}

/// Codes of 4 bits. A vector has the low halves of bytes, the other one the high halves: so x has every second number first.
struct Four;

impl Codes for Four {
    const BYTES: usize = BLOCK / 2;

    #[inline(always)]
    unsafe fn pair<S: Simd>(block: *const u8, pair: usize) -> [S::V; 2] {
        // SAFETY: the caller's.
        unsafe { S::halves_less_8(block.add(pair * S::LANES)) }
    }

    #[inline(always)]
    unsafe fn arranged<S: Simd>(x: &[f32], to: &mut [f32]) -> *const f32 {
        let to = &mut to[..x.len()];
        for at in (0..x.len()).step_by(2 * S::LANES) {
            // SAFETY: the caller's; a block is a multiple of two vectors.
            unsafe {
                let (from, to) = (x.as_ptr().add(at), to.as_mut_ptr().add(at));
                let [even, odd] = S::even_and_odd(S::load(from), S::load(from.add(S::LANES)));
                S::store(to, even);
                S::store(to.add(S::LANES), odd);
            }
        }
        to.as_ptr()
    }

    fn written(len: usize) -> usize {
        len
    }
}

/// Codes of 8 bits, in order.
struct Eight;

impl Codes for Eight {
    const BYTES: usize = BLOCK;

    #[inline(always)]
    unsafe fn pair<S: Simd>(block: *const u8, pair: usize) -> [S::V; 2] {
        // SAFETY: the caller's.
        unsafe {
            let (from, middle) = (block.add(2 * pair * S::LANES), S::splat(-128.0));
            [S::add(S::widen_u8(from), middle), S::add(S::widen_u8(from.add(S::LANES)), middle)]
        }
    }

    #[inline(always)]
    unsafe fn arranged<S: Simd>(x: &[f32], _to: &mut [f32]) -> *const f32 {
        x.as_ptr()
    }

    fn written(_len: usize) -> usize {
        0
    }
}

/// One row of the matrix.
#[derive(Clone, Copy)]
struct MatrixRow {
    codes: *const u8,
    scales: *const f32,
    offsets: *const f32,
    /// From the offset of a block to that of the next: 0 where there are none.
    step: usize,
}

impl MatrixRow {
    /// The weights of `2 · LANES` columns, in the order of the codes.
    ///
    /// # Safety
    /// As for [`Codes::pair`]; the row has more than `block` blocks.
    #[inline(always)]
    unsafe fn weights<S: Simd, C: Codes>(self, block: usize, pair: usize) -> [S::V; 2] {
        // SAFETY: the caller's.
        unsafe {
            let scale = S::splat(*self.scales.add(block));
            let offset = S::splat(*self.offsets.add(block * self.step));
            let [first, second] = C::pair::<S>(self.codes.add(block * C::BYTES), pair);
            [S::fma(first, scale, offset), S::fma(second, scale, offset)]
        }
    }

    /// Asks for a part of what comes [`AHEAD`] times `R` rows later. In all blocks of this row together: for all of `R` rows.
    ///
    /// # Safety
    /// As for [`Simd`].
    #[inline(always)]
    unsafe fn prefetch<S: Simd, C: Codes, const R: usize>(self, block: usize, blocks: usize) {
        let ahead = AHEAD * R * blocks + R * block;
        // SAFETY: the caller's; any address will do.
        unsafe {
            for line in (0..R * C::BYTES).step_by(64) {
                S::prefetch(self.codes.wrapping_add(ahead * C::BYTES + line));
            }
            S::prefetch(self.scales.wrapping_add(ahead).cast());
            S::prefetch(self.offsets.wrapping_add(ahead * self.step).cast());
        }
    }
}

impl Products<'_> {
    /// # Safety
    /// The CPU has the instructions of `S`; no other task has these rows and columns.
    #[inline(always)]
    unsafe fn task<S: Simd, C: Codes>(&self, rows: Range<usize>, outputs: Range<usize>, scratch: &mut Scratch) {
        let inner = self.op.inner;
        let x = &self.op.x[rows.start * inner..rows.end * inner];
        // SAFETY: the caller's; x has `rows` rows.
        unsafe {
            let x = C::arranged::<S>(x, scratch.queries.at_least(C::written(x.len())));
            let few = |first: usize| (x.add(first * inner), rows.start + first);
            match rows.len() {
                1 => self.few::<S, C, 4, 1>(few(0), outputs),
                2 => self.few::<S, C, 4, 2>(few(0), outputs),
                3 => self.few::<S, C, 4, 3>(few(0), outputs),
                4 => self.few::<S, C, 4, 4>(few(0), outputs),
                5 => self.few::<S, C, 2, 5>(few(0), outputs),
                6 => self.few::<S, C, 2, 6>(few(0), outputs),
                7 => self.few::<S, C, 2, 7>(few(0), outputs),
                FEW => self.few::<S, C, 2, FEW>(few(0), outputs),
                _ => self.many::<S, C>(x, rows, outputs, scratch.weights.at_least(SIDE * inner)),
            }
        }
    }

    /// The products of `M` rows of x with weights as they are read, of `R` rows of the matrix at once.
    ///
    /// # Safety
    /// As for [`Self::task`]; `x` has `M` rows, the first of which is `row` of the output.
    #[inline(always)]
    unsafe fn few<S: Simd, C: Codes, const R: usize, const M: usize>(
        &self,
        (x, row): (*const f32, usize),
        outputs: Range<usize>,
    ) {
        let (inner, blocks) = (self.op.inner, self.op.inner / BLOCK);
        // As many rows of the matrix as make a vector of sums.
        let group = SUMS / (R * M) * R;
        for first in outputs.clone().step_by(group) {
            // SAFETY: the caller's.
            unsafe {
                let mut all = [S::splat(0.0); SUMS];
                for (start, all) in (first..).step_by(R).zip(all.chunks_exact_mut(R * M)) {
                    let matrix: [MatrixRow; R] = self.matrix_rows::<C, R>(start, outputs.end);
                    let mut sums = [[S::splat(0.0); M]; R];
                    for block in 0..blocks {
                        matrix[0].prefetch::<S, C, R>(block, blocks);
                        for (matrix, sums) in matrix.iter().zip(&mut sums) {
                            for pair in 0..BLOCK / (2 * S::LANES) {
                                let [a, b] = matrix.weights::<S, C>(block, pair);
                                let x = x.add(block * BLOCK + pair * 2 * S::LANES);
                                for (m, sum) in sums.iter_mut().enumerate() {
                                    let x = x.add(m * inner);
                                    *sum = S::fma(b, S::load(x.add(S::LANES)), S::fma(a, S::load(x), *sum));
                                }
                            }
                        }
                    }
                    all.copy_from_slice(sums.as_flattened());
                }
                self.store::<S, M>(&all, first..outputs.end.min(first + group), row);
            }
        }
    }

    /// The products of any number of rows of x: writes out the weights of [`SIDE`] rows of the matrix for all of them.
    ///
    /// # Safety
    /// As for [`Self::task`]; `x` has the rows, and `weights` room for [`SIDE`] rows of the matrix.
    #[inline(always)]
    unsafe fn many<S: Simd, C: Codes>(
        &self,
        x: *const f32,
        rows: Range<usize>,
        outputs: Range<usize>,
        weights: &mut [f32],
    ) {
        let inner = self.op.inner;
        for first in outputs.clone().step_by(SIDE) {
            // SAFETY: the caller's.
            unsafe {
                let matrix = self.matrix_rows::<C, SIDE>(first, outputs.end);
                for (row, to) in matrix.into_iter().zip(weights.chunks_exact_mut(inner.max(1))) {
                    for (block, to) in to.chunks_exact_mut(BLOCK).enumerate() {
                        for pair in 0..BLOCK / (2 * S::LANES) {
                            let [a, b] = row.weights::<S, C>(block, pair);
                            let to = to.as_mut_ptr().add(pair * 2 * S::LANES);
                            S::store(to, a);
                            S::store(to.add(S::LANES), b);
                        }
                    }
                }
                let weights = weights.as_ptr();
                let columns = first..outputs.end.min(first + SIDE);
                for m in (0..rows.len()).step_by(SIDE) {
                    let (x, row) = (x.add(m * inner), rows.start + m);
                    match rows.len() - m {
                        1 => self.tile::<S, 1>(x, weights, columns.clone(), row),
                        2 => self.tile::<S, 2>(x, weights, columns.clone(), row),
                        3 => self.tile::<S, 3>(x, weights, columns.clone(), row),
                        _ => self.tile::<S, SIDE>(x, weights, columns.clone(), row),
                    }
                }
            }
        }
    }

    /// The products of `M` rows of x with weights that are written out.
    ///
    /// # Safety
    /// As for [`Self::few`]; `weights` has [`SIDE`] rows.
    #[inline(always)]
    unsafe fn tile<S: Simd, const M: usize>(
        &self,
        x: *const f32,
        weights: *const f32,
        columns: Range<usize>,
        row: usize,
    ) {
        let inner = self.op.inner;
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[S::splat(0.0); M]; SIDE];
            for at in (0..inner).step_by(S::LANES) {
                let x: [S::V; M] = std::array::from_fn(|m| S::load(x.add(m * inner + at)));
                for (r, sums) in sums.iter_mut().enumerate() {
                    let weights = S::load(weights.add(r * inner + at));
                    for (sum, x) in sums.iter_mut().zip(x) {
                        *sum = S::fma(weights, x, *sum);
                    }
                }
            }
            let mut all = [S::splat(0.0); SUMS];
            all[..SIDE * M].copy_from_slice(sums.as_flattened());
            self.store::<S, M>(&all, columns, row);
        }
    }

    /// Some rows of the matrix, from `first` on. Those from `end` on are the one before it: what is computed of them is not
    /// stored.
    #[inline(always)]
    fn matrix_rows<C: Codes, const R: usize>(&self, first: usize, end: usize) -> [MatrixRow; R] {
        static NONE: f32 = 0.0;
        let blocks = self.op.inner / BLOCK;
        let row = |row: usize| {
            let at = row.min(end - 1) * blocks;
            let (offsets, step) = self.op.offsets.map_or((&raw const NONE, 0), |offsets| (offsets[at..].as_ptr(), 1));
            let codes = self.op.codes[at * C::BYTES..].as_ptr();
            MatrixRow { codes, scales: self.op.scales[at..].as_ptr(), offsets, step }
        };
        // Not by `from_fn`, which became a call with copies.
        let mut rows = [row(first); R];
        for (r, to) in rows.iter_mut().enumerate().skip(1) {
            *to = row(first + r);
        }
        rows
    }

    /// Adds up vectors and stores the sums: of each column in turn those of `M` rows, from `row` on.
    ///
    /// # Safety
    /// As for [`Self::task`]; the columns are at most `SUMS / M`.
    #[inline(always)]
    unsafe fn store<S: Simd, const M: usize>(&self, all: &[S::V; SUMS], columns: Range<usize>, row: usize) {
        let mut sums = [0.0; SUMS];
        // SAFETY: the caller's; y has a place for each row and column.
        unsafe {
            S::store(sums.as_mut_ptr(), S::sums(all));
            if S::LANES < SUMS {
                let mut others = *all;
                others.rotate_left(S::LANES);
                S::store(sums.as_mut_ptr().add(S::LANES), S::sums(&others));
            }
            for (column, sums) in columns.zip(sums.chunks_exact(M)) {
                let bias = self.op.bias.map_or(0.0, |bias| bias[column]);
                for (m, sum) in sums.iter().enumerate() {
                    *self.y.pointer().add((row + m) * self.op.width + column) = sum + bias;
                }
            }
        }
    }

    /// Finds the largest outputs of a task: they are still in a cache.
    ///
    /// # Safety
    /// As for [`Self::task`], whose outputs are there; `maxima` has a place for each block of each row.
    #[inline(always)]
    unsafe fn find_maxima<S: Simd>(&self, maxima: *mut f32, rows: Range<usize>, outputs: Range<usize>) {
        let (width, blocks) = (self.op.width, self.op.width.div_ceil(OUTPUT_BLOCK));
        for row in rows {
            for first in outputs.clone().step_by(OUTPUT_BLOCK) {
                let columns = OUTPUT_BLOCK.min(outputs.end - first);
                // SAFETY: the caller's.
                unsafe {
                    let y = self.y.pointer().add(row * width + first);
                    let mut most = S::splat(f32::NEG_INFINITY);
                    for at in (0..columns / S::LANES * S::LANES).step_by(S::LANES) {
                        // In this order NaN stays out.
                        most = S::max(S::load(y.add(at)), most);
                    }
                    let mut most = S::reduce_max(most);
                    for at in columns / S::LANES * S::LANES..columns {
                        let output = *y.add(at);
                        most = if output > most { output } else { most };
                    }
                    *maxima.add(row * blocks + first / OUTPUT_BLOCK) = most;
                }
            }
        }
    }
}
