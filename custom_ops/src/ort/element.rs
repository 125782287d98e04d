//! Element types: the ONNX number of each Rust type.

use ort_sys::ONNXTensorElementDataType as OnnxType;
use pagoda_kernels::cpu::OperatorElement;
use pagoda_kernels::{bf16, f16};

/// The element type of floating-point tensors that are f32 whatever the model's type.
pub const F32: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

/// The element type of index tensors.
pub const I32: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

/// The element type of keys, positions and row numbers.
pub const I64: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

/// The element type of quantised numbers.
pub const U8: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

/// The element type of masks.
pub const BOOL: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;

/// A floating-point type that operators have kernels for.
pub trait OnnxElement: OperatorElement {
    /// Its ONNX element type.
    const ONNX: OnnxType;
}

impl OnnxElement for f32 {
    const ONNX: OnnxType = F32;
}

impl OnnxElement for f16 {
    const ONNX: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
}

impl OnnxElement for bf16 {
    const ONNX: OnnxType = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
}
