//! `Glu` against float64, over random shapes and every instruction set and type.

mod glu_cases;

use glu_cases::{Gated, worst};
use pagoda_kernels::cpu::Isa;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{Glu, GluActivation, bf16, f16};
use pagoda_test_support::Random;

/// Sizes at which vectors, blocks and tasks end, and beyond.
const SHAPES: &[(usize, usize)] = if cfg!(miri) {
    &[(0, 3), (3, 0), (1, 1), (2, 33), (3, 97)]
} else {
    &[(0, 5), (4, 0), (1, 1), (3, 7), (2, 16), (5, 17), (1, 1023), (2, 1025), (300, 30), (1, 40_001), (7, 4_864)]
};

fn compare<T: OperatorElement>() {
    let mut random = Random(5);
    for &(rows, width) in SHAPES {
        for activation in GluActivation::ALL {
            let glu = Gated::<T>::new(&mut random, rows, width, activation);
            let expected = glu.expected();
            for isa in Isa::available() {
                let mut y = vec![T::from_f32(f32::NAN); rows * width];
                glu.call().run_with(isa, &mut y, &Threads::new(3)).unwrap();
                let off = worst(&glu, &y, &expected);
                assert!(off <= 1.0, "{} {isa:?} {activation:?} {rows} rows, F={width}: {off} of the bound", T::NAME);
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

/// Every gate of a range of f32, and every one of f16.
#[test]
#[cfg(not(miri))]
fn activations_are_right_everywhere() {
    fn check<T: OperatorElement>(gates: &[T]) {
        let x: Vec<T> = gates.iter().copied().chain(gates.iter().map(|_| T::from_f32(1.0))).collect();
        for activation in GluActivation::ALL {
            let glu = Gated { rows: 1, width: gates.len(), x: x.clone(), activation };
            let expected = glu.expected();
            for isa in Isa::available() {
                let mut y = vec![T::from_f32(f32::NAN); gates.len()];
                glu.call().run_with(isa, &mut y, &Serial).unwrap();
                for (at, gate) in gates.iter().enumerate() {
                    let one = Gated { rows: 1, width: 1, x: vec![*gate, T::from_f32(1.0)], activation };
                    let off = worst(&one, &y[at..=at], &expected[at..=at]);
                    let (gate, y) = (gate.to_f32(), y[at].to_f32());
                    assert!(off <= 1.0, "{isa:?} {activation:?}({gate:e}) = {y:e}, expected {:e}", expected[at]);
                }
            }
        }
    }
    let mut gates: Vec<f32> = (0..64_000).map(|i| -16.0 + i as f32 * 0.0005).collect();
    gates.extend([0.0, -0.0, 1e-38, -1e-38, 50.0, -50.0, 1e4, 1e30, 3e38]);
    check(&gates);
    let gates: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|gate| gate.is_finite()).collect();
    check(&gates);
}

/// Far down the true value is nothing, and ours may be next to nothing.
#[test]
fn gates_far_below_zero_give_next_to_nothing() {
    for activation in GluActivation::ALL {
        for gate in [-1e3_f32, -1e4, -1e13, -1e25] {
            for isa in Isa::available() {
                let mut y = [f32::NAN];
                Glu { rows: 1, width: 1, x: &[gate, 1.0], activation }.run_with(isa, &mut y, &Serial).unwrap();
                assert!(y[0].abs() <= -gate * 1.2e-38, "{isa:?} {activation:?}({gate:e}) = {:e}", y[0]);
            }
        }
    }
}

#[test]
fn a_number_is_the_same_whatever_is_beside_it() {
    fn check<T: OperatorElement>() {
        let (rows, width) = if cfg!(miri) { (5, 37) } else { (40, 1_301) };
        for activation in GluActivation::ALL {
            let glu = Gated::<T>::new(&mut Random(3), rows, width, activation);
            for isa in Isa::available() {
                let mut whole = vec![T::default(); rows * width];
                glu.call().run_with(isa, &mut whole, &Threads::new(2)).unwrap();
                for row in [0, 1, rows - 1] {
                    let mut some = vec![T::default(); width];
                    glu.rows(row, 1).run_with(isa, &mut some, &Serial).unwrap();
                    for column in 0..width {
                        let (found, expected) = (some[column].to_f32(), whole[row * width + column].to_f32());
                        assert_eq!(found.to_bits(), expected.to_bits(), "{isa:?} {activation:?} row {row} {column}");
                    }
                    let pair = [glu.x[row * 2 * width + width - 1], glu.x[row * 2 * width + 2 * width - 1]];
                    let mut one = [T::default()];
                    Glu { rows: 1, width: 1, x: &pair, activation }.run_with(isa, &mut one, &Serial).unwrap();
                    assert_eq!(one[0].to_f32().to_bits(), some[width - 1].to_f32().to_bits(), "{isa:?} row {row}");
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}

#[test]
fn nan_stays_in_its_place() {
    for activation in GluActivation::ALL {
        for isa in Isa::available() {
            // Row 0 has a NaN for a gate, row 1 for an up.
            let x = [f32::NAN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, f32::NAN];
            let mut y = [0.0; 4];
            Glu { rows: 2, width: 2, x: &x, activation }.run_with(isa, &mut y, &Serial).unwrap();
            let nan = y.map(f32::is_nan);
            assert_eq!(nan, [true, false, false, true], "{isa:?} {activation:?}: {y:?}");
        }
    }
}

#[test]
fn after_an_error_the_output_is_as_it_was() {
    let mut y = [7.0_f32; 6];
    let call = Glu { rows: 2, width: 3, x: &[1.0; 11], activation: GluActivation::Gelu };
    let error = call.run(&mut y, &Serial).unwrap_err();
    assert_eq!(error.to_string(), "x: 11 elements do not make the shape [2, 2, 3]");
    assert_eq!(y, [7.0; 6]);
}
