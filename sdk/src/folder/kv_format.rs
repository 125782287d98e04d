//! How pages hold keys and values, in the words of pagoda.json, and how many bytes a token takes.

use pagoda_kernels::KvFormat;

use crate::tensor::ElementType;

pub(super) const FORMATS: [(&str, KvFormat); 4] =
    [("native", KvFormat::Native), ("int8", KvFormat::Int8), ("int4", KvFormat::Int4), ("fp8", KvFormat::Fp8)];

/// The word of a value, in a list that has all of them.
pub(super) fn word<T: PartialEq>(words: &[(&'static str, T)], value: T) -> &'static str {
    words.iter().find(|(_, known)| *known == value).map_or("", |&(word, _)| word)
}

/// The keys and values of a token: layers, heads of each, the size of a head, and the type of native numbers.
#[derive(Clone, Copy)]
pub(super) struct TokenShape {
    pub(super) layers: u32,
    pub(super) heads: u32,
    pub(super) head_size: u32,
    pub(super) element: ElementType,
}

impl TokenShape {
    /// Bytes of one token in all layers, with the scales of every head. Wide enough for every number that a file may have.
    pub(super) fn bytes(self, format: KvFormat) -> u128 {
        let number = if format == KvFormat::Native { self.element.bits() / 8 } else { 1 };
        let numbers = format.pool_width(self.head_size as usize) * number;
        let scales = format.scales_width() * ElementType::F16.bits() / 8;
        u128::from(self.layers) * 2 * u128::from(self.heads) * (numbers + scales) as u128
    }

    /// The same where pages can be of the format: int4 has two numbers in a byte, so heads have to have an even size.
    pub(super) fn bytes_if_possible(self, format: KvFormat) -> Option<u64> {
        let fits = format != KvFormat::Int4 || self.head_size.is_multiple_of(2);
        fits.then(|| self.bytes(format) as u64)
    }
}
