//! Finds numbers that are not finite in the bytes of a tensor.

use half::{bf16, f16};
use pagoda_kernels::cpu::{leading_finite_bf16, leading_finite_f16, leading_finite_f32};
use prost::encoding::decode_varint;

use super::onnx::TensorProto;
use crate::tensor::ElementType;

/// A number that is not finite, and its index in the tensor.
pub(super) type Found = (u64, f64);

/// The first number that is not finite, of those that a tensor has in the model's own file.
pub(super) fn in_model(tensor: &TensorProto) -> Option<Found> {
    let scan = || ElementType::from_number(tensor.data_type).and_then(Scan::new);
    let raw = scan().and_then(|mut scan| scan.next(&tensor.raw_data));
    let pieces = |element, pieces: &[_]| Scan::new(element).and_then(|mut scan| scan.first_in(pieces));
    raw.or_else(|| pieces(ElementType::F32, &tensor.float_data))
        .or_else(|| pieces(ElementType::F64, &tensor.double_data))
        .or_else(|| scan()?.first_in_varints(&tensor.int32_data))
}

/// Scans the bytes of a tensor, which may come in pieces.
pub(super) struct Scan {
    find: fn(&[u8]) -> Option<(usize, f64)>,
    /// Bytes of a number.
    size: usize,
    /// Numbers that were scanned.
    seen: u64,
    /// The first bytes of a number that continues in the next piece.
    partial: [u8; 8],
    partial_bytes: usize,
}

impl Scan {
    /// `None` for types all of whose values are finite.
    pub(super) fn new(element: ElementType) -> Option<Self> {
        let (size, find): (_, fn(&[u8]) -> _) = match element {
            ElementType::F32 | ElementType::Complex64 => {
                (4, |bytes| find_behind(leading_finite_f32(bytes), bytes, |n| f32::from_le_bytes(n).into()))
            }
            ElementType::F64 | ElementType::Complex128 => (8, |bytes| find(bytes, f64::from_le_bytes)),
            ElementType::F16 => {
                (2, |bytes| find_behind(leading_finite_f16(bytes), bytes, |n| f16::from_le_bytes(n).into()))
            }
            ElementType::Bf16 => {
                (2, |bytes| find_behind(leading_finite_bf16(bytes), bytes, |n| bf16::from_le_bytes(n).into()))
            }
            ElementType::F8E4M3Fn => (1, |bytes| find(bytes, |[n]| nan_if(n & 0x7F == 0x7F))),
            ElementType::F8E4M3Fnuz | ElementType::F8E5M2Fnuz => (1, |bytes| find(bytes, |[n]| nan_if(n == 0x80))),
            // The upper half of an f16.
            ElementType::F8E5M2 => (1, |bytes| find(bytes, |[n]| f16::from_le_bytes([0, n]).into())),
            ElementType::F8E8M0 => (1, |bytes| find(bytes, |[n]| nan_if(n == 0xFF))),
            _ => return None,
        };
        Some(Self { find, size, seen: 0, partial: [0; 8], partial_bytes: 0 })
    }

    /// The first number of the next piece, of whole numbers, that is not finite.
    pub(super) fn next(&mut self, piece: &[u8]) -> Option<Found> {
        let found = (self.find)(piece).map(|(index, number)| (self.seen + index as u64, number));
        self.seen += (piece.len() / self.size) as u64;
        found
    }

    /// As [`Self::next`], of pieces that may end inside a number.
    pub(super) fn feed(&mut self, mut piece: &[u8]) -> Option<Found> {
        if self.partial_bytes > 0 {
            let missing = (self.size - self.partial_bytes).min(piece.len());
            self.keep(&piece[..missing]);
            piece = &piece[missing..];
            if self.partial_bytes < self.size {
                return None;
            }
            self.partial_bytes = 0;
            let number = self.partial;
            if let Some(found) = self.next(&number[..self.size]) {
                return Some(found);
            }
        }
        let (whole, rest) = piece.split_at(piece.len() / self.size * self.size);
        self.keep(rest);
        self.next(whole)
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.partial[self.partial_bytes..][..bytes.len()].copy_from_slice(bytes);
        self.partial_bytes += bytes.len();
    }

    fn first_in(&mut self, pieces: &[impl AsRef<[u8]>]) -> Option<Found> {
        pieces.iter().find_map(|piece| self.next(piece.as_ref()))
    }

    /// As [`Self::first_in`], of numbers of at most 16 bits that are written as varints. Bytes that end inside a varint
    /// are skipped: ONNX Runtime refuses such a model.
    fn first_in_varints(&mut self, pieces: &[impl AsRef<[u8]>]) -> Option<Found> {
        if self.size > 2 {
            return None;
        }
        pieces.iter().find_map(|piece| {
            let mut rest = piece.as_ref();
            let bits = std::iter::from_fn(|| if rest.is_empty() { None } else { decode_varint(&mut rest).ok() });
            bits.into_iter().find_map(|bits| self.next(&bits.to_le_bytes()[..self.size]))
        })
    }
}

fn find<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
    find_behind(0, bytes, number)
}

/// Nothing is looked for in the first numbers, which are known to be finite.
fn find_behind<const N: usize>(known: usize, bytes: &[u8], number: impl Fn([u8; N]) -> f64) -> Option<(usize, f64)> {
    let numbers = bytes.as_chunks::<N>().0[known..].iter().map(|&bytes| number(bytes));
    numbers.enumerate().find(|(_, number)| !number.is_finite()).map(|(index, number)| (known + index, number))
}

/// For types without infinities.
fn nan_if(nan: bool) -> f64 {
    if nan { f64::NAN } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use prost::encoding::encode_varint;

    use super::*;

    /// Little-endian bytes of a type's numbers.
    struct Floats {
        element: ElementType,
        finite: Vec<u8>,
        infinity: Option<Vec<u8>>,
        nan: Vec<u8>,
    }

    fn types() -> Vec<Floats> {
        use ElementType::{Bf16, Complex64, Complex128, F16, F32, F64};
        use ElementType::{F8E4M3Fn, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F8E8M0};
        fn floats<const N: usize>(
            element: ElementType,
            finite: [u8; N],
            infinity: Option<[u8; N]>,
            nan: [u8; N],
        ) -> Floats {
            Floats { element, finite: finite.into(), infinity: infinity.map(Vec::from), nan: nan.into() }
        }
        let of_f32 = |number: f32| number.to_le_bytes();
        let of_f64 = |number: f64| number.to_le_bytes();
        let of_f16 = |number: f16| number.to_le_bytes();
        let of_bf16 = |number: bf16| number.to_le_bytes();
        vec![
            floats(F32, of_f32(f32::MAX), Some(of_f32(f32::NEG_INFINITY)), of_f32(f32::NAN)),
            floats(Complex64, of_f32(1.0), Some(of_f32(f32::INFINITY)), of_f32(f32::NAN)),
            floats(F64, of_f64(f64::MAX), Some(of_f64(f64::INFINITY)), of_f64(f64::NAN)),
            floats(Complex128, of_f64(1.0), Some(of_f64(f64::INFINITY)), of_f64(f64::NAN)),
            floats(F16, of_f16(f16::MAX), Some(of_f16(f16::NEG_INFINITY)), of_f16(f16::NAN)),
            floats(Bf16, of_bf16(bf16::MAX), Some(of_bf16(bf16::INFINITY)), of_bf16(bf16::NAN)),
            floats(F8E4M3Fn, [0x7E], None, [0xFF]),
            floats(F8E4M3Fnuz, [0x7F], None, [0x80]),
            floats(F8E5M2, [0x7B], Some([0xFC]), [0x7D]),
            floats(F8E5M2Fnuz, [0x7F], None, [0x80]),
            floats(F8E8M0, [0xFE], None, [0xFF]),
        ]
    }

    #[test]
    fn every_type_of_float_is_looked_through() {
        for Floats { element, finite, infinity, nan } in types() {
            let look = |bytes: &[u8]| Scan::new(element).unwrap().next(bytes);
            assert_eq!(look(&finite.repeat(5)), None, "{element:?}");
            let (index, number) = look(&[finite.repeat(3), nan].concat()).unwrap();
            assert!(index == 3 && number.is_nan(), "{element:?}");
            if let Some(infinity) = infinity {
                let (index, number) = look(&[finite.repeat(2), infinity, finite].concat()).unwrap();
                assert!(index == 2 && number.is_infinite(), "{element:?}");
            }
        }
        assert!(Scan::new(ElementType::I32).is_none() && Scan::new(ElementType::F4E2M1).is_none());
    }

    #[test]
    fn the_index_counts_from_the_first_piece() {
        let mut scan = Scan::new(ElementType::F32).unwrap();
        assert_eq!(scan.next(&[0; 12]), None);
        assert_eq!(scan.next(&[[0; 4], f32::INFINITY.to_le_bytes()].concat()), Some((4, f64::INFINITY)));
    }

    #[test]
    fn pieces_may_end_inside_numbers() {
        let numbers: Vec<u8> = [0.0, 1.0, f64::NAN, 2.0].iter().flat_map(|n: &f64| n.to_le_bytes()).collect();
        for size in 1..numbers.len() {
            let mut scan = Scan::new(ElementType::F64).unwrap();
            let found = numbers.chunks(size).find_map(|piece| scan.feed(piece));
            assert!(matches!(found, Some((2, number)) if number.is_nan()), "pieces of {size}");
            let mut scan = Scan::new(ElementType::F64).unwrap();
            assert_eq!(numbers[..16].chunks(size).find_map(|piece| scan.feed(piece)), None);
        }
    }

    #[test]
    fn small_floats_may_be_varints() {
        for Floats { element, finite, nan, .. } in types().into_iter().filter(|floats| floats.nan.len() <= 2) {
            let mut int32_data = Vec::new();
            for number in [&finite, &finite, &nan] {
                let mut bytes = [0; 8];
                bytes[..number.len()].copy_from_slice(number);
                encode_varint(u64::from_le_bytes(bytes), &mut int32_data);
            }
            let data_type = element as i32;
            let tensor = TensorProto { data_type, int32_data: vec![int32_data.into()], ..TensorProto::default() };
            assert!(matches!(in_model(&tensor), Some((2, number)) if number.is_nan()), "{element:?}");
        }
        let cut = TensorProto { data_type: 10, int32_data: vec![vec![0xFF].into()], ..TensorProto::default() };
        assert_eq!(in_model(&cut), None);
    }
}
