//! `OrtShapeInferContext`: shape inference while a model is loaded.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, OrtApi, OrtOpAttrType, OrtShapeInferContext, OrtTensorTypeAndShapeInfo,
};

use super::error::{OpError, check};

/// The element type and the dimensions of a value of the graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The element type.
    pub element: OnnxType,
    /// The dimensions.
    pub dims: Vec<Dim>,
}

/// One dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    /// A number.
    Fixed(i64),
    /// A symbol. Dimensions with the same symbol have the same size: ONNX Runtime relies on that when it reuses the memory
    /// of one value for another.
    Symbolic(CString),
}

/// The node whose output shapes are inferred.
pub struct ShapeInferContext {
    pub(super) api: &'static OrtApi,
    pub(super) raw: *mut OrtShapeInferContext,
}

impl ShapeInferContext {
    /// The shape of an input. `None` where the graph omits the input, or does not know its rank or one of its dimensions.
    pub fn input(&self, index: usize) -> Result<Option<Shape>, OpError> {
        let api = self.api;
        let (mut rank, mut info) = (0, null_mut());
        let mut element = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        if index >= self.input_count()? {
            return Ok(None);
        }
        // SAFETY: the context is live for the whole call, and owns the description and the symbols.
        unsafe {
            check(api, (api.ShapeInferContext_GetInputTypeShape)(self.raw, index, &mut info))?;
            check(api, (api.GetTensorElementType)(info, &mut element))?;
            check(api, (api.GetDimensionsCount)(info, &mut rank))?;
            // No operator has a scalar input, so rank 0 means that the rank is unknown.
            if rank == 0 {
                return Ok(None);
            }
            let (mut sizes, mut names) = (vec![0; rank], vec![null::<c_char>(); rank]);
            check(api, (api.GetDimensions)(info, sizes.as_mut_ptr(), rank))?;
            check(api, (api.GetSymbolicDimensions)(info, names.as_mut_ptr(), rank))?;
            let dims = sizes.into_iter().zip(names).map(|(size, name)| {
                let name = if name.is_null() { c"" } else { CStr::from_ptr(name) };
                match name.is_empty() {
                    _ if size >= 0 => Some(Dim::Fixed(size)),
                    false => Some(Dim::Symbolic(name.to_owned())),
                    true => None,
                }
            });
            Ok(dims.collect::<Option<_>>().map(|dims| Shape { element, dims }))
        }
    }

    /// The number of inputs that the node lists, including omitted ones that others follow.
    pub fn input_count(&self) -> Result<usize, OpError> {
        let mut count = 0;
        // SAFETY: the context is live for the whole call.
        check(self.api, unsafe { (self.api.ShapeInferContext_GetInputCount)(self.raw, &mut count) })?;
        Ok(count)
    }

    /// A string attribute, if the node has it.
    pub fn string(&self, name: &CStr) -> Option<String> {
        let (api, kind) = (self.api, OrtOpAttrType::ORT_OP_ATTR_STRING);
        let (mut attribute, mut size) = (null(), 0);
        // SAFETY: the context is live for the whole call and owns the attribute. With too small a buffer ONNX Runtime fails
        // and writes the size.
        unsafe {
            check(api, (api.ShapeInferContext_GetAttribute)(self.raw, name.as_ptr(), &mut attribute)).ok()?;
            let _ = check(api, (api.ReadOpAttr)(attribute, kind, null_mut(), 0, &mut size));
            let mut bytes = vec![0_u8; size];
            check(api, (api.ReadOpAttr)(attribute, kind, bytes.as_mut_ptr().cast(), size, &mut size)).ok()?;
            bytes.truncate(size);
            if bytes.last() == Some(&0) {
                bytes.pop();
            }
            String::from_utf8(bytes).ok()
        }
    }

    /// An integer attribute, if the node has it.
    pub fn int(&self, name: &CStr) -> Option<i64> {
        let api = self.api;
        let (mut attribute, mut value, mut size) = (null(), 0_i64, 0);
        // SAFETY: the context is live for the whole call and owns the attribute; the buffer holds one integer.
        unsafe {
            check(api, (api.ShapeInferContext_GetAttribute)(self.raw, name.as_ptr(), &mut attribute)).ok()?;
            let (kind, to) = (OrtOpAttrType::ORT_OP_ATTR_INT, (&raw mut value).cast());
            check(api, (api.ReadOpAttr)(attribute, kind, to, size_of::<i64>(), &mut size)).ok()?;
        }
        Some(value)
    }

    /// Sets the element type and the shape of an output. The type is part of it because ONNX Runtime merges operators of one
    /// name into one schema, and asks the first of them whatever the element type of the node.
    pub(super) fn set_output(&self, index: usize, Shape { element, dims }: &Shape) -> Result<(), OpError> {
        struct Info(&'static OrtApi, *mut OrtTensorTypeAndShapeInfo);
        impl Drop for Info {
            fn drop(&mut self) {
                // SAFETY: created below, released once.
                unsafe { (self.0.ReleaseTensorTypeAndShapeInfo)(self.1) };
            }
        }
        let api = self.api;
        let sizes: Vec<i64> = dims.iter().map(|dim| if let Dim::Fixed(size) = dim { *size } else { -1 }).collect();
        let mut names: Vec<_> =
            dims.iter().map(|dim| if let Dim::Symbolic(name) = dim { name.as_ptr() } else { c"".as_ptr() }).collect();
        let mut info = Info(api, null_mut());
        // SAFETY: every pointer is live for the call; ONNX Runtime copies what it needs.
        unsafe {
            check(api, (api.CreateTensorTypeAndShapeInfo)(&mut info.1))?;
            check(api, (api.SetTensorElementType)(info.1, *element))?;
            check(api, (api.SetDimensions)(info.1, sizes.as_ptr(), sizes.len()))?;
            check(api, (api.SetSymbolicDimensions)(info.1, names.as_mut_ptr(), names.len()))?;
            check(api, (api.ShapeInferContext_SetOutputTypeShape)(self.raw, index, info.1))
        }
    }
}
