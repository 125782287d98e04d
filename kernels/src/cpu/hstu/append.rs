//! `PagedKvAppend` on the CPU.
//!
//! The slots of a page that follow one another are contiguous, for keys and for values, and so are the rows that go
//! there: the whole operator is a list of block copies.

use crate::common::parallel::{Parallel, run_once};
use crate::cpu::common::Shared;
use crate::cpu::common::copy::CHUNK_BYTES;
use crate::{CheckedAppend, Element, InputError, PagedKvAppend};

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
        let row_bytes = 2 * width * size_of::<T>();
        // A task is as many whole runs as make up a chunk: counted in rows, since a run is a page at most.
        let mut tasks = vec![0];
        let mut rows = 0;
        for (at, run) in runs.iter().enumerate() {
            if rows * row_bytes >= CHUNK_BYTES {
                tasks.push(at);
                rows = 0;
            }
            rows += run.count;
        }
        tasks.push(runs.len());

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
}
