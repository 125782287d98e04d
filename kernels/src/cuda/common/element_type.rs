//! Element types.

use crate::Element;

/// The element type of a call's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// 32-bit floats.
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of an `f32`.
    Bf16,
}

impl Type {
    /// That of a Rust type.
    pub fn of<T: Element>() -> Self {
        match T::NAME {
            "f32" => Self::F32,
            "f16" => Self::F16,
            _ => Self::Bf16,
        }
    }

    /// As kernels are named.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}
