//! How a page holds the keys and values of its tokens.

use pagoda_kernels::KvFormat;

use crate::error::{Error, Result};
use crate::tensor::ElementType;

/// The format of a page. The pool's tensors, the bytes of a token, and what stored bytes mean follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Numbers as the model computes them.
    Native(ElementType),
    /// Codes, with scales beside them: any format but [`KvFormat::Native`].
    Quantised(KvFormat),
}

/// One tensor of a layer's pool, `[pages, 2, page_size, heads, width]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plane {
    pub(super) element: ElementType,
    pub(super) width: usize,
}

impl Plane {
    /// Bytes of the keys, or of the values, that one head has of one token.
    pub(super) fn head_bytes(self) -> usize {
        self.width * self.element.bits() / 8
    }
}

impl Format {
    /// The format for keys and values of an element type, if pages can be of it.
    pub(super) fn new(format: KvFormat, element: ElementType, head_size: u32) -> Result<Self> {
        match (format, element) {
            (_, element) if !matches!(element, ElementType::F32 | ElementType::F16 | ElementType::Bf16) => {
                Err(Error::invalid("element_type", format!("{} is none of f32, f16 and bf16", element.name())))
            }
            (KvFormat::Native, element) => Ok(Self::Native(element)),
            (KvFormat::Int4, _) if !head_size.is_multiple_of(2) => {
                Err(Error::invalid("format", format!("int4 needs heads of an even size, and these have {head_size}")))
            }
            (format, _) => Ok(Self::Quantised(format)),
        }
    }

    /// The tensors of a layer: the numbers or codes, and the scales of a quantised format.
    pub(super) fn planes(self, head_size: u32) -> impl Iterator<Item = Plane> {
        let (numbers, scales) = match self {
            Self::Native(element) => (Plane { element, width: head_size as usize }, None),
            Self::Quantised(format) => {
                let scales = Plane { element: ElementType::F16, width: format.scales_width() };
                (Plane { element: ElementType::U8, width: format.pool_width(head_size as usize) }, Some(scales))
            }
        };
        [Some(numbers), scales].into_iter().flatten()
    }

    /// The number that stands for the format in the keys of a store. Never reused.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Native(element) => element as u32,
            // Element types are below these.
            Self::Quantised(KvFormat::Int8) => 0x1_0001,
            Self::Quantised(KvFormat::Int4) => 0x1_0002,
            Self::Quantised(KvFormat::Fp8) => 0x1_0003,
            Self::Quantised(KvFormat::Native) => unreachable!("`new` makes it Native"),
        }
    }
}
