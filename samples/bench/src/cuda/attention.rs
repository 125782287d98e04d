//! HstuAttention in bf16, against cuBLAS's matrix product.

use cudarc::driver::CudaSlice;
use pagoda::Result;
use pagoda_kernels::KvFormat;
use pagoda_kernels::cuda::{Attention, Cache, Path, QuantisedPages, Rows, Scratch, Type};

use super::{Bench, ROTATE, ceiling, failed, offsets, scattered};
use crate::{Report, Row};

const HEADS: usize = 4;
const PAGE: usize = 64;

/// A batch of equal users.
struct Shape {
    name: &'static str,
    users: usize,
    head_size: usize,
    cached: usize,
    new: usize,
    candidates: usize,
}

const fn full(users: usize, head_size: usize, new: usize) -> Shape {
    Shape { name: "full", users, head_size, cached: 0, new, candidates: 0 }
}

const fn delta(users: usize, head_size: usize, cached: usize, new: usize, candidates: usize) -> Shape {
    Shape { name: "delta", users, head_size, cached, new, candidates }
}

const SHAPES: [Shape; 10] = [
    full(16, 64, 4096),
    full(16, 128, 1024),
    full(16, 128, 4096),
    full(16, 128, 8192),
    full(16, 256, 4096),
    delta(16, 128, 4096, 4096, 0),
    delta(8, 128, 8128, 64, 256),
    delta(1, 128, 3968, 128, 256),
    delta(8, 256, 3968, 128, 256),
    delta(1, 256, 3968, 128, 256),
];

/// Shapes of the comparison of formats: a few new events of a few users and of many, and many.
const OF_FORMATS: [Shape; 5] = [
    delta(8, 128, 8128, 64, 256),
    delta(8, 256, 3968, 128, 256),
    delta(64, 128, 2048, 1, 64),
    delta(64, 64, 2048, 1, 256),
    delta(16, 128, 4096, 4096, 0),
];

/// The shapes with a goal, by the fastest kernel and by the one for every chip since sm_80.
pub fn measure(report: &Report) -> Result<()> {
    let bench = Bench::open()?;
    let product = ceiling::matmul(&bench)?;
    for shape in &SHAPES {
        let inputs = Inputs::new(&bench, shape)?;
        for path in bench.gpu.paths(&inputs.calls[0]).into_iter().rev() {
            if path == Path::Plain {
                continue;
            }
            // As the operator calls it: the fastest kernel, with its scratch memory.
            let fastest = Some(&path) == bench.gpu.paths(&inputs.calls[0]).last();
            let bytes = bench.gpu.scratch_bytes(&inputs.calls[0]).map_err(failed)?;
            // SAFETY: kernels read only what they have written.
            let memory = unsafe { bench.stream.alloc::<u8>(bytes.max(1)) }.map_err(failed)?;
            let scratch = Scratch { address: bench.address(&memory), bytes };
            let seconds = bench.seconds(|run| {
                let call = &inputs.calls[run % inputs.calls.len()];
                // SAFETY: every tensor is as long as the shape says, and lives until the measurement has ended.
                unsafe {
                    if fastest {
                        bench.gpu.attention_in(call, scratch, bench.stream.cu_stream())
                    } else {
                        bench.gpu.attention_by(path, call, bench.stream.cu_stream())
                    }
                }
                .map_err(failed)
            })?;
            report.row(shape.row(path, seconds, product))?;
        }
    }
    for shape in &OF_FORMATS {
        against_native(&bench, shape, report)?;
    }
    Ok(())
}

/// Quantised pages against native ones, of calls that append: what is opened, and the attention over it.
fn against_native(bench: &Bench, shape: &Shape, report: &Report) -> Result<()> {
    let mut inputs = Inputs::new(bench, shape)?;
    inputs.calls.iter_mut().for_each(|call| call.append = true);
    let calls = &inputs.calls;
    let scratch = bench.gpu.scratch_bytes(&calls[0]).map_err(failed)?;
    let needed = calls[0].opened_bytes().map_err(failed)?.next_multiple_of(256);
    // SAFETY: kernels read only what they have written.
    let memory = unsafe { bench.stream.alloc::<u8>(scratch + needed) }.map_err(failed)?;
    let opened = Scratch { address: bench.address(&memory), bytes: needed };
    let rest = Scratch { address: opened.address + needed as u64, bytes: scratch };
    let native = bench.seconds(|run| {
        // SAFETY: every tensor is as long as the shape says, and lives until the measurement has ended.
        unsafe { bench.gpu.attention_in(&calls[run % calls.len()], rest, bench.stream.cu_stream()) }.map_err(failed)
    })?;
    for (format, name) in [(KvFormat::Int8, "int8"), (KvFormat::Fp8, "fp8"), (KvFormat::Int4, "int4")] {
        let cache = calls[0].cache.expect("of every call");
        let blocks = cache.pool_pages * 2 * PAGE * HEADS;
        // Codes that are numbers in every format; scales of 2^-8, from -0.5 on.
        let codes = blocks * format.pool_width(shape.head_size);
        let codes = bench.ints(&vec![0x3571_2640; calls.len() * codes / 4])?;
        let scale = if format == KvFormat::Fp8 { 0x1c00_1c00 } else { 0xb800_1c00_u32 as i32 };
        let scales = bench.ints(&vec![scale; blocks * format.scales_width() / 2])?;
        let pages = QuantisedPages { format, scales: bench.address(&scales) };
        let own = |at: usize| bench.address(&codes) + (at * blocks * format.pool_width(shape.head_size)) as u64;
        let seconds = bench.seconds(|run| {
            let at = run % calls.len();
            let call = Attention { cache: Some(Cache { pool: own(at), ..cache }), ..calls[at] };
            // SAFETY: as above; what is opened is read before the next call opens its own.
            unsafe {
                let call = bench.gpu.open_pages(&call, pages, opened, bench.stream.cu_stream()).map_err(failed)?;
                bench.gpu.attention_in(&call, rest, bench.stream.cu_stream()).map_err(failed)
            }
        })?;
        let Shape { users, head_size, cached, new, candidates, .. } = shape;
        report.row(Row {
            bench: "attention",
            case: format!("{name} pages D={head_size} C={cached} n={new} t={candidates} B={users} H={HEADS}"),
            value: seconds * 1e3,
            unit: "ms",
            baseline: native * 1e3,
            baseline_name: "native bf16 pages",
            ratio: native / seconds,
        })?;
    }
    Ok(())
}

impl Shape {
    /// 4·D for each pair that is not masked. A triangle counts as half of the square, as in other published tables.
    fn flops(&self) -> f64 {
        let (cached, new, candidates) = (self.cached as f64, self.new as f64, self.candidates as f64);
        let pairs = new * cached + new * new / 2.0 + candidates * (cached + new);
        4.0 * (self.users * HEADS * self.head_size) as f64 * pairs
    }

    fn row(&self, path: Path, seconds: f64, product: Option<f64>) -> Row {
        let Shape { name, users, head_size, cached, new, candidates } = self;
        let value = self.flops() / seconds * 1e-12;
        let baseline = product.map_or(f64::NAN, |product| product * 1e-12);
        let path = format!("{path:?}").to_lowercase();
        Row {
            bench: "attention",
            case: format!(
                "bf16 {name} D={head_size} C={cached} n={new} t={candidates} B={users} H={HEADS} {path} {:.4} ms",
                seconds * 1e3
            ),
            value,
            unit: "TFLOP/s",
            baseline,
            baseline_name: "cuBLAS bf16 8192^3",
            ratio: value / baseline,
        }
    }
}

/// Several sets of tensors of one shape.
struct Inputs {
    calls: Vec<Attention>,
    _tensors: Vec<CudaSlice<u16>>,
    _indices: Vec<CudaSlice<i32>>,
}

impl Inputs {
    fn new(bench: &Bench, shape: &Shape) -> Result<Self> {
        let width = HEADS * shape.head_size;
        let per_user = shape.new + shape.candidates;
        let rows = shape.users * per_user;
        let per_list = (shape.cached + shape.new).div_ceil(PAGE);
        let pages = shape.users * per_list;
        let indices = [
            offsets(shape.users, per_user),
            vec![shape.candidates as i32; shape.users],
            vec![shape.cached as i32; shape.users],
            offsets(shape.users, per_list),
            scattered(pages),
        ];
        let indices = indices.iter().map(|values| bench.ints(values)).collect::<Result<Vec<_>>>()?;
        let at = |index: usize| bench.address(&indices[index]);
        let pool = pages * 2 * PAGE * width;
        let sets = (ROTATE / (2 * (pool + 3 * rows * width))).clamp(1, 24);
        let (mut calls, mut tensors) = (Vec::new(), Vec::new());
        for set in 0..sets as u64 {
            let mut tensor = |len: usize, seed: u64| -> Result<u64> {
                tensors.push(bench.numbers(len, set * 10 + seed)?);
                Ok(bench.address(tensors.last().expect("pushed just now")))
            };
            calls.push(Attention {
                element: Type::Bf16,
                rows: Rows {
                    row_offsets: at(0),
                    num_candidates: at(1),
                    users: shape.users,
                    total_rows: rows,
                    heads: HEADS,
                    head_size: shape.head_size,
                },
                query: tensor(rows * width, 1)?,
                key: tensor(rows * width, 2)?,
                value: tensor(rows * width, 3)?,
                output: tensor(rows * width, 4)?,
                cache: Some(Cache {
                    pool: tensor(pool, 5)?,
                    cached_len: at(2),
                    page_indptr: at(3),
                    page_ids: at(4),
                    page_entries: pages,
                    pool_pages: pages,
                    page_size: PAGE,
                }),
                append: false,
                num_contextual: None,
                alpha: 0.0,
                scaling_seqlen: (shape.cached + shape.new) as i64,
                target_group_size: 1,
                max_attn_len: 0,
                candidates_only: false,
                settled_indices: false,
            });
        }
        Ok(Self { calls, _tensors: tensors, _indices: indices })
    }
}
