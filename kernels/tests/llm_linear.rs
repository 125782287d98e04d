//! `Linear` against float64, over random shapes, every combination of its parts, and every instruction set and type.

mod linear_cases;

use linear_cases::{Parts, Product, all_parts};
use pagoda_kernels::cpu::{Isa, OperatorElement};
use pagoda_kernels::parallel::{Parallel, Serial, Threads};
use pagoda_kernels::{GluActivation, Linear, bf16, f16};
use pagoda_test_support::Random;

/// Sizes at which vectors and tasks end, and beyond.
const SHAPES: &[(usize, usize, usize)] = if cfg!(miri) {
    &[(0, 3, 2), (2, 0, 3), (3, 2, 0), (2, 17, 34)]
} else {
    &[(0, 5, 4), (4, 0, 6), (3, 4, 0), (1, 1, 1), (1, 576, 96), (3, 33, 65), (5, 16, 130), (130, 40, 70), (2, 1025, 8)]
};

fn run<T: OperatorElement>(call: &Linear<'_, T>, isa: Isa, parallel: &dyn Parallel) -> [Vec<T>; 3] {
    let mut y = call.widths().unwrap().map(|width| vec![T::from_f32(f32::NAN); call.rows * width]);
    call.run_with(isa, y.each_mut().map(|y| &mut y[..]), parallel).unwrap();
    y
}

fn compare<T: OperatorElement>() {
    let mut random = Random(7);
    let threads = Threads::new(3);
    for &(rows, inner, columns) in SHAPES {
        for parts in all_parts(columns) {
            let product = Product::<T>::new(&mut random, rows, inner, columns, parts);
            for isa in Isa::available() {
                let y = run(&product.call(), isa, &threads);
                let off = product.worst(&product.together(&y));
                let what = format!("{} {isa:?} T={rows} K={inner} N={columns} {parts:?}", T::NAME);
                assert!(off <= 1.0, "{what}: {off} of the bound");
            }
        }
    }
}

#[test]
fn every_instruction_set_gives_what_the_reference_gives() {
    compare::<f32>();
    compare::<f16>();
    compare::<bf16>();
}

#[test]
fn a_row_is_the_same_whatever_is_beside_it() {
    fn check<T: OperatorElement>() {
        let (rows, inner, columns) = if cfg!(miri) { (3, 9, 6) } else { (140, 70, 44) };
        for activation in [None, Some(GluActivation::Gelu)] {
            let parts = Parts { bias: true, norm: true, residual: true, activation, cut: [0, 0] };
            let product = Product::<T>::new(&mut Random(3), rows, inner, columns, parts);
            for isa in Isa::available() {
                let [whole, ..] = run(&product.call(), isa, &Threads::new(2));
                let width = product.call().width();
                for row in [0, 1, rows - 1] {
                    let [some, ..] = run(&product.rows(row, 1), isa, &Serial);
                    let bits = |numbers: &[T]| numbers.iter().map(|x| x.to_f32().to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&some), bits(&whole[row * width..][..width]), "{isa:?} {activation:?} row {row}");
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn after_an_error_the_outputs_are_as_they_were() {
    let product = Product::<f32>::new(&mut Random(1), 2, 3, 4, Parts::default());
    let mut y = [7.0_f32; 8];
    let call = Linear { bias: Some(&[0.0; 3]), ..product.call() };
    let error = call.run([&mut y, &mut [], &mut []], &Serial).unwrap_err();
    assert_eq!(error.to_string(), "bias: 3 elements do not make the shape [4]");
    assert_eq!(y, [7.0; 8]);
}
