//! Which ONNX element type a Rust element is.

use ort_sys::ONNXTensorElementDataType;
use pagoda_kernels::{Element, bf16, f16};

/// An element type the operators are registered for.
pub trait OnnxElement: Element {
    /// Its number in ONNX.
    const ONNX: ONNXTensorElementDataType;
}

impl OnnxElement for f32 {
    const ONNX: ONNXTensorElementDataType = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

impl OnnxElement for f16 {
    const ONNX: ONNXTensorElementDataType = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
}

impl OnnxElement for bf16 {
    const ONNX: ONNXTensorElementDataType = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
}
