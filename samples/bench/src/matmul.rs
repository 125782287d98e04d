//! The ceiling for arithmetic: ONNX Runtime's own MatMul.

use pagoda::{ElementType, Model, Result, Tensor};
use pagoda_test_support::{Dim, F32, Graph};

use super::random;

const SIZE: i64 = 1024;

/// A matrix product of 1024 x 1024 x 1024 in f32. The right side is a weight of the model, as in real models, because
/// ONNX Runtime is fastest with that.
pub struct MatMul {
    model: Model,
    a: Tensor,
    c: Tensor,
}

impl MatMul {
    /// Floating-point operations of one run.
    pub const FLOPS: f64 = 2.0 * (SIZE * SIZE * SIZE) as f64;

    /// Ready to run on this many threads.
    pub fn new(threads: u32) -> Result<Self> {
        let dims = || [Dim::Is(SIZE), Dim::Is(SIZE)];
        let weight = random::tensor(ElementType::F32, &[SIZE, SIZE], 2)?;
        let graph = Graph::new().input("a", F32, &dims()).output("c", F32, &dims());
        let graph = graph.weight("b", &[SIZE, SIZE], weight.as_slice()?);
        let options = super::options(threads);
        let model = Model::open_memory(&graph.node("MatMul", &["a", "b"], &["c"], &[]).to_bytes(), &options)?;
        Ok(Self {
            model,
            a: random::tensor(ElementType::F32, &[SIZE, SIZE], 1)?,
            c: Tensor::zeros(ElementType::F32, &[SIZE, SIZE])?,
        })
    }

    /// One run.
    pub fn run(&mut self) -> Result<()> {
        self.model.run_into(&[("a", &self.a)], &mut [("c", &mut self.c)])
    }
}
