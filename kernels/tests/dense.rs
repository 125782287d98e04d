//! The dense operators against the reference, over random shapes and every instruction set and type; bits that do not depend
//! on the rest of the batch.

mod common;
mod dense_cases;

use common::{error, tolerance};
use dense_cases::{Gate, Norm, Numbers, Output, Project};
use pagoda_kernels::cpu::Isa;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{bf16, f16};
use pagoda_test_support::Random;

/// Sizes at which vectors, groups, tiles and tasks end, and beyond.
const ROWS: [usize; 13] = [0, 1, 2, 7, 15, 16, 17, 33, 64, 65, 100, 256, 300];

fn every<T: OperatorElement>() {
    let threads = Threads::new(3);
    let mut random = Random(7);
    for case in 0..60 {
        let rows = random.pick(&ROWS);
        let (width, heads, head_size) = (1 + random.below(140), 1 + random.below(4), 1 + random.below(40));
        let mut numbers = Numbers(Random(case));
        let norm = Norm::<T>::new(&mut numbers, rows, width);
        let project = Project::<T>::new(&mut numbers, rows, width, heads, head_size);
        let gate = Gate::<T>::new(&mut numbers, rows, heads, head_size);
        let output = Output::<T>::new(&mut numbers, rows, 1 + random.below(300), width);
        for isa in Isa::available() {
            let what = format!("{} {isa:?} case {case}: {rows} rows, E={width} H={heads} D={head_size}", T::NAME);
            let poison = T::from_f32(f32::NAN);
            let mut y = vec![poison; rows * width];
            norm.call().run_with(isa, &mut y, &threads).unwrap();
            assert!(error(&y, &norm.expected()) <= tolerance::<T>(), "norm {what}");

            let mut four = [(); 4].map(|()| vec![poison; rows * heads * head_size]);
            project.call().run_with(isa, four.each_mut().map(|part| &mut part[..]), &threads).unwrap();
            for (part, expected) in four.iter().zip(project.expected()) {
                assert!(error(part, &expected) <= tolerance::<T>(), "project {what}");
            }

            let mut y = vec![poison; gate.output_len()];
            gate.call().run_with(isa, &mut y, &threads).unwrap();
            assert!(error(&y, &gate.expected()) <= tolerance::<T>(), "gate {what} {:?}", gate.norm);

            let mut y = vec![poison; rows * width];
            output.call().run_with(isa, &mut y, &threads).unwrap();
            assert!(error(&y, &output.expected()) <= tolerance::<T>(), "output {what} K={}", output.inner);
        }
    }
}

#[test]
fn every_operator_gives_what_the_reference_gives() {
    every::<f32>();
    every::<f16>();
    every::<bf16>();
}

#[test]
fn a_row_comes_out_the_same_whatever_is_beside_it() {
    let (width, heads, head_size, rows) = (130, 2, 31, 273);
    let mut numbers = Numbers(Random(5));
    let project = Project::<bf16>::new(&mut numbers, rows, width, heads, head_size);
    let output = Output::<bf16>::new(&mut numbers, rows, 200, width);
    let part = heads * head_size;
    for isa in Isa::available() {
        let mut whole = [(); 4].map(|()| vec![bf16::NAN; rows * part]);
        project.call().run_with(isa, whole.each_mut().map(|part| &mut part[..]), &Threads::new(2)).unwrap();
        let mut whole_output = vec![bf16::NAN; rows * width];
        output.call().run_with(isa, &mut whole_output, &Serial).unwrap();
        for (first, count) in [(0, 1), (272, 1), (17, 3), (3, 16), (100, 33), (1, 70)] {
            let mut some = [(); 4].map(|()| vec![bf16::NAN; count * part]);
            let call = project.rows(first, count);
            call.run_with(isa, some.each_mut().map(|part| &mut part[..]), &Serial).unwrap();
            for (some, whole) in some.iter().zip(&whole) {
                assert!(some[..] == whole[first * part..(first + count) * part], "{isa:?} {first} {count}");
            }
            let mut some = vec![bf16::NAN; count * width];
            output.rows(first, count).run_with(isa, &mut some, &Serial).unwrap();
            assert!(some[..] == whole_output[first * width..(first + count) * width], "{isa:?} {first} {count}");
        }
    }
}

#[test]
fn nan_in_one_row_stays_there() {
    let mut numbers = Numbers(Random(6));
    let mut output = Output::<f32>::new(&mut numbers, 40, 70, 50);
    output.y[3 * 70] = f32::NAN;
    for isa in Isa::available() {
        let mut y = vec![0.0; 40 * 50];
        output.call().run_with(isa, &mut y, &Serial).unwrap();
        for (row, values) in y.chunks_exact(50).enumerate() {
            assert!(values.iter().all(|value| value.is_nan() == (row == 3)), "{isa:?} row {row}");
        }
    }
}

#[test]
fn nothing_is_written_where_a_row_is_none() {
    let mut numbers = Numbers(Random(1));
    let mut gate =
        std::iter::repeat_with(|| Gate::<f32>::new(&mut numbers, 100, 2, 3)).find(|gate| gate.taken.is_some());
    let gate = gate.as_mut().expect("one in two has");
    let mut output =
        std::iter::repeat_with(|| Output::<f32>::new(&mut numbers, 100, 3, 2)).find(|it| it.taken.is_some());
    let output = output.as_mut().expect("one in three has");
    for (of, index) in gate.taken.iter_mut().chain(&mut output.taken) {
        index[99] = *of as i64;
    }
    let mut y = vec![7.0; gate.output_len()];
    let refused = gate.call().run(&mut y, &Serial).unwrap_err().to_string();
    assert!(refused.starts_with("index: row ") && refused.contains(" at 99, expected rows of the "), "{refused}");
    let mut other = vec![7.0; 200];
    assert_eq!(output.call().run(&mut other, &Serial).unwrap_err().to_string()[..10], refused[..10]);
    assert!(y.iter().chain(&other).all(|value| *value == 7.0));
}
