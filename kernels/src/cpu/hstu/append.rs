//! `PagedKvAppend` on the CPU.
//!
//! The slots of a page that follow one another are contiguous, for keys and for values, and so are the rows that go
//! there: the whole operator is a list of block copies, or of blocks to quantise.

use half::f16;

use crate::common::parallel::{Parallel, run_once};
use crate::cpu::common::copy::CHUNK_BYTES;
use crate::cpu::common::scratch::Scratch;
use crate::cpu::common::simd::{Simd, Work, run_on};
use crate::cpu::common::{Isa, Shared};
use crate::hstu::batch::Run;
use crate::{CheckedAppend, Element, InputError, KvFormat, PagedKvAppend, QuantisedPool};

impl<T: Element> PagedKvAppend<'_, T> {
    /// Checks, then writes the new history rows into `pool`. After an error the pool is as it was.
    pub fn run(&self, pool: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        self.check_with(Some(pool.len()))?.run(pool, parallel)
    }
}

impl<T: Element> CheckedAppend<'_, T> {
    /// Writes the new history rows into `pool`, unless it has another length than the call says.
    pub fn run(&self, pool: &mut [T], parallel: &dyn Parallel) -> Result<(), InputError> {
        let (op, runs) = (self.op, &self.runs);
        op.check_pool(pool)?;
        let width = op.rows.width();
        let tasks = self.tasks(CHUNK_BYTES);
        let pool = Shared(pool.as_mut_ptr());
        let page_size = op.pages.page_size;
        run_once(parallel, tasks.len() - 1, &|task| {
            for run in &runs[tasks[task]..tasks[task + 1]] {
                for (which, from) in [op.key, op.value].into_iter().enumerate() {
                    let from = &from[run.row * width..(run.row + run.count) * width];
                    let to = ((run.page * 2 + which) * page_size + run.slot) * width;
                    // SAFETY: it was checked that the page lies in the pool, that the pool is as long as its shape says,
                    // and that no slot is in two runs; each run is in one task, which runs once.
                    unsafe { pool.pointer().add(to).copy_from_nonoverlapping(from.as_ptr(), from.len()) };
                }
            }
        });
        Ok(())
    }

    /// Where tasks begin and end: each is as many whole runs as make up a chunk, counted in rows, since a run is a page at most.
    fn tasks(&self, chunk_bytes: usize) -> Vec<usize> {
        let row_bytes = 2 * self.op.rows.width() * size_of::<T>();
        let mut tasks = vec![0];
        let mut rows = 0;
        for (at, run) in self.runs.iter().enumerate() {
            if rows * row_bytes >= chunk_bytes {
                tasks.push(at);
                rows = 0;
            }
            rows += run.count;
        }
        tasks.push(self.runs.len());
        tasks
    }
}

impl<T: HstuAppendElement> CheckedAppend<'_, T> {
    /// As [`run`](Self::run), into a quantised pool. Every instruction set gives the same bits.
    pub fn run_quantised(&self, pool: QuantisedPool<'_>, parallel: &dyn Parallel) -> Result<(), InputError> {
        self.run_quantised_with(Isa::detect(), pool, parallel)
    }

    /// As [`run_quantised`](Self::run_quantised), with the instruction set given.
    ///
    /// # Panics
    /// Where this CPU does not have `isa`.
    pub fn run_quantised_with(
        &self,
        isa: Isa,
        pool: QuantisedPool<'_>,
        parallel: &dyn Parallel,
    ) -> Result<(), InputError> {
        T::append_quantised(self, pool, isa, parallel)
    }
}

compiled! {
    /// An element type that the append to a quantised pool is compiled for.
    pub trait HstuAppendElement {
        fn append_quantised(
            call: &CheckedAppend<'_, Self>,
            pool: QuantisedPool<'_>,
            isa: Isa,
            parallel: &dyn Parallel,
        ) -> Result<(), InputError>;
    }
}

/// Quantising a number takes longer than copying it.
const QUANTISED_CHUNK_BYTES: usize = CHUNK_BYTES / 8;

fn append_quantised<T: Element>(
    call: &CheckedAppend<'_, T>,
    pool: QuantisedPool<'_>,
    isa: Isa,
    parallel: &dyn Parallel,
) -> Result<(), InputError> {
    assert!(Isa::available().contains(&isa), "{isa:?} is not available on this CPU");
    call.op.check_quantised(&pool)?;
    let QuantisedPool { format, codes, scales } = pool;
    let tasks = call.tasks(QUANTISED_CHUNK_BYTES);
    let work = Quantise {
        op: call.op,
        runs: &call.runs,
        tasks: &tasks,
        format,
        codes: Shared(codes.as_mut_ptr()),
        scales: Shared(scales.as_mut_ptr()),
    };
    // SAFETY: `isa` is available. It was checked that the pages lie in the pool, that the pool and its scales are as long as
    // their shapes say, and that no slot is in two runs; each run is in one task, which runs once.
    run_once(parallel, tasks.len() - 1, &|task| unsafe { run_on(isa, &work, task) });
    Ok(())
}

/// Runs to quantise, and where to.
struct Quantise<'a, T> {
    op: &'a PagedKvAppend<'a, T>,
    runs: &'a [Run],
    tasks: &'a [usize],
    format: KvFormat,
    codes: Shared<u8>,
    scales: Shared<f16>,
}

impl<T: Element> Work for Quantise<'_, T> {
    /// # Safety
    /// The CPU has the instructions of `S`; the blocks of the task's runs lie inside codes and scales, and nothing else uses
    /// them meanwhile.
    #[inline(always)]
    unsafe fn run<S: Simd>(&self, task: usize, scratch: &mut Scratch) {
        let (op, heads, size) = (self.op, self.op.rows.heads, self.op.rows.head_size);
        let (width, scale) = (self.format.pool_width(size), self.format.scales_width());
        let numbers = &mut scratch.row.at_least(size)[..size];
        for run in &self.runs[self.tasks[task]..self.tasks[task + 1]] {
            for (which, from) in [op.key, op.value].into_iter().enumerate() {
                let first = ((run.page * 2 + which) * op.pages.page_size + run.slot) * heads;
                let blocks = from[run.row * heads * size..][..run.count * heads * size].chunks_exact(size);
                for (block, from) in (first..).zip(blocks) {
                    // SAFETY: the caller's.
                    unsafe {
                        T::widen::<S>(from, numbers);
                        let codes = std::slice::from_raw_parts_mut(self.codes.pointer().add(block * width), width);
                        let scales = std::slice::from_raw_parts_mut(self.scales.pointer().add(block * scale), scale);
                        self.format.quantise(numbers, codes, scales);
                    }
                }
            }
        }
    }
}
