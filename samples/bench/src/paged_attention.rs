//! PagedAttention: a decode step against summing the same bytes, a prefill against ONNX Runtime's MatMul, short formats
//! against f32.

use pagoda::{ElementType, Model, Result, Tensor};
use pagoda_kernels::KvFormat;
use pagoda_kernels::parallel::{Parallel, Threads};
use pagoda_test_support::{Attribute, Dim, Graph, Random};

use super::matmul::MatMul;
use super::{Report, Row, options, random, side_by_side};

const PAGE: i64 = 32;
const CACHED: i64 = 4096;
const PROMPT: i64 = 1024;

/// The heads of a model's layer.
#[derive(Clone, Copy)]
struct Heads {
    query: i64,
    kv: i64,
    size: i64,
}

/// As in models of 7 or 8 billion parameters.
const LARGE: Heads = Heads { query: 32, kv: 8, size: 128 };
/// As in SmolLM2-135M.
const SMALL: Heads = Heads { query: 9, kv: 3, size: 64 };

/// What pages hold: numbers of the type of the rows, or codes beside rows in f32.
const KINDS: [(ElementType, KvFormat, &str); 6] = [
    (ElementType::F32, KvFormat::Native, "f32"),
    (ElementType::F16, KvFormat::Native, "f16"),
    (ElementType::Bf16, KvFormat::Native, "bf16"),
    (ElementType::F32, KvFormat::Int8, "int8"),
    (ElementType::F32, KvFormat::Int4, "int4"),
    (ElementType::F32, KvFormat::Fp8, "fp8"),
];

/// The shapes with a goal.
pub fn measure(threads: u32, report: &Report) -> Result<()> {
    let mut matmul = MatMul::new(threads)?;
    let pool = Threads::new(threads as usize);
    for heads in [LARGE, SMALL] {
        let f32 = Attention::new(KINDS[0], heads, CACHED, 1, threads)?;
        let (ours, theirs) = side_by_side(15, || f32.run(), || f32.sum(&pool, threads as usize))?;
        let (value, baseline) = (f32.bytes_read() / ours * 1e-9, f32.pool_bytes()? / theirs * 1e-9);
        report.row(f32.row("GB/s", value, "sum, same threads", baseline, value / baseline))?;
        for kind in &KINDS[1..] {
            let short = Attention::new(*kind, heads, CACHED, 1, threads)?;
            let (ours, theirs) = side_by_side(15, || short.run(), || f32.run())?;
            report.row(short.row("ms", ours * 1e3, "the same in f32", theirs * 1e3, theirs / ours))?;
        }
        for kind in KINDS {
            let prefill = Attention::new(kind, heads, 0, PROMPT, threads)?;
            let (ours, theirs) = side_by_side(9, || prefill.run(), || matmul.run())?;
            let (value, baseline) = (prefill.flops() / ours * 1e-9, MatMul::FLOPS / theirs * 1e-9);
            report.row(prefill.row("GFLOP/s", value, "MatMul f32 1024^3", baseline, value / baseline))?;
        }
    }
    Ok(())
}

/// One sequence of `cached` and `new` tokens, the pool in place.
struct Attention {
    model: Model,
    inputs: Vec<(&'static str, Tensor)>,
    output: Tensor,
    heads: Heads,
    kind: &'static str,
    cached: i64,
    new: i64,
}

impl Attention {
    fn new(
        (element, format, kind): (ElementType, KvFormat, &'static str),
        heads: Heads,
        cached: i64,
        new: i64,
        threads: u32,
    ) -> Result<Self> {
        let pages = (cached + new + PAGE - 1) / PAGE;
        let dims = [new, heads.query, heads.size];
        let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values);
        // Pages in random order, as after some time in service.
        let mut page_ids: Vec<i32> = (0..pages as i32).collect();
        Random(7).shuffle(&mut page_ids);
        let mut inputs = vec![
            ("query", random::tensor(element, &dims, 3)?),
            ("key", random::tensor(element, &[new, heads.kv, heads.size], 4)?),
            ("value", random::tensor(element, &[new, heads.kv, heads.size], 5)?),
            ("row_offsets", ints(&[0, new as i32])?),
            ("cached_len", ints(&[cached as i32])?),
            ("page_indptr", ints(&[0, pages as i32])?),
            ("page_ids", ints(&page_ids)?),
        ];
        let pool_dims = |width: i64| [pages, 2, PAGE, heads.kv, width];
        let (name, pool) = match format {
            KvFormat::Native => ("native", (random::tensor(element, &pool_dims(heads.size), 6)?, None)),
            KvFormat::Int8 => ("int8", quantised(format, &pool_dims(heads.size))?),
            KvFormat::Int4 => ("int4", quantised(format, &pool_dims(heads.size))?),
            KvFormat::Fp8 => ("fp8", quantised(format, &pool_dims(heads.size))?),
        };
        inputs.push(("kv_pool", pool.0));
        inputs.extend(pool.1.map(|scales| ("kv_scales", scales)));
        let names: Vec<&str> = inputs.iter().map(|(name, _)| *name).collect();
        let fixed = |dims: &[i64]| dims.iter().map(|&dim| Dim::Is(dim)).collect::<Vec<_>>();
        let mut graph = inputs.iter().fold(Graph::new(), |graph, (name, tensor)| {
            graph.input(name, tensor.element_type() as i32, &fixed(tensor.dims()))
        });
        let outputs = &["output", "kv_pool_out", "kv_scales_out"][..names.len() - 6];
        graph = graph.node("ai.pagoda.PagedAttention", &names, outputs, &[Attribute::Text("kv_format", name)]);
        graph = graph.output("output", element as i32, &fixed(&dims));
        for (output, (_, tensor)) in outputs[1..].iter().zip(&inputs[7..]) {
            graph = graph.output(output, tensor.element_type() as i32, &fixed(tensor.dims()));
        }
        let model = Model::open_memory(&graph.to_bytes(), &options(threads))?;
        Ok(Self { model, inputs, output: Tensor::zeros(element, &dims)?, heads, kind, cached, new })
    }

    fn run(&self) -> Result<()> {
        let inputs: Vec<_> = self.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let mut outputs = vec![("output", Some(&self.output))];
        for (name, (_, tensor)) in ["kv_pool_out", "kv_scales_out"].into_iter().zip(&self.inputs[7..]) {
            outputs.push((name, Some(tensor)));
        }
        // SAFETY: nothing else uses the tensors. The pool is input and output, as the engine binds it.
        unsafe { self.model.run_bound(&inputs, &outputs, None) }.map(drop)
    }

    /// Sums the numbers of an f32 pool, each thread a part.
    fn sum(&self, threads: &Threads, parts: usize) -> Result<()> {
        let numbers: &[f32] = self.inputs[7].1.as_slice()?;
        // More parts than threads, as the operator has more tasks: a thread that is late has fewer of them.
        let part = numbers.len().div_ceil(8 * parts);
        threads.run(numbers.len().div_ceil(part), &|index| {
            let part = &numbers[index * part..numbers.len().min((index + 1) * part)];
            std::hint::black_box(sum(part));
        });
        Ok(())
    }

    fn pool_bytes(&self) -> Result<f64> {
        Ok(self.inputs[7].1.memory()?.1 as f64)
    }

    /// What a decode step reads of an f32 pool: the keys and values of every token.
    fn bytes_read(&self) -> f64 {
        ((self.cached + self.new) * 2 * self.heads.kv * self.heads.size * 4) as f64
    }

    /// 4·D for each pair that is not masked: a multiplication and an addition in q·k and again in p·v.
    fn flops(&self) -> f64 {
        let pairs: i64 = (self.cached..self.cached + self.new).map(|row| row + 1).sum();
        (4 * self.heads.size * self.heads.query * pairs) as f64
    }

    fn row(&self, unit: &'static str, value: f64, baseline_name: &'static str, baseline: f64, ratio: f64) -> Row {
        let Heads { query, kv, size } = self.heads;
        let call = match self.new {
            1 => format!("C={} decode", self.cached),
            new => format!("n={new} prefill"),
        };
        let case = format!("{} D={size} Hq={query}/{kv} {call}", self.kind);
        Row { bench: "paged-attention", case, value, unit, baseline, baseline_name, ratio }
    }
}

/// The sum, by the widest vectors of this CPU.
fn sum(numbers: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the CPU has it.
        return unsafe { sum_avx512(numbers) };
    } else if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU has it.
        return unsafe { sum_avx2(numbers) };
    }
    sum_columns(numbers)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(numbers: &[f32]) -> f32 {
    sum_columns(numbers)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(numbers: &[f32]) -> f32 {
    sum_columns(numbers)
}

/// In 128 columns, so that no addition waits for another.
#[inline(always)]
fn sum_columns(numbers: &[f32]) -> f32 {
    let (rows, rest) = numbers.as_chunks::<128>();
    let mut sums = [0.0; 128];
    for row in rows {
        for (sum, number) in sums.iter_mut().zip(row) {
            *sum += number;
        }
    }
    sums.iter().chain(rest).sum()
}

/// A pool of random numbers in a quantised format, and its scales.
pub fn quantised(format: KvFormat, dims: &[i64; 5]) -> Result<(Tensor, Option<Tensor>)> {
    let [pages, two, page, heads, size] = *dims;
    let numbers = random::tensor(ElementType::F32, dims, 6)?;
    let (width, scales_width) = (format.pool_width(size as usize), format.scales_width());
    let blocks = (pages * two * page * heads) as usize;
    let (mut codes, mut scales) = (vec![0_u8; blocks * width], vec![half::f16::ZERO; blocks * scales_width]);
    let parts = codes.chunks_exact_mut(width).zip(scales.chunks_exact_mut(scales_width));
    for (numbers, (codes, scales)) in numbers.as_slice::<f32>()?.chunks_exact(size as usize).zip(parts) {
        format.quantise(numbers, codes, scales);
    }
    let tensor = Tensor::from_slice(&[pages, two, page, heads, width as i64], &codes)?;
    Ok((tensor, Some(Tensor::from_slice(&[pages, two, page, heads, scales_width as i64], &scales)?)))
}
