//! Random calls of the operators around the layers, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{Activation, HstuEmbed, HstuLinear, HstuUnit, Lookup};

use crate::dense_cases::Numbers;

/// A call of `HstuUnit`. Some rows are shorter than its epsilon.
pub struct Unit<T> {
    pub rows: usize,
    pub width: usize,
    pub x: Vec<T>,
}

impl<T: OperatorElement> Unit<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, width: usize) -> Self {
        let x = (0..rows).flat_map(|row| numbers.tensor(width, if row % 5 == 4 { 1e-3 } else { 4.0 })).collect();
        Self { rows, width, x }
    }

    pub fn call(&self) -> HstuUnit<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> HstuUnit<'_, T> {
        let width = self.width;
        HstuUnit { rows, width, x: &self.x[first * width..(first + rows) * width], epsilon: 0.1 }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_unit(&self.call()).unwrap()
    }
}

/// A call of `HstuLinear`.
pub struct Linear {
    pub rows: usize,
    pub inner: usize,
    pub width: usize,
    pub x: Vec<f32>,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub activation: Activation,
}

impl Linear {
    pub fn new(numbers: &mut Numbers, rows: usize, inner: usize, width: usize) -> Self {
        let (x, weight, bias) =
            (numbers.tensor(rows * inner, 1.0), numbers.weight(width, inner), numbers.perhaps(width));
        Self { rows, inner, width, x, weight, bias, activation: numbers.0.pick(&Activation::ALL).1 }
    }

    pub fn call(&self) -> HstuLinear<'_> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> HstuLinear<'_> {
        let Self { inner, width, activation, .. } = *self;
        let (x, bias) = (&self.x[first * inner..(first + rows) * inner], self.bias.as_deref());
        HstuLinear { rows, inner, width, x, weight: &self.weight, bias, activation }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_linear(&self.call()).unwrap()
    }
}

/// A call of `HstuEmbed`. Some keys, positions and times are none of the tables'.
pub struct Embed {
    pub rows: usize,
    pub width: usize,
    /// Tables and what is looked up in them.
    pub tables: Vec<(Vec<f32>, Vec<i64>)>,
    pub learned: Vec<(Vec<f32>, Vec<i64>)>,
    pub scale: f32,
}

impl Embed {
    pub fn new(numbers: &mut Numbers, rows: usize, width: usize, tables: usize, learned: usize) -> Self {
        let mut lookup = |least: usize| {
            let table_rows = least + numbers.0.below(50);
            let index = (0..rows).map(|_| match numbers.0.below(8) {
                0 => -1,
                1 => numbers.0.pick(&[i64::MIN, i64::MAX, -7, 1 << 32, -(1 << 32)]),
                2 => table_rows as i64 - 2 + numbers.0.below(4) as i64,
                _ => numbers.0.below(table_rows) as i64,
            });
            let index = index.collect();
            (numbers.tensor(table_rows * width, 1.0), index)
        };
        let tables = (0..tables).map(|_| lookup(2)).collect();
        let learned = (0..learned).map(|_| lookup(1)).collect();
        Self { rows, width, tables, learned, scale: (width as f32).sqrt() }
    }

    pub fn expected(&self) -> Vec<f64> {
        self.with(|call| reference::hstu_embed(&call).unwrap())
    }

    /// Step by step in f32, as one operator after the other would: what has to come out, to the bit.
    pub fn rounded<T: OperatorElement>(&self) -> Vec<T> {
        let row_of = |at: i64, last: usize, below: usize, beyond: usize| match usize::try_from(at) {
            Ok(at) if at <= last => at,
            Ok(_) => beyond,
            Err(_) => below,
        };
        let number = |at: usize| {
            let (row, column) = (at / self.width, at % self.width);
            let of_key = |(table, keys): &(Vec<f32>, Vec<i64>)| {
                let none = table.len() / self.width - 1;
                table[row_of(keys[row], none - 1, none, none - 1) * self.width + column]
            };
            let of_bucket = |(table, buckets): &(Vec<f32>, Vec<i64>)| {
                let last = table.len() / self.width - 1;
                table[row_of(buckets[row], last, 0, last) * self.width + column]
            };
            let sum = self.tables[1..].iter().fold(of_key(&self.tables[0]), |sum, lookup| sum + of_key(lookup));
            let scaled = sum * self.scale;
            T::from_f32(self.learned.iter().fold(scaled, |sum, lookup| sum + of_bucket(lookup)))
        };
        (0..self.rows * self.width).map(number).collect()
    }

    /// Lends the call.
    pub fn with<R>(&self, use_it: impl FnOnce(HstuEmbed<'_>) -> R) -> R {
        fn lookup((table, index): &(Vec<f32>, Vec<i64>)) -> Lookup<'_> {
            Lookup { table, index }
        }
        let tables: Vec<_> = self.tables.iter().map(lookup).collect();
        let learned: Vec<_> = self.learned.iter().map(lookup).collect();
        let Self { rows, width, scale, .. } = *self;
        use_it(HstuEmbed { rows, width, tables: &tables, scale, learned: &learned })
    }
}
