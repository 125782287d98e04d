//! Random numbers: the same in every run, of a magnitude as in trained models.

use pagoda::{ElementType, Result, Tensor};
use pagoda_test_support::Random;

/// A tensor of numbers between -1 and 1.
pub fn tensor(element: ElementType, dims: &[i64], seed: u64) -> Result<Tensor> {
    let mut random = Random(seed);
    let count = dims.iter().product::<i64>() as usize;
    let values = (0..count).map(|_| random.number());
    match element {
        ElementType::F16 => Tensor::from_slice(dims, &values.map(half::f16::from_f32).collect::<Vec<_>>()),
        ElementType::Bf16 => Tensor::from_slice(dims, &values.map(half::bf16::from_f32).collect::<Vec<_>>()),
        _ => Tensor::from_slice(dims, &values.collect::<Vec<f32>>()),
    }
}
