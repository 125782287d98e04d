//! The operators around the layers against the reference, over random shapes and every instruction set and type.

mod common;
#[allow(dead_code, reason = "its other half is for the tests of the dense operators")]
mod dense_cases;
mod embed_output_cases;

use common::{error, tolerance};
use dense_cases::Numbers;
use embed_output_cases::{Embed, Linear, Unit};
use pagoda_kernels::cpu::Isa;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{Activation, HstuLinear, HstuUnit, bf16, f16};
use pagoda_test_support::Random;

/// Sizes at which vectors and tasks end, and beyond.
const ROWS: [usize; 8] = [0, 1, 2, 7, 16, 17, 300, 1500];

fn units<T: OperatorElement>() {
    let mut random = Random(7);
    for case in 0..40 {
        let (rows, width) = (random.pick(&ROWS), 1 + random.below(300));
        let unit = Unit::<T>::new(&mut Numbers(Random(case)), rows, width);
        let expected = unit.expected();
        for isa in Isa::available() {
            let mut y = vec![f32::NAN; rows * width];
            unit.call().run_with(isa, &mut y, &Threads::new(3)).unwrap();
            let off = error(&y, &expected);
            assert!(off <= tolerance::<f32>(), "{} {isa:?}: {rows} rows, E={width}: {off:e}", T::NAME);
        }
    }
}

#[test]
fn rows_of_length_1_are_what_the_reference_gives() {
    units::<f32>();
    units::<f16>();
    units::<bf16>();
}

fn embeds<T: OperatorElement>() {
    let mut random = Random(9);
    for case in 0..40 {
        let (rows, width) = (random.pick(&ROWS), 1 + random.below(100));
        let (tables, learned) = (1 + random.below(8), random.below(3));
        let embed = Embed::new(&mut Numbers(Random(case)), rows, width, tables, learned);
        let what = format!("{} {rows} rows, E={width}, {tables} tables and {learned}", T::NAME);
        let bits = |values: &[T]| values.iter().map(|value| value.to_f32().to_bits()).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut y = vec![T::from_f32(f32::NAN); rows * width];
            embed.with(|call| call.run_with(isa, &mut y, &Threads::new(3))).unwrap();
            assert!(error(&y, &embed.expected()) <= tolerance::<T>(), "{isa:?} {what}");
            assert_eq!(bits(&y), bits(&embed.rounded()), "{isa:?} {what}");
        }
    }
}

#[test]
fn embedded_rows_are_sums_in_the_order_of_the_tables() {
    embeds::<f32>();
    embeds::<f16>();
    embeds::<bf16>();
}

#[test]
fn a_row_of_length_1_is_the_same_whatever_is_beside_it() {
    let unit = Unit::<bf16>::new(&mut Numbers(Random(3)), 700, 130);
    for isa in Isa::available() {
        let (mut whole, mut some) = (vec![f32::NAN; 700 * 130], vec![f32::NAN; 130]);
        unit.call().run_with(isa, &mut whole, &Threads::new(2)).unwrap();
        for row in [0, 4, 505, 699] {
            unit.rows(row, 1).run_with(isa, &mut some, &Serial).unwrap();
            assert!(some[..] == whole[row * 130..(row + 1) * 130], "{isa:?} row {row}");
        }
    }
}

#[test]
fn zeros_stay_zeros_and_nan_stays_in_its_row() {
    let x = [0.0, 0.0, 3.0, 4.0, f32::NAN, 1.0, 0.0, 1e-7];
    for isa in Isa::available() {
        let mut y = [7.0; 8];
        HstuUnit { rows: 4, width: 2, x: &x, epsilon: 1e-6 }.run_with(isa, &mut y, &Serial).unwrap();
        assert_eq!(y[..4], [0.0, 0.0, 3.0 / 5.0, 4.0 / 5.0], "{isa:?}");
        assert!(y[4].is_nan() && y[5].is_nan(), "{isa:?}");
        assert_eq!(y[6..], [0.0, 1e-7 / 1e-6], "{isa:?}");
    }
}

#[test]
fn layers_are_what_the_reference_gives_and_rows_what_they_are_alone() {
    let mut random = Random(11);
    for case in 0..60 {
        let (rows, inner, width) = (random.pick(&ROWS[..7]), random.below(150), 1 + random.below(140));
        let linear = Linear::new(&mut Numbers(Random(case)), rows, inner, width);
        let what = format!("{rows} rows, K={inner}, N={width}, {:?}", linear.activation);
        let expected = linear.expected();
        for isa in Isa::available() {
            let mut y = vec![f32::NAN; rows * width];
            linear.call().run_with(isa, &mut y, &Threads::new(3)).unwrap();
            let off = error(&y, &expected);
            assert!(off <= tolerance::<f32>(), "{isa:?} {what}: {off:e}");
            if rows > 0 {
                let mut last = vec![f32::NAN; width];
                linear.rows(rows - 1, 1).run_with(isa, &mut last, &Serial).unwrap();
                assert!(last[..] == y[(rows - 1) * width..], "{isa:?} {what}: the last row alone");
            }
        }
    }
}

#[test]
fn activations_of_what_is_large_or_no_number() {
    let x = [-300.0, 300.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    for (activation, expected) in [
        (Activation::None, x),
        (Activation::Relu, [0.0, 300.0, f32::NAN, f32::INFINITY, 0.0]),
        (Activation::Sigmoid, [0.0, 1.0, f32::NAN, 1.0, 0.0]),
        (Activation::Tanh, [-1.0, 1.0, f32::NAN, 1.0, -1.0]),
    ] {
        for isa in Isa::available() {
            let mut y = [7.0; 5];
            let linear = HstuLinear { rows: 5, inner: 1, width: 1, x: &x, weight: &[1.0], bias: None, activation };
            linear.run_with(isa, &mut y, &Serial).unwrap();
            let same = y.iter().zip(&expected).all(|(y, x)| y == x || y.is_nan() && x.is_nan());
            assert!(same, "{isa:?} {activation:?}: {y:?}");
        }
    }
}
