//! PagedAttention in bf16: decode against a copy of as many bytes, prefill against cuBLAS's matrix product.

use cudarc::driver::CudaSlice;
use half::f16;
use pagoda::Result;
use pagoda_kernels::KvFormat;
use pagoda_kernels::cuda::{PagedAttention, PagedPath, Scratch, Type};

use super::{Bench, ROTATE, ceiling, failed, offsets, scattered};
use crate::{Report, Row};

/// A batch of equal sequences.
struct Shape {
    format: KvFormat,
    sequences: usize,
    cached: usize,
    new: usize,
    query_heads: usize,
    kv_heads: usize,
    head_size: usize,
    page: usize,
}

/// With heads as in models of 7 or 8 billion parameters.
const fn large(format: KvFormat, sequences: usize, cached: usize, new: usize, page: usize) -> Shape {
    Shape { format, sequences, cached, new, query_heads: 32, kv_heads: 8, head_size: 128, page }
}

/// With heads as in SmolLM2-135M.
const fn small(sequences: usize, cached: usize, new: usize) -> Shape {
    let format = KvFormat::Native;
    Shape { format, sequences, cached, new, query_heads: 9, kv_heads: 3, head_size: 64, page: 16 }
}

const SHAPES: [Shape; 15] = [
    large(KvFormat::Native, 32, 2048, 1, 16),
    large(KvFormat::Native, 32, 2048, 1, 64),
    large(KvFormat::Native, 1, 32_768, 1, 16),
    large(KvFormat::Native, 1, 2048, 1, 16),
    large(KvFormat::Native, 32, 8192, 1, 16),
    large(KvFormat::Int8, 32, 8192, 1, 16),
    large(KvFormat::Int8, 32, 2048, 1, 16),
    large(KvFormat::Int4, 32, 2048, 1, 16),
    large(KvFormat::Fp8, 32, 2048, 1, 16),
    small(32, 2048, 1),
    large(KvFormat::Native, 1, 0, 8192, 16),
    large(KvFormat::Native, 1, 0, 8192, 64),
    large(KvFormat::Native, 1, 16_384, 512, 64),
    large(KvFormat::Int8, 1, 0, 8192, 64),
    small(1, 0, 8192),
];

/// The shapes with a goal, by the fastest kernels and by those for every chip since sm_80.
pub fn measure(report: &Report) -> Result<()> {
    let bench = Bench::open()?;
    let (product, copy) = (ceiling::matmul(&bench)?, ceiling::copy(&bench)?);
    for shape in &SHAPES {
        let inputs = Inputs::new(&bench, shape)?;
        let paths = bench.gpu.paged_paths(&inputs.calls[0]);
        for &path in paths.iter().rev() {
            // Decode is the same on every chip.
            if path == PagedPath::Plain || (shape.new == 1 && Some(&path) != paths.last()) {
                continue;
            }
            let seconds = bench.seconds(|run| {
                let call = &inputs.calls[run % inputs.calls.len()];
                // SAFETY: every tensor is as long as the shape says, and lives until the measurement has ended.
                unsafe { bench.gpu.paged_attention_by(path, call, bench.stream.cu_stream()) }.map_err(failed)
            })?;
            report.row(shape.row(path, seconds, product, copy))?;
        }
    }
    Ok(())
}

impl Shape {
    /// Bytes of the keys and values of every token, with their scales.
    fn bytes(&self) -> f64 {
        let codes = self.format.pool_width(self.head_size) * if self.format == KvFormat::Native { 2 } else { 1 };
        let block = codes + self.format.scales_width() * size_of::<f16>();
        (self.sequences * (self.cached + self.new) * 2 * self.kv_heads * block) as f64
    }

    /// 4·D for each pair that is not masked.
    fn flops(&self) -> f64 {
        let pairs: usize = (self.cached..self.cached + self.new).map(|row| row + 1).sum();
        4.0 * (self.sequences * self.query_heads * self.head_size) as f64 * pairs as f64
    }

    fn row(&self, path: PagedPath, seconds: f64, product: Option<f64>, copy: f64) -> Row {
        let Shape { format, sequences, cached, new, query_heads, kv_heads, head_size, page } = self;
        let kind = match format {
            KvFormat::Native => "bf16",
            KvFormat::Int8 => "int8",
            KvFormat::Int4 => "int4",
            KvFormat::Fp8 => "fp8",
        };
        let path = format!("{path:?}").to_lowercase();
        let case = format!(
            "{kind} D={head_size} Hq={query_heads}/{kv_heads} C={cached} n={new} B={sequences} page={page} {path} {:.4} ms",
            seconds * 1e3
        );
        let (value, unit, baseline, baseline_name) = if *new == 1 {
            (self.bytes() / seconds * 1e-9, "GB/s", copy * 1e-9, "copy on the device")
        } else {
            let product = product.map_or(f64::NAN, |product| product * 1e-12);
            (self.flops() / seconds * 1e-12, "TFLOP/s", product, "cuBLAS bf16 8192^3")
        };
        Row { bench: "paged-attention", case, value, unit, baseline, baseline_name, ratio: value / baseline }
    }
}

/// Several sets of tensors of one shape.
struct Inputs {
    calls: Vec<PagedAttention>,
    _tensors: Vec<CudaSlice<u16>>,
    _indices: Vec<CudaSlice<i32>>,
}

impl Inputs {
    fn new(bench: &Bench, shape: &Shape) -> Result<Self> {
        let Shape { format, sequences, cached, new, query_heads, kv_heads, head_size, page } = *shape;
        let rows = sequences * new;
        let per_list = (cached + new).div_ceil(page);
        let pages = sequences * per_list;
        let indices =
            [offsets(sequences, new), vec![cached as i32; sequences], offsets(sequences, per_list), scattered(pages)];
        let indices = indices.iter().map(|values| bench.ints(values)).collect::<Result<Vec<_>>>()?;
        let at = |index: usize| bench.address(&indices[index]);
        let blocks = pages * 2 * page * kv_heads;
        let width = format.pool_width(head_size) * if format == KvFormat::Native { 2 } else { 1 };
        let sets = (ROTATE / (blocks * width + 4 * rows * query_heads * head_size)).clamp(2, 24);
        let (mut calls, mut tensors) = (Vec::new(), Vec::new());
        for set in 0..sets as u64 {
            let mut tensor = |len: usize, seed: u64| -> Result<u64> {
                tensors.push(bench.numbers(len, set * 10 + seed)?);
                Ok(bench.address(tensors.last().expect("pushed just now")))
            };
            let mut call = PagedAttention {
                element: Type::Bf16,
                sequences,
                total_rows: rows,
                query_heads,
                kv_heads,
                head_size,
                query: tensor(rows * query_heads * head_size, 1)?,
                key: tensor(rows * kv_heads * head_size, 2)?,
                value: tensor(rows * kv_heads * head_size, 3)?,
                output: tensor(rows * query_heads * head_size, 4)?,
                row_offsets: at(0),
                cached_len: at(1),
                page_indptr: at(2),
                page_ids: at(3),
                page_entries: pages,
                // Codes are what the bytes of random numbers are, and scales finite numbers: time does not depend on them.
                pool: tensor(blocks * width / 2, 5)?,
                scales: match format.scales_width() {
                    0 => None,
                    width => Some(tensor(blocks * width, 6)?),
                },
                format,
                pool_pages: pages,
                page_size: page,
                positions: None,
                rotation: None,
                sinks: None,
                slopes: None,
                slots: None,
                key_weights: None,
                kv_norms: None,
                scale: 0.0,
                window: 0,
                softcap: 0.0,
                settled: true,
                rows_each: (new, new),
                scratch: None,
            };
            let bytes = call.scratch_bytes();
            call.scratch = Some(Scratch { address: tensor(bytes.div_ceil(2), 7)?, bytes });
            calls.push(call);
        }
        Ok(Self { calls, _tensors: tensors, _indices: indices })
    }
}
