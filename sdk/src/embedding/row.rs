//! The layout of rows as bytes.

use half::f16;

use crate::error::{Error, Result};

/// The most elements of one row.
pub(super) const MAX_DIM: u32 = 1 << 16;

/// The type of the elements of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum RowType {
    /// 4 bytes each.
    #[default]
    F32,
    /// 2 bytes each.
    F16,
    /// 1 byte each, and a scale for the row: an element is the scale times a whole number from -127 to 127.
    I8,
}

impl RowType {
    /// The name in configuration files.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::I8 => "i8",
        }
    }
}

/// The layout of the rows of a table, in memory, in files and on the wire: contiguous little-endian numbers. With
/// [`RowType::I8`] the scale comes first, as an f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    dim: u32,
    row_type: RowType,
}

impl Layout {
    /// Rows of `dim` elements.
    pub fn new(dim: u32, row_type: RowType) -> Result<Self> {
        if dim == 0 || dim > MAX_DIM {
            return Err(Error::invalid("dim", format!("{dim} numbers a row are not between 1 and {MAX_DIM}")));
        }
        Ok(Self { dim, row_type })
    }

    /// The number of elements of a row.
    pub fn dim(self) -> usize {
        self.dim as usize
    }

    /// The type of the elements.
    pub fn row_type(self) -> RowType {
        self.row_type
    }

    /// The number of bytes of a row.
    pub fn row_bytes(self) -> usize {
        match self.row_type {
            RowType::F32 => 4 * self.dim(),
            RowType::F16 => 2 * self.dim(),
            RowType::I8 => 4 + self.dim(),
        }
    }

    /// Decodes a row.
    ///
    /// # Panics
    /// If `row` or `numbers` does not have the length of a row.
    pub fn decode(self, row: &[u8], numbers: &mut [f32]) {
        assert_eq!((row.len(), numbers.len()), (self.row_bytes(), self.dim()));
        match self.row_type {
            RowType::F32 => {
                for (number, bytes) in numbers.iter_mut().zip(row.as_chunks().0) {
                    *number = f32::from_le_bytes(*bytes);
                }
            }
            RowType::F16 => {
                for (number, bytes) in numbers.iter_mut().zip(row.as_chunks().0) {
                    *number = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            RowType::I8 => {
                let (scale, row) = row.split_first_chunk().expect("a row has a scale");
                let scale = f32::from_le_bytes(*scale);
                for (number, byte) in numbers.iter_mut().zip(row) {
                    *number = scale * f32::from(byte.cast_signed());
                }
            }
        }
    }

    /// Why rows of this type can not represent some numbers; `None` if they can. Such numbers would be decoded as
    /// infinite, or make the whole row meaningless.
    pub(super) fn refuses(self, numbers: &[f32]) -> Option<String> {
        let most = match self.row_type {
            RowType::F32 => return None,
            RowType::F16 => f16::MAX.to_f32(),
            // A little less than the largest f32, because the scale is rounded.
            RowType::I8 => f32::MAX / 128.0 * 127.0,
        };
        // The comparison is false for NaN. The loop compares all numbers: that is faster than stopping at the first.
        let fits = |number: &f32| number.abs() <= most;
        if numbers.iter().fold(true, |all, number| all & fits(number)) {
            return None;
        }
        let number = numbers.iter().find(|number| !fits(number))?;
        Some(format!("{number} can not be kept in a row of {}", self.row_type.name()))
    }

    /// Encodes numbers as rows.
    ///
    /// # Panics
    /// If `numbers` and `rows` do not have the same number of rows.
    pub fn encode(self, numbers: &[f32], rows: &mut [u8]) {
        assert_eq!(numbers.len() / self.dim() * self.row_bytes(), rows.len());
        for (numbers, row) in numbers.chunks_exact(self.dim()).zip(rows.chunks_exact_mut(self.row_bytes())) {
            self.encode_one(numbers, row);
        }
    }

    fn encode_one(self, numbers: &[f32], row: &mut [u8]) {
        match self.row_type {
            RowType::F32 => {
                for (number, bytes) in numbers.iter().zip(row.as_chunks_mut().0) {
                    *bytes = number.to_le_bytes();
                }
            }
            RowType::F16 => {
                for (number, bytes) in numbers.iter().zip(row.as_chunks_mut().0) {
                    *bytes = f16::from_f32(*number).to_le_bytes();
                }
            }
            RowType::I8 => {
                let largest = numbers.iter().fold(0.0_f32, |largest, number| largest.max(number.abs()));
                let scale = largest / 127.0;
                let (first, row) = row.split_first_chunk_mut().expect("a row has a scale");
                *first = scale.to_le_bytes();
                for (number, byte) in numbers.iter().zip(row) {
                    // The cast saturates. A row of zeros divides 0 by 0, and the cast turns NaN into 0.
                    *byte = ((number / scale).round() as i8).max(-127).cast_unsigned();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(row_type: RowType, numbers: &[f32]) -> Vec<f32> {
        let layout = Layout::new(numbers.len() as u32, row_type).unwrap();
        let mut row = vec![0; layout.row_bytes()];
        layout.encode(numbers, &mut row);
        let mut again = vec![f32::NAN; numbers.len()];
        layout.decode(&row, &mut again);
        again
    }

    #[test]
    fn numbers_come_back_as_exactly_as_their_type_can() {
        let numbers = [0.0, -1.0, 0.1, 127.0, -126.4];
        assert_eq!(there_and_back(RowType::F32, &numbers), numbers);
        assert_eq!(there_and_back(RowType::F16, &numbers), numbers.map(|number| f16::from_f32(number).to_f32()));
        assert_eq!(there_and_back(RowType::I8, &numbers), [0.0, -1.0, 0.0, 127.0, -126.0]);
        assert_eq!(there_and_back(RowType::I8, &[0.0; 3]), [0.0; 3]);
        assert_eq!(there_and_back(RowType::I8, &[-254.0, 0.9]), [-254.0, 0.0]);
    }

    #[test]
    fn numbers_that_would_not_come_back_are_refused() {
        let refuses = |row_type, number| Layout::new(2, row_type).unwrap().refuses(&[0.0, number]);
        for number in [f32::MAX, f32::NAN, f32::NEG_INFINITY] {
            assert_eq!(refuses(RowType::F32, number), None);
            assert_eq!(refuses(RowType::F16, number), Some(format!("{number} can not be kept in a row of f16")));
            assert_eq!(refuses(RowType::I8, number), Some(format!("{number} can not be kept in a row of i8")));
        }
        for (row_type, most) in [(RowType::F16, 65504.0), (RowType::I8, 3.37e38)] {
            assert_eq!(refuses(row_type, -most), None);
            assert!(there_and_back(row_type, &[0.0, -most]).iter().all(|number| number.is_finite()));
            assert!(refuses(row_type, most * 1.01).is_some());
        }
    }

    #[test]
    fn a_row_without_numbers_is_refused() {
        assert!(Layout::new(0, RowType::F32).is_err());
        assert!(Layout::new(MAX_DIM + 1, RowType::F32).is_err());
    }
}
