//! A NaN stays with the rows that see it. (That slots that were never written do not reach a result is in `random.rs`:
//! there they hold NaN in every case.)

mod common;

use common::{Case, Random, User};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::{bf16, f16};

fn users() -> [User; 2] {
    let most = if cfg!(miri) { 5 } else { 80 };
    [
        User { cached: most, new: most / 2, candidates: most, contextual: 0 },
        User { cached: 3, new: 2, candidates: 4, contextual: 0 },
    ]
}

/// Poisons one row of key or value and asks that exactly the elements the reference poisons come out NaN.
fn spreads_as_in_the_reference<T: OperatorElement>(group: i64, window: i64) {
    let clean = Case::<T>::new(&mut Random(31), &users(), 2, 20, 8);
    let rows = clean.query.len() / 40;
    for row in (0..rows).step_by(if cfg!(miri) { 4 } else { 17 }).chain([rows - 1]) {
        for which in ["query", "key", "value"] {
            let mut case = clean.clone();
            (case.target_group_size, case.max_attn_len) = (group, window);
            let tensor = match which {
                "query" => &mut case.query,
                "key" => &mut case.key,
                _ => &mut case.value,
            };
            tensor[row * 40 + 25] = T::from_f32(f32::NAN);
            let expected = reference::hstu_attention(&case.attention()).unwrap();
            for isa in Isa::available() {
                let output = case.output(isa);
                let same = output.iter().zip(&expected).all(|(a, b)| a.to_f32().is_nan() == b.is_nan());
                assert!(same, "{} {isa:?}: NaN in {which} of row {row}, group {group}, window {window}", T::NAME);
            }
        }
    }
}

#[test]
fn between_candidates() {
    spreads_as_in_the_reference::<f32>(1, 0);
    spreads_as_in_the_reference::<f16>(1, 0);
    spreads_as_in_the_reference::<bf16>(3, 0);
}

#[test]
fn within_a_window() {
    spreads_as_in_the_reference::<f32>(2, 5);
}
