//! What one call of the operator `BlockLinear` carries, and every check of it.

use crate::InputError;
use crate::common::input_error::{expect, refuse};

/// Weights that share a scale: neighbours in a row.
pub const BLOCK: usize = 32;
/// Outputs of a row that share a maximum: neighbours.
pub const OUTPUT_BLOCK: usize = 32;

/// One call of the operator `BlockLinear`: the product of rows with a matrix whose weights are stored in 4 or 8 bits, in blocks
/// of [`BLOCK`]. A weight is `scale · (code - 2^(bits - 1)) + offset`. Inputs are not rounded, and an output depends on its row
/// of x and its row of the matrix alone.
#[derive(Clone, Copy, Debug)]
pub struct BlockLinear<'a> {
    /// T.
    pub rows: usize,
    /// K, a multiple of [`BLOCK`].
    pub inner: usize,
    /// N.
    pub width: usize,
    /// `[T, K]`.
    pub x: &'a [f32],
    /// `[N, K / 32, 4 · bits]`: the bytes of a block. Two codes of 4 bits are in a byte, the first one in the low half.
    pub codes: &'a [u8],
    /// The bits of a code.
    pub bits: CodeBits,
    /// `[N, K / 32]`.
    pub scales: &'a [f32],
    /// `[N, K / 32]`; none: 0.
    pub offsets: Option<&'a [f32]>,
    /// `[N]`; none: 0.
    pub bias: Option<&'a [f32]>,
}

/// The bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CodeBits {
    /// Two codes in a byte.
    Four,
    /// A byte each.
    Eight,
}

impl CodeBits {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Four, Self::Eight];

    /// Those whose blocks have so many bytes.
    pub fn of_block(bytes: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|bits| bits.block_bytes() == bytes)
    }

    /// The bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::Four => BLOCK / 2,
            Self::Eight => BLOCK,
        }
    }
}

impl BlockLinear<'_> {
    /// The matrix `[N, K]` as numbers.
    ///
    /// # Panics
    /// Where [`check`](Self::check) refuses the call.
    pub fn opened(&self) -> Vec<f32> {
        let offset_of = |block: usize| self.offsets.map_or(0.0, |offsets| offsets[block]);
        let code = |at: usize| match self.bits {
            CodeBits::Four => f32::from(self.codes[at / 2] >> (at % 2 * 4) & 15) - 8.0,
            CodeBits::Eight => f32::from(self.codes[at]) - 128.0,
        };
        let numbers = 0..self.width * self.inner;
        numbers.map(|at| self.scales[at / BLOCK].mul_add(code(at), offset_of(at / BLOCK))).collect()
    }

    /// Refuses everything that would make an access stray, for an output of `output` elements and so many maxima. Writes nothing.
    pub fn check(&self, output: usize, maxima: Option<usize>) -> Result<(), InputError> {
        let Self { rows, inner, width, .. } = *self;
        if !inner.is_multiple_of(BLOCK) {
            return refuse("x", None, format!("rows of {inner} numbers, expected a multiple of {BLOCK}"));
        }
        let blocks = inner / BLOCK;
        expect("x", self.x.len(), &[rows, inner])?;
        expect("codes", self.codes.len(), &[width, blocks, self.bits.block_bytes()])?;
        expect("scales", self.scales.len(), &[width, blocks])?;
        if let Some(offsets) = self.offsets {
            expect("offsets", offsets.len(), &[width, blocks])?;
        }
        if let Some(bias) = self.bias {
            expect("bias", bias.len(), &[width])?;
        }
        if let Some(maxima) = maxima {
            expect("maxima", maxima, &[rows, width.div_ceil(OUTPUT_BLOCK)])?;
        }
        expect("y", output, &[rows, width])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_make_the_shape_are_refused_by_name() {
        let (x, codes, scales) = ([1.0; 128], [7; 96], [1.0; 6]);
        let call = BlockLinear {
            rows: 2,
            inner: 64,
            width: 3,
            x: &x,
            codes: &codes,
            bits: CodeBits::Four,
            scales: &scales,
            offsets: Some(&scales),
            bias: Some(&scales[..3]),
        };
        assert_eq!(call.check(6, Some(2)), Ok(()));
        let refused = |call: BlockLinear<'_>, len| call.check(len, None).unwrap_err().to_string();
        assert_eq!(refused(BlockLinear { x: &x[1..], ..call }, 6), "x: 127 elements do not make the shape [2, 64]");
        assert_eq!(refused(BlockLinear { inner: 63, ..call }, 6), "x: rows of 63 numbers, expected a multiple of 32");
        assert!(refused(BlockLinear { codes: &codes[1..], ..call }, 6).starts_with("codes: 95 elements"));
        assert!(refused(BlockLinear { bits: CodeBits::Eight, ..call }, 6).ends_with("the shape [3, 2, 32]"));
        assert!(refused(BlockLinear { scales: &scales[1..], ..call }, 6).starts_with("scales: 5 elements"));
        assert!(refused(BlockLinear { offsets: Some(&scales[1..]), ..call }, 6).starts_with("offsets: 5 elements"));
        assert!(refused(BlockLinear { bias: Some(&scales), ..call }, 6).starts_with("bias: 6 elements"));
        let error = call.check(6, Some(6)).unwrap_err().to_string();
        assert_eq!(error, "maxima: 6 elements do not make the shape [2, 1]");
        assert_eq!(refused(call, 5), "y: 5 elements do not make the shape [2, 3]");
        assert!(refused(BlockLinear { width: usize::MAX, ..call }, 6).starts_with("codes: 96 elements"));
    }

    #[test]
    fn bits_are_known_by_the_bytes_of_a_block() {
        assert_eq!(CodeBits::of_block(16), Some(CodeBits::Four));
        assert_eq!(CodeBits::of_block(32), Some(CodeBits::Eight));
        assert_eq!(CodeBits::of_block(8), None);
    }
}
