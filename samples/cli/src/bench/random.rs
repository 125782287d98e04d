//! Numbers to compute with: the same in every run, of the size that trained models have.

use pagoda::{ElementType, Result, Tensor};

/// A tensor of numbers between -1 and 1.
pub fn tensor(element: ElementType, dims: &[i64], seed: u64) -> Result<Tensor> {
    let mut state = seed;
    let count = dims.iter().product::<i64>() as usize;
    let values = (0..count).map(|_| {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = state;
        bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ bits >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    });
    match element {
        ElementType::F16 => Tensor::from_slice(dims, &values.map(half::f16::from_f32).collect::<Vec<_>>()),
        ElementType::Bf16 => Tensor::from_slice(dims, &values.map(half::bf16::from_f32).collect::<Vec<_>>()),
        _ => Tensor::from_slice(dims, &values.collect::<Vec<f32>>()),
    }
}
