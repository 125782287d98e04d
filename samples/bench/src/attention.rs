//! HstuAttention over a paged cache, against ONNX Runtime's MatMul, and quantised pages against native ones.

use pagoda::{ElementType, KvFormat, Model, Result, Tensor};
use pagoda_test_support::{Attribute, Dim, Graph};

use super::matmul::MatMul;
use super::paged_attention::quantised;
use super::{Report, Row, options, random, side_by_side};

const USERS: i64 = 4;
const HEADS: i64 = 4;
const PAGE: i64 = 64;

/// What each user has.
#[derive(Clone, Copy)]
struct Shape {
    head_size: i64,
    cached: i64,
    new: i64,
    candidates: i64,
}

/// Shapes of the comparison of formats: many new rows, one new event before few and many candidates, a whole history.
const OF_FORMATS: [Shape; 5] = [
    Shape { head_size: 64, cached: 2048, new: 64, candidates: 64 },
    Shape { head_size: 128, cached: 2048, new: 64, candidates: 64 },
    Shape { head_size: 64, cached: 2048, new: 1, candidates: 8 },
    Shape { head_size: 64, cached: 2048, new: 1, candidates: 256 },
    Shape { head_size: 64, cached: 0, new: 1024, candidates: 64 },
];

/// The shapes with a goal: each type against MatMul, and the short types against f32.
pub fn measure(threads: u32, report: &Report) -> Result<()> {
    let mut matmul = MatMul::new(threads)?;
    for shape in &OF_FORMATS[..2] {
        let mut f32 = Attention::new(ElementType::F32, None, *shape, threads)?;
        let (ours, theirs) = side_by_side(15, || f32.run(), || matmul.run())?;
        report.row(f32.row("MatMul f32 1024^3", ours, MatMul::FLOPS / theirs))?;
        for element in [ElementType::F16, ElementType::Bf16] {
            let mut short = Attention::new(element, None, *shape, threads)?;
            let (ours, theirs) = side_by_side(15, || short.run(), || matmul.run())?;
            report.row(short.row("MatMul f32 1024^3", ours, MatMul::FLOPS / theirs))?;
            let (ours, theirs) = side_by_side(15, || short.run(), || f32.run())?;
            report.row(short.row("the same in f32", ours, f32.flops() / theirs))?;
        }
    }
    for shape in OF_FORMATS {
        let mut native = Attention::new(ElementType::F32, Some(KvFormat::Native), shape, threads)?;
        for format in [KvFormat::Int8, KvFormat::Fp8, KvFormat::Int4] {
            let mut quantised = Attention::new(ElementType::F32, Some(format), shape, threads)?;
            let (ours, theirs) = side_by_side(15, || quantised.run(), || native.run())?;
            report.row(quantised.row("native f32 pages", ours, native.flops() / theirs))?;
        }
    }
    Ok(())
}

/// One node. With a format it appends the new rows too, in place.
struct Attention {
    model: Model,
    inputs: Vec<(&'static str, Tensor)>,
    output: Tensor,
    name: &'static str,
    shape: Shape,
}

/// The place of the pool among the inputs; its scales come after it.
const POOL: usize = 8;

impl Attention {
    fn new(element: ElementType, format: Option<KvFormat>, shape: Shape, threads: u32) -> Result<Self> {
        let Shape { head_size, cached, new, candidates } = shape;
        let (dims, of_user) = ([USERS * (new + candidates), HEADS, head_size], (cached + new + PAGE - 1) / PAGE);
        let pages = USERS * of_user;
        let offsets = |step: i64| (0..=USERS).map(|user| (user * step) as i32).collect::<Vec<_>>();
        let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values);
        // Pages in random order, as after some time in service.
        let page_ids: Vec<i32> = (0..pages).map(|page| ((page * 37 + 11) % pages) as i32).collect();
        let mut inputs = vec![
            ("query", random::tensor(element, &dims, 3)?),
            ("key", random::tensor(element, &dims, 4)?),
            ("value", random::tensor(element, &dims, 5)?),
            ("row_offsets", ints(&offsets(new + candidates))?),
            ("num_candidates", ints(&[candidates as i32; USERS as usize])?),
            ("cached_len", ints(&[cached as i32; USERS as usize])?),
            ("page_indptr", ints(&offsets(of_user))?),
            ("page_ids", ints(&page_ids)?),
        ];
        let pool_dims = |width: i64| [pages, 2, PAGE, HEADS, width];
        let (name, (pool, scales)) = match format {
            None => (element.name(), (random::tensor(element, &pool_dims(head_size), 6)?, None)),
            Some(KvFormat::Native) => ("native", (random::tensor(element, &pool_dims(head_size), 6)?, None)),
            Some(KvFormat::Int8) => ("int8", quantised(KvFormat::Int8, &pool_dims(head_size))?),
            Some(KvFormat::Int4) => ("int4", quantised(KvFormat::Int4, &pool_dims(head_size))?),
            Some(KvFormat::Fp8) => ("fp8", quantised(KvFormat::Fp8, &pool_dims(head_size))?),
        };
        inputs.push(("kv_pool", pool));
        inputs.extend(scales.map(|scales| ("kv_scales", scales)));
        let fixed = |dims: &[i64]| dims.iter().map(|&dim| Dim::Is(dim)).collect::<Vec<_>>();
        let mut graph = inputs.iter().fold(Graph::new(), |graph, (name, tensor)| {
            graph.input(name, tensor.element_type() as i32, &fixed(tensor.dims()))
        });
        let mut names: Vec<&str> = inputs.iter().map(|(name, _)| *name).collect();
        // Before the scales is `num_contextual`, which there is not.
        if inputs.len() > POOL + 1 {
            names.insert(POOL + 1, "");
        }
        let stored = if format.is_some() { &inputs[POOL..] } else { &[] };
        let outputs = &["output", "kv_pool_out", "kv_scales_out"][..1 + stored.len()];
        let mut attributes = vec![Attribute::Int("scaling_seqlen", cached + new)];
        attributes.extend(format.map(|_| Attribute::Text("kv_format", name)));
        graph = graph.node("ai.pagoda.HstuAttention", &names, outputs, &attributes);
        graph = graph.output("output", element as i32, &fixed(&dims));
        for (output, (_, tensor)) in outputs[1..].iter().zip(stored) {
            graph = graph.output(output, tensor.element_type() as i32, &fixed(tensor.dims()));
        }
        let model = Model::open_memory(&graph.to_bytes(), &options(threads))?;
        Ok(Self { model, inputs, output: Tensor::zeros(element, &dims)?, name, shape })
    }

    fn run(&mut self) -> Result<()> {
        let inputs: Vec<_> = self.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let mut outputs = vec![("output", Some(&self.output))];
        let stored = self.model.outputs().len() - 1;
        for (name, (_, tensor)) in ["kv_pool_out", "kv_scales_out"].into_iter().zip(&self.inputs[POOL..]).take(stored) {
            outputs.push((name, Some(tensor)));
        }
        // SAFETY: nothing else uses the tensors. The pool is input and output, as the engine binds it.
        unsafe { self.model.run_bound(&inputs, &outputs, None) }.map(drop)
    }

    fn row(&self, baseline_name: &'static str, seconds: f64, baseline: f64) -> Row {
        let (name, Shape { head_size, cached, new, candidates }) = (self.name, self.shape);
        let (value, baseline) = (self.flops() / seconds * 1e-9, baseline * 1e-9);
        Row {
            bench: "attention",
            case: format!("{name} D={head_size} C={cached} n={new} t={candidates} B={USERS} H={HEADS}"),
            value,
            unit: "GFLOP/s",
            baseline,
            baseline_name,
            ratio: value / baseline,
        }
    }

    /// 4·D for each pair that is not masked: a multiplication and an addition in q·k and again in p·v.
    fn flops(&self) -> f64 {
        let Shape { head_size, cached, new, candidates } = self.shape;
        let history = cached + new;
        let of_history: i64 = (cached..history).map(|row| row + 1).sum();
        let of_candidates = candidates * (history + 1);
        (4 * head_size * USERS * HEADS * (of_history + of_candidates)) as f64
    }
}
