//! Random calls of the dense operators, for the tests of the CPU and of the GPU.

use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::cpu::reference;
use pagoda_kernels::{GateNorm, HstuGate, HstuNorm, HstuOutput, HstuProject, Silu, Taken};
use pagoda_test_support::Random;

/// A source of tensors.
pub struct Numbers(pub Random);

impl Numbers {
    /// Numbers between -scale and scale.
    pub fn tensor<T: OperatorElement>(&mut self, len: usize, scale: f32) -> Vec<T> {
        (0..len).map(|_| T::from_f32(self.0.number() * scale)).collect()
    }

    /// A tensor, or none.
    pub fn perhaps<T: OperatorElement>(&mut self, len: usize) -> Option<Vec<T>> {
        (!self.0.once_in(3)).then(|| self.tensor(len, 1.0))
    }

    /// Which rows of how many to take so many of; none: all.
    fn taken(&mut self, count: usize) -> Option<(usize, Vec<i64>)> {
        let of = 1 + self.0.below(2 * count + 3);
        self.0.once_in(2).then(|| (of, (0..count).map(|_| self.0.below(of) as i64).collect()))
    }

    /// A weight for sums of that many products.
    pub fn weight<T: OperatorElement>(&mut self, rows: usize, depth: usize) -> Vec<T> {
        self.tensor(rows * depth, 3.0 / (depth as f32).sqrt())
    }
}

/// A call of `HstuNorm`.
pub struct Norm<T> {
    pub rows: usize,
    pub width: usize,
    pub x: Vec<T>,
    pub weight: Vec<T>,
    pub bias: Vec<T>,
}

impl<T: OperatorElement> Norm<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, width: usize) -> Self {
        let x = numbers.tensor(rows * width, 4.0);
        Self { rows, width, x, weight: numbers.tensor(width, 2.0), bias: numbers.tensor(width, 1.0) }
    }

    pub fn call(&self) -> HstuNorm<'_, T> {
        let Self { rows, width, .. } = *self;
        HstuNorm { rows, width, x: &self.x, weight: &self.weight, bias: &self.bias, epsilon: 1e-5 }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_norm(&self.call()).unwrap()
    }
}

/// A call of `HstuProject`.
pub struct Project<T> {
    pub rows: usize,
    pub width: usize,
    pub heads: usize,
    pub head_size: usize,
    pub x: Vec<T>,
    pub weight: Vec<T>,
    pub bias: Option<Vec<T>>,
    pub silu: Silu,
}

impl<T: OperatorElement> Project<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, width: usize, heads: usize, head_size: usize) -> Self {
        let x = numbers.tensor(rows * width, 1.0);
        let weight = numbers.weight(4 * heads * head_size, width);
        let bias = numbers.perhaps(4 * heads * head_size);
        let silu = numbers.0.pick(&[Silu::All, Silu::U]);
        Self { rows, width, heads, head_size, x, weight, bias, silu }
    }

    pub fn call(&self) -> HstuProject<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> HstuProject<'_, T> {
        let Self { width, heads, head_size, silu, .. } = *self;
        let (x, bias) = (&self.x[first * width..(first + rows) * width], self.bias.as_deref());
        HstuProject { rows, width, heads, head_size, x, weight: &self.weight, bias, silu }
    }

    pub fn expected(&self) -> [Vec<f64>; 4] {
        reference::hstu_project(&self.call()).unwrap()
    }
}

/// Lends it.
fn lent(taken: &Option<(usize, Vec<i64>)>) -> Option<Taken<'_>> {
    taken.as_ref().map(|(of, index)| Taken { of: *of, index })
}

/// A call of `HstuGate`.
pub struct Gate<T> {
    pub rows: usize,
    pub taken: Option<(usize, Vec<i64>)>,
    pub heads: usize,
    pub head_size: usize,
    pub attended: Vec<T>,
    pub u: Vec<T>,
    pub weight: Vec<T>,
    pub bias: Vec<T>,
    pub norm: GateNorm,
    pub concat: bool,
}

impl<T: OperatorElement> Gate<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, heads: usize, head_size: usize) -> Self {
        let width = heads * head_size;
        let norm = numbers.0.pick(&[GateNorm::Layer, GateNorm::Group]);
        let learned = if norm == GateNorm::Group { heads } else { width };
        let taken = numbers.taken(rows);
        let given = taken.as_ref().map_or(rows, |(of, _)| *of);
        Self {
            rows,
            taken,
            heads,
            head_size,
            attended: numbers.tensor(given * width, 1.0),
            u: numbers.tensor(given * width, 1.0),
            weight: numbers.tensor(learned, 2.0),
            bias: numbers.tensor(learned, 1.0),
            norm,
            concat: numbers.0.once_in(2),
        }
    }

    pub fn output_len(&self) -> usize {
        self.rows * self.heads * self.head_size * if self.concat { 3 } else { 1 }
    }

    pub fn call(&self) -> HstuGate<'_, T> {
        let Self { rows, heads, head_size, norm, concat, .. } = *self;
        let (attended, u, weight, bias) = (&self.attended[..], &self.u[..], &self.weight[..], &self.bias[..]);
        let taken = lent(&self.taken);
        HstuGate { rows, taken, heads, head_size, attended, u, weight, bias, epsilon: 1e-6, norm, concat }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_gate(&self.call()).unwrap()
    }
}

/// A call of `HstuOutput`.
pub struct Output<T> {
    pub rows: usize,
    pub inner: usize,
    pub width: usize,
    pub y: Vec<T>,
    pub weight: Vec<T>,
    pub bias: Option<Vec<T>>,
    pub residual: Option<Vec<T>>,
    pub taken: Option<(usize, Vec<i64>)>,
}

impl<T: OperatorElement> Output<T> {
    pub fn new(numbers: &mut Numbers, rows: usize, inner: usize, width: usize) -> Self {
        let (y, weight) = (numbers.tensor(rows * inner, 1.0), numbers.weight(width, inner));
        let (bias, taken) = (numbers.perhaps(width), numbers.taken(rows));
        let residual = numbers.perhaps(taken.as_ref().map_or(rows, |(of, _)| *of) * width);
        let taken = taken.filter(|_| residual.is_some());
        Self { rows, inner, width, y, weight, bias, residual, taken }
    }

    pub fn call(&self) -> HstuOutput<'_, T> {
        self.rows(0, self.rows)
    }

    /// Of some of the rows.
    pub fn rows(&self, first: usize, rows: usize) -> HstuOutput<'_, T> {
        let Self { inner, width, .. } = *self;
        let taken = lent(&self.taken).map(|Taken { of, index }| Taken { of, index: &index[first..first + rows] });
        let residual = self.residual.as_ref().map(|residual| match taken {
            Some(_) => &residual[..],
            None => &residual[first * width..(first + rows) * width],
        });
        let (y, bias) = (&self.y[first * inner..(first + rows) * inner], self.bias.as_deref());
        HstuOutput { rows, inner, width, y, weight: &self.weight, bias, residual, taken }
    }

    pub fn expected(&self) -> Vec<f64> {
        reference::hstu_output(&self.call()).unwrap()
    }
}
