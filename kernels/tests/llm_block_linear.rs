//! `BlockLinear` against float64, over random shapes and every instruction set.

use pagoda_kernels::cpu::{Isa, reference};
use pagoda_kernels::parallel::{Serial, Threads};
use pagoda_kernels::{BLOCK, BlockLinear, CodeBits, OUTPUT_BLOCK};
use pagoda_test_support::Random;

/// Rows, K and N: at which the few rows end, tiles, panels, groups of sums and tasks, and beyond.
const SHAPES: &[(usize, usize, usize)] = if cfg!(miri) {
    &[(0, 32, 3), (1, 64, 17), (3, 32, 5), (8, 32, 3), (14, 64, 6), (2, 0, 3)]
} else {
    &[
        (0, 32, 4),
        (3, 32, 0),
        (2, 0, 5),
        (9, 0, 5),
        (1, 32, 1),
        (1, 576, 960),
        (1, 1536, 131),
        (2, 64, 33),
        (3, 96, 50),
        (4, 160, 19),
        (5, 64, 7),
        (6, 32, 31),
        (7, 128, 16),
        (8, 576, 65),
        (9, 64, 13),
        (10, 96, 6),
        (11, 32, 3),
        (131, 64, 37),
        (300, 1536, 18),
    ]
};

/// A call of `BlockLinear`.
struct Matrix {
    rows: usize,
    inner: usize,
    width: usize,
    bits: CodeBits,
    x: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
    offsets: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl Matrix {
    fn new(random: &mut Random, (rows, inner, width): (usize, usize, usize), bits: CodeBits, all: bool) -> Self {
        let blocks = width * inner / BLOCK;
        let mut numbers = |count: usize, scale: f32| (0..count).map(|_| random.number() * scale).collect::<Vec<f32>>();
        let (x, scales) = (numbers(rows * inner, 2.0), numbers(blocks, 0.1));
        let (offsets, bias) = (all.then(|| numbers(blocks, 0.5)), all.then(|| numbers(width, 3.0)));
        let codes = (0..blocks * bits.block_bytes()).map(|_| random.below(256) as u8).collect();
        Self { rows, inner, width, bits, x, codes, scales, offsets, bias }
    }

    fn call(&self) -> BlockLinear<'_> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows of x.
    fn rows(&self, first: usize, rows: usize) -> BlockLinear<'_> {
        BlockLinear {
            rows,
            inner: self.inner,
            width: self.width,
            x: &self.x[first * self.inner..(first + rows) * self.inner],
            codes: &self.codes,
            bits: self.bits,
            scales: &self.scales,
            offsets: self.offsets.as_deref(),
            bias: self.bias.as_deref(),
        }
    }

    /// The sum of the sizes of what an output adds up, which its rounding errors are a part of.
    fn sizes(&self) -> Vec<f64> {
        let absolute = |numbers: &[f32]| numbers.iter().map(|number| number.abs()).collect::<Vec<_>>();
        let middle = if self.bits == CodeBits::Four { 8.0 } else { 128.0 };
        let offsets: Vec<f32> = (0..self.scales.len())
            .map(|block| {
                let offset = self.offsets.as_ref().map_or(0.0, |offsets| offsets[block].abs());
                // With codes of 0, this is the largest weight that the block can have.
                offset + 2.0 * middle * self.scales[block].abs()
            })
            .collect();
        let (x, scales) = (absolute(&self.x), absolute(&self.scales));
        let bias = self.bias.as_ref().map(|bias| absolute(bias));
        let codes = vec![0; self.codes.len()];
        let call = self.call();
        let sizes = BlockLinear {
            x: &x,
            codes: &codes,
            scales: &scales,
            offsets: Some(&offsets),
            bias: bias.as_deref(),
            ..call
        };
        reference::block_linear(&sizes).unwrap()
    }
}

#[test]
fn every_instruction_set_gives_what_the_reference_gives() {
    let mut random = Random(11);
    for &shape in SHAPES {
        for (bits, all) in CodeBits::ALL.into_iter().flat_map(|bits| [(bits, false), (bits, true)]) {
            let matrix = Matrix::new(&mut random, shape, bits, all);
            let (expected, sizes) = (reference::block_linear(&matrix.call()).unwrap(), matrix.sizes());
            for isa in Isa::available() {
                let mut y = vec![f32::NAN; expected.len()];
                let mut maxima = vec![f32::NAN; shape.0 * shape.2.div_ceil(OUTPUT_BLOCK)];
                matrix.call().run_with(isa, &mut y, Some(&mut maxima), &Threads::new(3)).unwrap();
                let largest = y.chunks(shape.2.max(1)).flat_map(|row| row.chunks(OUTPUT_BLOCK).map(largest));
                assert_eq!(maxima, largest.collect::<Vec<_>>(), "{isa:?} {bits:?} {shape:?}");
                for (at, (found, expected)) in y.iter().zip(&expected).enumerate() {
                    let error = (f64::from(*found) - expected).abs();
                    // NaN is no smaller than anything.
                    assert!(
                        error <= sizes[at] * 1e-6,
                        "{isa:?} {bits:?} {shape:?}, output {at}: {found:e}, expected {expected:e}"
                    );
                }
            }
        }
    }
}

fn largest(outputs: &[f32]) -> f32 {
    outputs.iter().fold(f32::NEG_INFINITY, |most, &output| if output > most { output } else { most })
}

#[test]
fn nan_is_no_maximum() {
    let mut matrix = Matrix::new(&mut Random(14), (2, 32, 70), CodeBits::Eight, true);
    // Of row 0 everything is NaN, and of row 1 nothing but three outputs.
    matrix.x[..32].fill(f32::NAN);
    let bias = matrix.bias.as_mut().unwrap();
    [3, 40, 69].into_iter().for_each(|column| bias[column] = f32::NAN);
    for isa in Isa::available() {
        let (mut y, mut maxima) = (vec![0.0; 140], vec![0.0; 6]);
        matrix.call().run_with(isa, &mut y, Some(&mut maxima), &Serial).unwrap();
        assert_eq!(maxima[..3], [f32::NEG_INFINITY; 3], "{isa:?}");
        assert_eq!(maxima[3..], y[70..].chunks(OUTPUT_BLOCK).map(largest).collect::<Vec<_>>(), "{isa:?}");
        assert!(maxima[3..].iter().all(|most| most.is_finite()), "{isa:?}");
    }
}

#[test]
fn an_output_is_the_same_whatever_rows_are_beside_it() {
    let (rows, shape) = if cfg!(miri) { (13, (13, 64, 9)) } else { (140, (140, 576, 49)) };
    for bits in CodeBits::ALL {
        let matrix = Matrix::new(&mut Random(12), shape, bits, true);
        for isa in Isa::available() {
            let mut whole = vec![0.0; rows * shape.2];
            matrix.call().run_with(isa, &mut whole, None, &Threads::new(2)).unwrap();
            for (first, count) in
                [(0, 1), (1, 2), (3, 3), (2, 4), (0, 5), (5, 6), (4, 7), (2, 8), (3, 9), (rows - 1, 1)]
            {
                let mut some = vec![0.0; count * shape.2];
                matrix.rows(first, count).run_with(isa, &mut some, None, &Serial).unwrap();
                let expected = &whole[first * shape.2..(first + count) * shape.2];
                let bits_of = |numbers: &[f32]| numbers.iter().map(|number| number.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits_of(&some), bits_of(expected), "{isa:?} {bits:?} rows {first} and {count} from there");
            }
        }
    }
}

#[test]
fn after_an_error_the_output_is_as_it_was() {
    let matrix = Matrix::new(&mut Random(13), (2, 64, 3), CodeBits::Four, true);
    let mut y = [7.0; 6];
    let error = BlockLinear { x: &matrix.x[1..], ..matrix.call() }.run(&mut y, None, &Serial).unwrap_err();
    assert_eq!(error.to_string(), "x: 127 elements do not make the shape [2, 64]");
    assert_eq!(y, [7.0; 6]);
}
