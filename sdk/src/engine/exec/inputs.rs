//! The numbers that a run is given, by the names that the model has for them.

use crate::error::Result;
use crate::tensor::{ElementType, Scalar, Tensor};

/// One input of a run.
pub(in super::super) struct Input<'a> {
    pub(in super::super) name: &'a str,
    pub(in super::super) numbers: Numbers<'a>,
    pub(in super::super) dim: Dim,
}

/// What there is one of for each number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Dim {
    /// Rows; those that fill a shape up have this number.
    Rows(i64),
    /// Rows whose results are asked for.
    Outputs,
    Sequences,
    /// Sequences, and one more: where each one's part begins, and the last one's ends.
    Bounds,
    Pages,
}

/// How many there are of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Sizes {
    pub(in super::super) sequences: usize,
    pub(in super::super) rows: usize,
    pub(in super::super) outputs: usize,
    pub(in super::super) pages: usize,
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

    /// Whether a batch can be filled up to this.
    pub(in super::super) fn fits(&self, batch: &Self) -> bool {
        batch.sequences <= self.sequences
            && batch.rows <= self.rows
            && batch.outputs <= self.outputs
            && batch.pages <= self.pages
    }
}

/// The numbers of an input, in a buffer of an instance.
#[derive(Clone, Copy)]
pub(in super::super) enum Numbers<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl Numbers<'_> {
    pub(in super::super) fn element(&self) -> ElementType {
        match self {
            Self::I32(_) => ElementType::I32,
            Self::I64(_) => ElementType::I64,
        }
    }

    /// A tensor over them, to be read. It must be gone before they change.
    pub(in super::super) fn tensor(&self) -> Result<Tensor> {
        match self {
            Self::I32(numbers) => over(numbers),
            Self::I64(numbers) => over(numbers),
        }
    }

    /// Writes them, and fills up what is left; there is room for all.
    pub(in super::super) fn write(&self, dim: Dim, to: &mut [u8]) {
        match self {
            Self::I32(numbers) => {
                let fill = match dim {
                    Dim::Bounds => numbers.last().copied().unwrap_or(0),
                    Dim::Pages => -1,
                    _ => 0,
                };
                put(numbers, fill.to_ne_bytes(), to);
            }
            Self::I64(numbers) => {
                let fill = if let Dim::Rows(fill) = dim { fill } else { 0 };
                put(numbers, fill.to_ne_bytes(), to);
            }
        }
    }
}

/// Copies numbers of `N` bytes each, and `fill` as often as there is room for it after them.
fn put<T: Scalar, const N: usize>(numbers: &[T], fill: [u8; N], to: &mut [u8]) {
    // SAFETY: plain numbers, seen as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast::<u8>(), size_of_val(numbers)) };
    let (own, rest) = to.split_at_mut(bytes.len());
    own.copy_from_slice(bytes);
    rest.chunks_exact_mut(N).for_each(|to| to.copy_from_slice(&fill));
}

fn over<T: Scalar>(numbers: &[T]) -> Result<Tensor> {
    // SAFETY: an input is not written to, and the tensors of a run are gone before its buffers change.
    unsafe { borrowed(&[numbers.len() as i64], numbers.as_ptr().cast_mut(), numbers.len()) }
}

/// # Safety
/// The memory outlives the tensor, and is written by no one else while a run uses it.
pub(super) unsafe fn borrowed<T: Scalar>(dims: &[i64], data: *mut T, len: usize) -> Result<Tensor> {
    // SAFETY: by contract; the memory has so many elements.
    unsafe { Tensor::from_memory(T::TYPE, dims, data.cast(), len * size_of::<T>(), Box::new(())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fills_a_shape_up_belongs_to_no_one() {
        let written = |numbers: Numbers<'_>, dim, len: usize| {
            let width = if numbers.element() == ElementType::I32 { 4 } else { 8 };
            let mut bytes = vec![0xff; len * width];
            numbers.write(dim, &mut bytes);
            bytes
        };
        let i32s = |numbers: &[i32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let i64s = |numbers: &[i64]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        assert_eq!(written(Numbers::I32(&[0, 5]), Dim::Bounds, 4), i32s(&[0, 5, 5, 5]));
        assert_eq!(written(Numbers::I32(&[7]), Dim::Sequences, 3), i32s(&[7, 0, 0]));
        assert_eq!(written(Numbers::I32(&[7]), Dim::Pages, 2), i32s(&[7, -1]));
        assert_eq!(written(Numbers::I64(&[3]), Dim::Rows(-9), 2), i64s(&[3, -9]));
        assert_eq!(written(Numbers::I64(&[3]), Dim::Outputs, 2), i64s(&[3, 0]));
    }

    #[test]
    fn a_batch_fits_where_nothing_is_more() {
        let shape = Sizes { sequences: 2, rows: 10, outputs: 5, pages: 3 };
        assert!(shape.fits(&shape) && shape.fits(&Sizes { sequences: 0, rows: 0, outputs: 0, pages: 0 }));
        for more in [
            Sizes { sequences: 3, ..shape },
            Sizes { rows: 11, ..shape },
            Sizes { outputs: 6, ..shape },
            Sizes { pages: 4, ..shape },
        ] {
            assert!(!shape.fits(&more), "{more:?}");
        }
    }
}
