//! Models of both operators, and their runs.

use pagoda::tensor::Scalar;
use pagoda::{Model, ModelOptions, Provider, Result, Tensor};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_test_support::{Attribute, Dim, Graph, I32};

use crate::common::Case;

/// An element type of the operators and of tensors.
pub trait Number: OperatorElement + Scalar {}
impl<T: OperatorElement + Scalar> Number for T {}

/// Index tensors of both operators, in order.
const ROWS: [&str; 2] = ["row_offsets", "num_candidates"];
const PAGES: [&str; 3] = ["cached_len", "page_indptr", "page_ids"];

/// The graphs of a case in which each operator has a node of its own, and in which one node does both.
pub fn graphs<T: Number>(case: &Case<T>) -> [(&'static str, Vec<u8>); 2] {
    [("two nodes", graph(case)), ("one node", one_node(case))]
}

/// `output` is the attention over the pool as it was before, `kv_pool_out` the pool afterwards.
pub fn graph<T: Number>(case: &Case<T>) -> Vec<u8> {
    let mut append = vec!["kv_pool", "key", "value"];
    append.extend(ROWS.iter().chain(&PAGES));
    tensors(case)
        .node("ai.pagoda.HstuAttention", &attention_inputs(case), &["output"], &attributes(case))
        .node("ai.pagoda.PagedKvAppend", &append, &["kv_pool_out"], &[])
        .to_bytes()
}

/// The same by an attention that appends too.
fn one_node<T: Number>(case: &Case<T>) -> Vec<u8> {
    let outputs = ["output", "kv_pool_out"];
    tensors(case).node("ai.pagoda.HstuAttention", &attention_inputs(case), &outputs, &attributes(case)).to_bytes()
}

/// A graph with inputs and outputs, and no nodes yet.
fn tensors<T: Number>(case: &Case<T>) -> Graph {
    let element = T::TYPE as i32;
    let pool = || [Dim::Any("pages"), Dim::Is(2), Dim::Any("slots"), Dim::Any("heads"), Dim::Any("size")];
    with_tensors(Graph::new().input("kv_pool", element, &pool()), case).output("kv_pool_out", element, &pool())
}

/// A graph with all inputs but those of the pool, and the output of the attention.
pub fn with_tensors<T: Number>(mut graph: Graph, case: &Case<T>) -> Graph {
    let element = T::TYPE as i32;
    let rows = || [Dim::Any("rows"), Dim::Any("heads"), Dim::Any("size")];
    for name in ["query", "key", "value"] {
        graph = graph.input(name, element, &rows());
    }
    for (name, dim) in ROWS.iter().chain(&PAGES).zip(["users+1", "users", "users", "users+1", "entries"]) {
        graph = graph.input(name, I32, &[Dim::Any(dim)]);
    }
    if case.num_contextual.is_some() {
        graph = graph.input("num_contextual", I32, &[Dim::Any("users")]);
    }
    graph.output("output", element, &rows())
}

pub fn attention_inputs<T>(case: &Case<T>) -> Vec<&'static str> {
    let mut inputs = vec!["query", "key", "value"];
    inputs.extend(ROWS.iter().chain(&PAGES).chain(&["kv_pool"]));
    inputs.extend(case.num_contextual.as_ref().map(|_| "num_contextual"));
    inputs
}

pub fn attributes<T>(case: &Case<T>) -> [Attribute; 4] {
    [
        Attribute::Float("alpha", case.alpha),
        Attribute::Int("scaling_seqlen", case.scaling_seqlen),
        Attribute::Int("target_group_size", case.target_group_size),
        Attribute::Int("max_attn_len", case.max_attn_len),
    ]
}

pub fn options(provider: Provider) -> ModelOptions {
    ModelOptions { provider, intra_op_threads: 1, ..ModelOptions::default() }
}

/// The inputs of a case by name, and the pool.
pub struct Inputs {
    pub tensors: Vec<(&'static str, Tensor)>,
    pub pool: Tensor,
}

impl Inputs {
    pub fn new<T: Number>(case: &Case<T>) -> Self {
        let (heads, size) = (case.heads as i64, case.head_size as i64);
        let rows = |values: &[T]| Tensor::from_slice(&[values.len() as i64 / (heads * size), heads, size], values);
        let ints = |values: &[i32]| Tensor::from_slice(&[values.len() as i64], values);
        let mut tensors = vec![
            ("query", rows(&case.query)),
            ("key", rows(&case.key)),
            ("value", rows(&case.value)),
            ("row_offsets", ints(&case.row_offsets)),
            ("num_candidates", ints(&case.num_candidates)),
            ("cached_len", ints(&case.cached_len)),
            ("page_indptr", ints(&case.page_indptr)),
            ("page_ids", ints(&case.page_ids)),
        ];
        tensors.extend(case.num_contextual.as_ref().map(|values| ("num_contextual", ints(values))));
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, tensor.unwrap())).collect();
        let dims = [case.pool_pages as i64, 2, case.page_size as i64, heads, size];
        Self { tensors, pool: Tensor::from_slice(&dims, &case.pool).unwrap() }
    }

    fn fed<'a>(&'a self, pool: &'a Tensor) -> Vec<(&'a str, &'a Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (*name, tensor)).chain([("kv_pool", pool)]).collect()
    }

    /// Runs with the pool and its successor apart: the output and that.
    pub fn run<T: Number>(&self, model: &Model) -> Result<(Vec<T>, Vec<T>)> {
        let before = self.pool.as_slice::<T>()?.to_vec();
        let made = model.run(&self.fed(&self.pool), &["output", "kv_pool_out"])?;
        // As bytes: NaN is among them.
        assert!(bytes(&before) == bytes(self.pool.as_slice::<T>()?), "the input was written to");
        Ok((made[0].as_slice()?.to_vec(), made[1].as_slice()?.to_vec()))
    }

    /// Runs with the pool as input and output at once, as the engine does: the output.
    pub fn run_in_place<T: Number>(&self, model: &Model) -> Result<Vec<T>> {
        self.run_in_place_on(model, &self.pool)
    }

    /// As `run_in_place`, on a pool in which other threads may use other pages.
    pub fn run_in_place_on<T: Number>(&self, model: &Model, pool: &Tensor) -> Result<Vec<T>> {
        let outputs = [("output", None), ("kv_pool_out", Some(pool))];
        // SAFETY: only the caller uses the pages that the call writes, and the other tensors.
        let made = unsafe { model.run_bound(&self.fed(pool), &outputs, None) }?;
        Ok(made[0].as_ref().unwrap().as_slice()?.to_vec())
    }
}

fn bytes<T>(values: &[T]) -> &[u8] {
    // SAFETY: numbers without padding, viewed as bytes.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
