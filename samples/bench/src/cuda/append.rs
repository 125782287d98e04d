//! PagedKvAppend in bf16, against a copy within the device's memory.

use pagoda::Result;
use pagoda_kernels::cuda::{Append, Cache, Rows, Type};

use super::{Bench, ceiling, failed, offsets, scattered};
use crate::{Report, Row};

const USERS: usize = 8;
const HEADS: usize = 4;
const NEW: usize = 4096;
const PAGE: usize = 64;

/// The shape with a goal, and a smaller head.
pub fn measure(report: &Report) -> Result<()> {
    let bench = Bench::open()?;
    let copy = ceiling::copy(&bench)?;
    [64, 128].into_iter().try_for_each(|head_size| report.row(row(&bench, head_size, copy)?))
}

fn row(bench: &Bench, head_size: usize, copy: f64) -> Result<Row> {
    let (rows, width) = (USERS * NEW, HEADS * head_size);
    let pages = rows / PAGE;
    let indices = [offsets(USERS, NEW), vec![0; USERS], vec![0; USERS], offsets(USERS, NEW / PAGE), scattered(pages)];
    let indices = indices.iter().map(|values| bench.ints(values)).collect::<Result<Vec<_>>>()?;
    let at = |index: usize| bench.address(&indices[index]);
    // Four sets alternate: together they are several times larger than the cache.
    let mut sets = Vec::new();
    for seed in 0..4 {
        let [key, value] = [bench.numbers(rows * width, seed)?, bench.numbers(rows * width, seed + 10)?];
        sets.push((key, value, bench.numbers(2 * rows * width, seed + 20)?));
    }
    let calls: Vec<Append> = sets
        .iter()
        .map(|(key, value, pool)| Append {
            element: Type::Bf16,
            rows: Rows {
                row_offsets: at(0),
                num_candidates: at(1),
                users: USERS,
                total_rows: rows,
                heads: HEADS,
                head_size,
            },
            key: bench.address(key),
            value: bench.address(value),
            cache: Cache {
                pool: bench.address(pool),
                cached_len: at(2),
                page_indptr: at(3),
                page_ids: at(4),
                page_entries: pages,
                pool_pages: pages,
                page_size: PAGE,
            },
        })
        .collect();
    let seconds = bench.seconds(|run| {
        // SAFETY: every tensor is as long as the shape says, and lives until the measurement has ended.
        unsafe { bench.gpu.append(&calls[run % calls.len()], bench.stream.cu_stream()) }.map_err(failed)
    })?;
    // Keys and values, read and written.
    let bytes = (rows * width * 2 * 2 * 2) as f64;
    let (value, baseline) = (bytes / seconds * 1e-9, copy * 1e-9);
    Ok(Row {
        bench: "append",
        case: format!("bf16 D={head_size} n={NEW} B={USERS} H={HEADS} {:.4} ms", seconds * 1e3),
        value,
        unit: "GB/s",
        baseline,
        baseline_name: "copy, read + written",
        ratio: value / baseline,
    })
}
