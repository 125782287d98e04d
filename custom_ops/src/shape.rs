//! What is known of shapes while a model is opened.

use std::ffi::{CStr, CString, c_char};
use std::ptr::{null, null_mut};

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, OrtApi, OrtOpAttrType, OrtShapeInferContext, OrtTensorTypeAndShapeInfo,
};

use crate::context::check;
use crate::op::OpError;

/// The type and the dimensions of a tensor of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The type of its elements.
    pub element: OnnxType,
    /// Its dimensions.
    pub dims: Vec<Dim>,
}

/// One dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Fixed.
    Is(i64),
    /// Free. Those of the same name are as large as one another, which ONNX Runtime relies on when it lets one value
    /// follow another in the same memory.
    Named(CString),
}

/// A node of a graph whose shapes are being inferred.
pub struct Shapes {
    pub(crate) api: &'static OrtApi,
    pub(crate) raw: *mut OrtShapeInferContext,
}

impl Shapes {
    /// The shape of an input. None where the graph leaves the input out, does not say how many dimensions it has, or has
    /// nothing to say of one of them.
    pub fn input(&self, index: usize) -> Result<Option<Shape>, OpError> {
        let api = self.api;
        let (mut rank, mut info) = (0, null_mut());
        let mut element = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        if index >= self.inputs()? {
            return Ok(None);
        }
        // SAFETY: the context is live for the whole call, and the information belongs to it; so do the names.
        unsafe {
            check(api, (api.ShapeInferContext_GetInputTypeShape)(self.raw, index, &mut info))?;
            check(api, (api.GetTensorElementType)(info, &mut element))?;
            check(api, (api.GetDimensionsCount)(info, &mut rank))?;
            // No operator has a scalar for an input: without dimensions their number is not known.
            if rank == 0 {
                return Ok(None);
            }
            let (mut sizes, mut names) = (vec![0; rank], vec![null::<c_char>(); rank]);
            check(api, (api.GetDimensions)(info, sizes.as_mut_ptr(), rank))?;
            check(api, (api.GetSymbolicDimensions)(info, names.as_mut_ptr(), rank))?;
            let dims = sizes.into_iter().zip(names).map(|(size, name)| {
                let name = if name.is_null() { c"" } else { CStr::from_ptr(name) };
                match name.is_empty() {
                    _ if size >= 0 => Some(Dim::Is(size)),
                    false => Some(Dim::Named(name.to_owned())),
                    true => None,
                }
            });
            Ok(dims.collect::<Option<_>>().map(|dims| Shape { element, dims }))
        }
    }

    /// How many inputs the node names, those that it leaves out among others too.
    pub fn inputs(&self) -> Result<usize, OpError> {
        let mut count = 0;
        // SAFETY: the context is live for the whole call.
        check(self.api, unsafe { (self.api.ShapeInferContext_GetInputCount)(self.raw, &mut count) })?;
        Ok(count)
    }

    /// An attribute of the node that is a text.
    pub fn text(&self, name: &CStr) -> Option<String> {
        let (api, kind) = (self.api, OrtOpAttrType::ORT_OP_ATTR_STRING);
        let (mut attribute, mut size) = (null(), 0);
        // SAFETY: the context is live for the whole call and owns the attribute. Asked with too little room, ONNX Runtime
        // fails and tells the size.
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

    /// An attribute of the node that is an integer.
    pub fn int(&self, name: &CStr) -> Option<i64> {
        let api = self.api;
        let (mut attribute, mut value, mut size) = (null(), 0_i64, 0);
        // SAFETY: the context is live for the whole call and owns the attribute; there is room for one integer.
        unsafe {
            check(api, (api.ShapeInferContext_GetAttribute)(self.raw, name.as_ptr(), &mut attribute)).ok()?;
            let (kind, to) = (OrtOpAttrType::ORT_OP_ATTR_INT, (&raw mut value).cast());
            check(api, (api.ReadOpAttr)(attribute, kind, to, size_of::<i64>(), &mut size)).ok()?;
        }
        Some(value)
    }

    /// Tells ONNX Runtime the type and shape of an output. The type too: operators of one name for several types are one to
    /// it here, and it is the first of them that is asked.
    pub(crate) fn set_output(&self, index: usize, Shape { element, dims }: &Shape) -> Result<(), OpError> {
        struct Info(&'static OrtApi, *mut OrtTensorTypeAndShapeInfo);
        impl Drop for Info {
            fn drop(&mut self) {
                // SAFETY: made below, released once.
                unsafe { (self.0.ReleaseTensorTypeAndShapeInfo)(self.1) };
            }
        }
        let api = self.api;
        let sizes: Vec<i64> = dims.iter().map(|dim| if let Dim::Is(size) = dim { *size } else { -1 }).collect();
        let mut names: Vec<_> =
            dims.iter().map(|dim| if let Dim::Named(name) = dim { name.as_ptr() } else { c"".as_ptr() }).collect();
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
