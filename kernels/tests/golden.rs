//! The kernels give the results that a program written apart from them gave (`tests/data/golden`).
#![cfg(not(miri))] // reads files

mod common;

use common::golden::{Golden, golden, rounded};
use common::{Case, error, tolerance};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{bf16, f16};

#[test]
fn the_reference_gives_the_golden_outputs() {
    for Golden { name, case, expected_output, .. } in golden() {
        let output = reference::hstu_attention(&case.attention()).unwrap();
        let worst = output.iter().zip(&expected_output).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        // Only alpha differs, which is an f32 here.
        assert!(worst < 1e-7, "{name}: {worst:e}");
    }
}

#[test]
fn every_instruction_set_gives_the_golden_outputs() {
    for Golden { name, case, expected_output, .. } in golden() {
        for isa in Isa::available() {
            let error = error(&case.output(isa), &expected_output);
            assert!(error <= tolerance::<f32>(), "{name} {isa:?}: {error:e}");
        }
    }
}

#[test]
fn half_precision_stays_within_its_bound() {
    fn check<T: OperatorElement>(name: &str, case: &Case<f32>) {
        let case = rounded::<T>(case);
        let expected = reference::hstu_attention(&case.attention()).unwrap();
        for isa in Isa::available() {
            let error = error(&case.output(isa), &expected);
            assert!(error <= tolerance::<T>(), "{name} {} {isa:?}: {error:e}", T::NAME);
        }
    }
    for Golden { name, case, .. } in golden() {
        check::<f16>(&name, &case);
        check::<bf16>(&name, &case);
    }
}

#[test]
fn append_gives_the_golden_pools() {
    let threads = Threads::new(3);
    for Golden { name, case, expected_pool, .. } in golden() {
        let same = |pool: &[f32]| common::bits(pool) == common::bits(&expected_pool);
        let mut pool = case.pool.clone();
        reference::paged_kv_append(&case.append(), &mut pool).unwrap();
        assert!(same(&pool), "{name}: reference");
        let mut pool = case.pool.clone();
        case.append().run(&mut pool, &Serial).unwrap();
        assert!(same(&pool), "{name}");
        let mut pool = case.pool.clone();
        case.append().run(&mut pool, &threads).unwrap();
        assert!(same(&pool), "{name}: threads");
    }
}
