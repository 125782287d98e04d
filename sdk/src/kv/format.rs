//! How a page holds the keys and values of its tokens.

use crate::error::{Error, Result};
use crate::tensor::ElementType;

/// The format of a page. The pool's tensors, the bytes of a token, and what stored bytes mean follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Numbers as the model computes them.
    Native(ElementType),
}

impl Format {
    /// The native format of an element type, if pages can be of it.
    pub(super) fn native(element: ElementType) -> Result<Self> {
        match element {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => Ok(Self::Native(element)),
            _ => Err(Error::invalid("element_type", format!("{} is none of f32, f16 and bf16", element.name()))),
        }
    }

    /// The element type of the pool's tensors.
    pub(super) fn element(self) -> ElementType {
        match self {
            Self::Native(element) => element,
        }
    }

    /// Bytes of the keys, or of the values, that one head has of one token.
    pub(super) fn head_bytes(self, head_size: u32) -> usize {
        match self {
            Self::Native(element) => head_size as usize * element.bits() / 8,
        }
    }

    /// The number that stands for the format in the keys of a store. Never reused.
    pub(super) fn id(self) -> u32 {
        match self {
            Self::Native(element) => element as u32,
        }
    }
}
