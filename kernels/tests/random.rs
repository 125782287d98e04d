//! Every instruction set and element type gives what the reference gives, on many random calls.

mod common;

use common::{Case, Random, User, bits, error, random_case as case, tolerance};
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{HstuAttention, bf16, f16};
use pagoda_test_support::kernel_cases;

fn attention_matches<T: OperatorElement>() {
    let threads = Threads::new(2);
    let mut worst: f64 = 0.0;
    for seed in 0..kernel_cases() {
        let case = case::<T>(seed);
        let expected = reference::hstu_attention(&case.attention()).unwrap();
        for isa in Isa::available() {
            let output = case.output_on(isa, &threads).unwrap();
            let error = error(&output, &expected);
            assert!(
                error <= tolerance::<T>(),
                "seed {seed} {} {isa:?} error {error:e}: D={} H={} page {} group {} window {} alpha {} {:?}",
                T::NAME,
                case.head_size,
                case.heads,
                case.page_size,
                case.target_group_size,
                case.max_attn_len,
                case.alpha,
                case.users
            );
            worst = worst.max(error);
        }
    }
    println!("{}: worst relative error {worst:e}", T::NAME);
}

#[test]
fn attention_matches_in_f32() {
    attention_matches::<f32>();
}

#[test]
fn attention_matches_in_f16() {
    attention_matches::<f16>();
}

#[test]
fn attention_matches_in_bf16() {
    attention_matches::<bf16>();
}

#[test]
fn append_matches_to_the_bit() {
    fn check<T: OperatorElement>() {
        let threads = Threads::new(3);
        for seed in 0..kernel_cases() {
            let case = case::<T>(1000 + seed);
            let mut expected = case.pool.clone();
            reference::paged_kv_append(&case.append(), &mut expected).unwrap();
            let mut pool = case.pool.clone();
            case.append().run(&mut pool, &threads).unwrap();
            assert!(bits(&pool) == bits(&expected), "seed {seed} {}", T::NAME);
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn an_append_of_many_tasks_matches() {
    let tokens = if cfg!(miri) { 90 } else { 700 };
    let user = User { cached: 13, new: tokens, candidates: 3, contextual: 0 };
    let case = Case::<f32>::new(&mut Random(5), &[user, user], 3, 200, 16);
    let mut expected = case.pool.clone();
    reference::paged_kv_append(&case.append(), &mut expected).unwrap();
    let mut pool = case.pool.clone();
    case.append().run(&mut pool, &Threads::new(3)).unwrap();
    assert!(bits(&pool) == bits(&expected));
}

#[test]
fn a_call_without_a_cache_matches() {
    let users = [User { cached: 0, new: 60, candidates: 11, contextual: 0 }, User { new: 3, ..User::default() }];
    let case = Case::<f32>::new(&mut Random(6), &users, 2, 24, 8);
    let attention = HstuAttention { cache: None, ..case.attention() };
    let expected = reference::hstu_attention(&attention).unwrap();
    for isa in Isa::available() {
        let mut output = vec![f32::NAN; case.query.len()];
        attention.run_with(isa, &mut output, &Serial).unwrap();
        assert!(error(&output, &expected) <= tolerance::<f32>(), "{isa:?}");
    }
}

#[test]
fn candidates_alone_are_what_they_are_among_all() {
    fn check<T: OperatorElement>() {
        let threads = Threads::new(2);
        for seed in 0..kernel_cases() {
            let mut case = case::<T>(2000 + seed);
            for isa in Isa::available() {
                case.candidates_only = false;
                let expected = case.candidates_of(&case.output_on(isa, &threads).unwrap());
                case.candidates_only = true;
                let output = case.output_on(isa, &threads).unwrap();
                assert!(bits(&output) == bits(&expected), "seed {seed} {} {isa:?} {:?}", T::NAME, case.users);
            }
            let some = reference::hstu_attention(&case.attention()).unwrap();
            case.candidates_only = false;
            let all = case.candidates_of(&reference::hstu_attention(&case.attention()).unwrap());
            assert_eq!(some, all, "seed {seed}");
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn large_scores_match() {
    for (scale, alpha) in [(100.0, 100.0), (3.0, -1e4), (1e-20, 1.0)] {
        let users = [User { cached: 50, new: 30, candidates: 20, contextual: 0 }];
        let mut case = Case::<f32>::new(&mut Random(7), &users, 1, 32, 16);
        case.query.iter_mut().for_each(|q| *q *= scale);
        case.alpha = alpha;
        let expected = reference::hstu_attention(&case.attention()).unwrap();
        for isa in Isa::available() {
            let error = error(&case.output(isa), &expected);
            assert!(error <= tolerance::<f32>(), "{isa:?} scale {scale} alpha {alpha}: {error:e}");
        }
    }
}

#[test]
fn pairs_are_counted_as_the_reference_sees_them() {
    // With D = 1, alpha = 1 and silu of a constant, every pair adds the same: the sum counts them.
    for seed in 0..kernel_cases() {
        let mut random = Random(seed);
        let mut case = case::<f32>(seed);
        let contextual = case.num_contextual.clone();
        let attributes = (case.target_group_size, case.max_attn_len);
        case = Case::new(&mut random, &case.users, 1, 1, case.page_size);
        case.num_contextual = contextual;
        (case.target_group_size, case.max_attn_len) = attributes;
        (case.alpha, case.scaling_seqlen) = (1.0, 1);
        for tensor in [&mut case.query, &mut case.key, &mut case.value, &mut case.pool] {
            tensor.fill(1.0);
        }
        let sum: f64 = reference::hstu_attention(&case.attention()).unwrap().iter().sum();
        let silu = 1.0 / (1.0 + (-1.0f64).exp());
        assert_eq!((sum / silu).round() as u64, case.attention().unmasked_pairs(), "seed {seed}");
    }
}
