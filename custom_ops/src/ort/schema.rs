//! The formal parameters of an operator: the names, element types and optionality of its inputs and outputs.

use ort_sys::ONNXTensorElementDataType as OnnxType;

/// One input or output of an operator.
pub struct FormalParameter {
    /// The name in the operator's specification; error messages use it.
    pub name: &'static str,
    /// The element type.
    pub element: OnnxType,
    /// Whether a graph may omit it.
    pub optional: bool,
}

/// One input of an operator.
pub type Input = FormalParameter;

/// One output of an operator.
pub type Output = FormalParameter;

impl FormalParameter {
    /// A parameter that every graph has.
    pub const fn required(name: &'static str, element: OnnxType) -> Self {
        Self { name, element, optional: false }
    }

    /// A parameter that a graph may omit.
    pub const fn optional(name: &'static str, element: OnnxType) -> Self {
        Self { name, element, optional: true }
    }
}
