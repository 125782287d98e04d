//! The inputs of a run, by their names in the graph.

use std::ops::RangeInclusive;

use crate::error::Result;
use crate::tensor::{ElementType, Scalar, Tensor};

/// One input of a run.
pub(in super::super) struct Input<'a> {
    pub(in super::super) name: &'a str,
    pub(in super::super) numbers: Values<'a>,
    pub(in super::super) dim: Dim,
    /// The other dimensions, after `dim`.
    pub(in super::super) inner: &'a [i64],
}

impl Input<'_> {
    /// A read-only tensor over the numbers. It must be dropped before their buffer changes.
    pub(in super::super) fn tensor(&self) -> Result<Tensor> {
        self.numbers.tensor(self.inner)
    }
}

/// What an input has one number for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Dim {
    /// Rows. Padding rows have this number.
    Rows(i64),
    /// Rows with results.
    Outputs,
    Sequences,
    /// Sequences, and one more: the offsets of a ragged array.
    Bounds,
    Pages,
}

/// The size of each dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Sizes {
    pub(in super::super) sequences: usize,
    pub(in super::super) rows: usize,
    pub(in super::super) outputs: usize,
    pub(in super::super) pages: usize,
    /// Rows of a sequence that has some, at least and at most.
    pub(in super::super) shortest: usize,
    pub(in super::super) longest: usize,
}

impl Sizes {
    pub(in super::super) fn of(&self, dim: Dim) -> usize {
        match dim {
            Dim::Rows(_) => self.rows,
            Dim::Outputs => self.outputs,
            Dim::Sequences => self.sequences,
            Dim::Bounds => self.sequences + 1,
            Dim::Pages => self.pages,
        }
    }

    /// Whether a batch can be padded to this.
    pub(in super::super) fn fits(&self, batch: &Self) -> bool {
        batch.sequences <= self.sequences
            && batch.rows <= self.rows
            && batch.outputs <= self.outputs
            && batch.pages <= self.pages
            && batch.shortest >= self.shortest
            && batch.longest <= self.longest
    }

    /// How many rows a sequence has that has some.
    pub(super) fn rows_each(&self) -> RangeInclusive<usize> {
        self.shortest..=self.longest
    }
}

/// The numbers of an input, in a buffer of the workspace.
#[derive(Clone, Copy)]
pub(in super::super) enum Values<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl Values<'_> {
    pub(in super::super) fn element(&self) -> ElementType {
        match self {
            Self::I32(_) => ElementType::I32,
            Self::I64(_) => ElementType::I64,
        }
    }

    fn tensor(&self, inner: &[i64]) -> Result<Tensor> {
        match self {
            Self::I32(numbers) => tensor_over(numbers, inner),
            Self::I64(numbers) => tensor_over(numbers, inner),
        }
    }

    /// Writes the numbers and pads the rest of `to`, which is large enough.
    pub(in super::super) fn write(&self, dim: Dim, to: &mut [u8]) {
        match self {
            Self::I32(numbers) => {
                let fill = match dim {
                    Dim::Bounds => numbers.last().copied().unwrap_or(0),
                    Dim::Pages => -1,
                    Dim::Rows(fill) => fill as i32,
                    _ => 0,
                };
                write_padded(numbers, fill.to_ne_bytes(), to);
            }
            Self::I64(numbers) => {
                let fill = if let Dim::Rows(fill) = dim { fill } else { 0 };
                write_padded(numbers, fill.to_ne_bytes(), to);
            }
        }
    }
}

/// Copies numbers of `N` bytes each, and fills the rest of `to` with `fill`.
fn write_padded<T: Scalar, const N: usize>(numbers: &[T], fill: [u8; N], to: &mut [u8]) {
    // SAFETY: a slice of plain numbers, viewed as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) };
    let (own, rest) = to.split_at_mut(bytes.len());
    own.copy_from_slice(bytes);
    rest.chunks_exact_mut(N).for_each(|to| to.copy_from_slice(&fill));
}

fn tensor_over<T: Scalar>(numbers: &[T], inner: &[i64]) -> Result<Tensor> {
    let outer = numbers.len() as i64 / inner.iter().product::<i64>().max(1);
    let dims: Vec<i64> = std::iter::once(outer).chain(inner.iter().copied()).collect();
    // SAFETY: inputs are only read, and the tensors of a run are dropped before its buffers change.
    unsafe { tensor_in_place(&dims, numbers.as_ptr().cast_mut(), numbers.len()) }
}

/// # Safety
/// The memory outlives the tensor, and nothing else writes it while a run uses it.
pub(in super::super) unsafe fn tensor_in_place<T: Scalar>(dims: &[i64], data: *mut T, len: usize) -> Result<Tensor> {
    // SAFETY: by contract; the memory has `len` elements.
    unsafe { Tensor::from_memory(T::TYPE, dims, data.cast(), len * size_of::<T>(), Box::new(())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_belongs_to_no_sequence() {
        let written = |numbers: Values<'_>, dim, len: usize| {
            let width = if numbers.element() == ElementType::I32 { 4 } else { 8 };
            let mut bytes = vec![0xff; len * width];
            numbers.write(dim, &mut bytes);
            bytes
        };
        let i32s = |numbers: &[i32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let i64s = |numbers: &[i64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(written(Values::I32(&[0, 5]), Dim::Bounds, 4), i32s(&[0, 5, 5, 5]));
        assert_eq!(written(Values::I32(&[7]), Dim::Sequences, 3), i32s(&[7, 0, 0]));
        assert_eq!(written(Values::I32(&[7]), Dim::Pages, 2), i32s(&[7, -1]));
        assert_eq!(written(Values::I64(&[3]), Dim::Rows(-9), 2), i64s(&[3, -9]));
        assert_eq!(written(Values::I64(&[3]), Dim::Outputs, 2), i64s(&[3, 0]));
    }

    #[test]
    fn a_batch_fits_if_no_dimension_is_larger() {
        let shape = Sizes { sequences: 2, rows: 10, outputs: 5, pages: 3, shortest: 2, longest: 4 };
        let less = Sizes { sequences: 0, rows: 0, outputs: 0, pages: 0, shortest: 2, longest: 2 };
        assert!(shape.fits(&shape) && shape.fits(&less));
        for more in [
            Sizes { sequences: 3, ..shape },
            Sizes { rows: 11, ..shape },
            Sizes { outputs: 6, ..shape },
            Sizes { pages: 4, ..shape },
            Sizes { shortest: 1, ..shape },
            Sizes { longest: 5, ..shape },
        ] {
            assert!(!shape.fits(&more), "{more:?}");
        }
    }
}
