//! HstuAttention over a paged cache, against ONNX Runtime's MatMul.

use pagoda::{ElementType, Model, Result, Tensor};
use pagoda_test_support::Attribute;

use super::matmul::MatMul;
use super::{Row, one_node, random, side_by_side};

const USERS: i64 = 4;
const HEADS: i64 = 4;
const CACHED: i64 = 2048;
const NEW: i64 = 64;
const CANDIDATES: i64 = 64;
const PAGE: i64 = 64;

/// The shapes with a goal: each type against MatMul, and the short types against f32.
pub fn measure(threads: u32) -> Result<Vec<Row>> {
    let mut matmul = MatMul::new(threads)?;
    let mut rows = Vec::new();
    for head_size in [64, 128] {
        let mut f32 = Attention::new(ElementType::F32, head_size, threads)?;
        let (ours, theirs) = side_by_side(15, || f32.run(), || matmul.run())?;
        rows.push(f32.row("MatMul f32 1024^3", ours, MatMul::FLOPS / theirs));
        for element in [ElementType::F16, ElementType::Bf16] {
            let mut short = Attention::new(element, head_size, threads)?;
            let (ours, theirs) = side_by_side(15, || short.run(), || matmul.run())?;
            rows.push(short.row("MatMul f32 1024^3", ours, MatMul::FLOPS / theirs));
            let (ours, theirs) = side_by_side(15, || short.run(), || f32.run())?;
            rows.push(short.row("the same in f32", ours, f32.flops() / theirs));
        }
    }
    Ok(rows)
}

struct Attention {
    model: Model,
    inputs: Vec<(&'static str, Tensor)>,
    output: Tensor,
    element: ElementType,
    head_size: i64,
}

impl Attention {
    fn new(element: ElementType, head_size: i64, threads: u32) -> Result<Self> {
        let rows = USERS * (NEW + CANDIDATES);
        let (dims, pages) = ([rows, HEADS, head_size], USERS * CACHED / PAGE);
        let pool_dims = [pages, 2, PAGE, HEADS, head_size];
        let offsets = |step: i64| (0..=USERS).map(|user| (user * step) as i32).collect::<Vec<_>>();
        let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values);
        // Pages in random order, as after some time in service.
        let page_ids: Vec<i32> = (0..pages).map(|page| ((page * 37 + 11) % pages) as i32).collect();
        let inputs = vec![
            ("query", random::tensor(element, &dims, 3)?),
            ("key", random::tensor(element, &dims, 4)?),
            ("value", random::tensor(element, &dims, 5)?),
            ("row_offsets", ints(&offsets(NEW + CANDIDATES))?),
            ("num_candidates", ints(&[CANDIDATES as i32; USERS as usize])?),
            ("cached_len", ints(&[CACHED as i32; USERS as usize])?),
            ("page_indptr", ints(&offsets(CACHED / PAGE))?),
            ("page_ids", ints(&page_ids)?),
            ("kv_pool", random::tensor(element, &pool_dims, 6)?),
        ];
        let attributes = [Attribute::Int("scaling_seqlen", CACHED + NEW)];
        let model = one_node("ai.pagoda.HstuAttention", &inputs, ("output", element, &dims), &attributes, threads)?;
        Ok(Self { model, inputs, output: Tensor::zeros(element, &dims)?, element, head_size })
    }

    fn run(&mut self) -> Result<()> {
        let inputs: Vec<_> = self.inputs.iter().map(|(name, tensor)| (*name, tensor)).collect();
        self.model.run_into(&inputs, &mut [("output", &mut self.output)])
    }

    fn row(&self, baseline_name: &'static str, seconds: f64, baseline: f64) -> Row {
        let (name, head_size) = (self.element.name(), self.head_size);
        let (value, baseline) = (self.flops() / seconds * 1e-9, baseline * 1e-9);
        Row {
            bench: "attention",
            case: format!("{name} D={head_size} C={CACHED} n={NEW} t={CANDIDATES} B={USERS} H={HEADS}"),
            value,
            unit: "GFLOP/s",
            baseline,
            baseline_name,
            ratio: value / baseline,
        }
    }

    /// 4·D for each pair that is not masked: a multiplication and an addition in q·k and again in p·v.
    fn flops(&self) -> f64 {
        let history = CACHED + NEW;
        let of_history: i64 = (CACHED..history).map(|row| row + 1).sum();
        let of_candidates = CANDIDATES * (history + 1);
        (4 * self.head_size * USERS * HEADS * (of_history + of_candidates)) as f64
    }
}
