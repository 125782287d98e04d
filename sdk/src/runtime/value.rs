//! ONNX Runtime's values: from tensors, to tensors, and their descriptions.

use std::ffi::{CStr, CString, c_char};
use std::ptr::null_mut;

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ONNXType, OrtAllocatorType, OrtMemType, OrtTensorTypeAndShapeInfo,
    OrtTypeInfo, OrtValue,
};

use super::api::Api;
use crate::error::{Error, Result, Status};
use crate::tensor::{ElementType, Tensor};

/// An input or an output of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    name: String,
    /// The name as ONNX Runtime takes it.
    c_name: CString,
    element: Option<ElementType>,
    dims: Option<Vec<i64>>,
    symbols: Vec<String>,
}

impl ValueInfo {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The type of its elements, or `None` for a sequence, a map or another thing that is not a tensor.
    pub fn element_type(&self) -> Option<ElementType> {
        self.element
    }

    /// Its dimensions, -1 where one is free; `None` if the model does not give their number.
    pub fn dims(&self) -> Option<&[i64]> {
        self.dims.as_deref()
    }

    /// The name of each free dimension; empty where a dimension is fixed or has none.
    pub fn symbols(&self) -> &[String] {
        &self.symbols
    }

    pub(super) fn c_name(&self) -> &CStr {
        &self.c_name
    }

    /// Reads what ONNX Runtime knows of one input or output.
    ///
    /// # Safety
    /// `info` is a type information of `api`'s, released by the caller.
    pub(super) unsafe fn read(api: &Api, name: String, info: *const OrtTypeInfo) -> Result<Self> {
        let c_name = CString::new(name.as_str())
            .map_err(|_| Error::new(Status::Model, format!("the name {name:?} has a NUL in it")))?;
        let mut this = Self { name, c_name, element: None, dims: None, symbols: Vec::new() };
        let table = api.table();
        let mut kind = ONNXType::ONNX_TYPE_UNKNOWN as i32;
        let mut tensor: *const OrtTensorTypeAndShapeInfo = std::ptr::null();
        // SAFETY: `info` is live by contract, and the tensor information is part of it.
        unsafe {
            api.check((table.GetOnnxTypeFromTypeInfo)(info, (&raw mut kind).cast()))?;
            if kind != ONNXType::ONNX_TYPE_TENSOR as i32 {
                return Ok(this);
            }
            api.check((table.CastTypeInfoToTensorInfo)(info, &mut tensor))?;
            let (element, dims) = type_and_dims(api, tensor)?;
            let mut symbols = vec![std::ptr::null(); dims.len()];
            api.check((table.GetSymbolicDimensions)(tensor, symbols.as_mut_ptr(), symbols.len()))?;
            this.symbols = symbols.into_iter().map(|symbol: *const c_char| text(symbol)).collect();
            this.element = element;
            this.dims = (table.TensorTypeAndShape_HasShape)(tensor).then_some(dims);
        }
        Ok(this)
    }
}

/// A value of ONNX Runtime's.
pub(super) struct Value {
    api: &'static Api,
    raw: *mut OrtValue,
}

// SAFETY: a value belongs to no thread; ONNX Runtime only reads it through shared pointers.
unsafe impl Send for Value {}
// SAFETY: as above.
unsafe impl Sync for Value {}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: ours, released once.
        unsafe { (self.api.table().ReleaseValue)(self.raw) };
    }
}

impl Value {
    /// A value over the memory of `tensor` (a copy of it for strings). The tensor must outlive it.
    pub(super) fn over(api: &'static Api, tensor: &Tensor) -> Result<Self> {
        let mut raw = null_mut();
        let dims = tensor.dims();
        let element = onnx_type(tensor.element_type());
        let table = api.table();
        if tensor.element_type() == ElementType::String {
            // SAFETY: plain calls; the value is ours from here on, and each buffer has the length asked for.
            unsafe {
                let (allocator, dims, rank) = (api.allocator, dims.as_ptr(), dims.len());
                api.check((table.CreateTensorAsOrtValue)(allocator, dims, rank, element, &mut raw))?;
                let value = Self { api, raw };
                for (index, string) in tensor.as_strings()?.iter().enumerate() {
                    let mut buffer = null_mut();
                    let status = (table.GetResizedStringTensorElementBuffer)(raw, index, string.len(), &mut buffer);
                    api.check(status)?;
                    std::ptr::copy_nonoverlapping(string.as_ptr(), buffer.cast(), string.len());
                }
                return Ok(value);
            }
        }
        let (data, bytes) = tensor.place()?;
        let (dims, rank) = (dims.as_ptr(), dims.len());
        // SAFETY: the memory belongs to the tensor, which outlives the value by contract. ONNX Runtime copies the
        // description of the memory, which is released here on every path.
        let status = unsafe {
            match tensor.device() {
                None => (table.CreateTensorWithDataAsOrtValue)(api.host, data, bytes, dims, rank, element, &mut raw),
                Some(device) => {
                    let mut memory = null_mut();
                    let (kind, default) = (OrtAllocatorType::OrtDeviceAllocator, OrtMemType::OrtMemTypeDefault);
                    let name = c"Cuda".as_ptr();
                    api.check((table.CreateMemoryInfo)(name, kind, device as i32, default, &mut memory))?;
                    let made =
                        (table.CreateTensorWithDataAsOrtValue)(memory, data, bytes, dims, rank, element, &mut raw);
                    (table.ReleaseMemoryInfo)(memory);
                    made
                }
            }
        };
        api.check(status)?;
        Ok(Self { api, raw })
    }

    /// Takes over a value that ONNX Runtime made.
    ///
    /// # Safety
    /// `raw` is a live value that nothing else releases.
    pub(super) unsafe fn from_raw(api: &'static Api, raw: *mut OrtValue) -> Self {
        Self { api, raw }
    }

    /// The value itself.
    pub(super) fn raw(&self) -> *mut OrtValue {
        self.raw
    }

    /// A tensor over the memory of the value (a copy of it for strings).
    pub(super) fn into_tensor(self) -> Result<Tensor> {
        let (api, table) = (self.api, self.api.table());
        let mut kind = ONNXType::ONNX_TYPE_UNKNOWN as i32;
        let mut info = null_mut();
        // SAFETY: the value is live; the information is released below whatever happens between.
        let (element, dims) = unsafe {
            api.check((table.GetValueType)(self.raw, (&raw mut kind).cast()))?;
            if kind != ONNXType::ONNX_TYPE_TENSOR as i32 {
                return Err(Error::new(
                    Status::Unsupported,
                    "this output is not a tensor but a sequence, a map or the like",
                ));
            }
            api.check((table.GetTensorTypeAndShape)(self.raw, &mut info))?;
            let read = type_and_dims(api, info);
            (table.ReleaseTensorTypeAndShapeInfo)(info);
            read?
        };
        let element = element
            .ok_or_else(|| Error::new(Status::Unsupported, "this output has an element type unknown to Pagoda"))?;
        if element == ElementType::String {
            let count = dims.iter().product::<i64>() as usize;
            let strings = (0..count).map(|index| self.string(index)).collect::<Result<_>>()?;
            return Tensor::from_strings(&dims, strings);
        }
        let mut data = null_mut();
        let mut bytes = 0;
        // SAFETY: the value is live.
        unsafe {
            api.check((table.GetTensorMutableData)(self.raw, &mut data))?;
            api.check((table.GetTensorSizeInBytes)(self.raw, &mut bytes))?;
        }
        // SAFETY: the memory belongs to the value, which goes along as the owner.
        unsafe { Tensor::from_memory(element, &dims, data, bytes, Box::new(self)) }
    }

    fn string(&self, index: usize) -> Result<String> {
        let (api, table) = (self.api, self.api.table());
        let mut len = 0;
        // SAFETY: the value is live and the buffer has the length that it asks for.
        let bytes = unsafe {
            api.check((table.GetStringTensorElementLength)(self.raw, index, &mut len))?;
            let mut bytes = vec![0_u8; len];
            api.check((table.GetStringTensorElement)(self.raw, len, index, bytes.as_mut_ptr().cast()))?;
            bytes
        };
        // ONNX promises UTF-8, but a graph can cut a string anywhere.
        Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
    }
}

/// Element type (`None` if we do not know it) and dimensions.
///
/// # Safety
/// `info` is a live information of `api`'s.
unsafe fn type_and_dims(api: &Api, info: *const OrtTensorTypeAndShapeInfo) -> Result<(Option<ElementType>, Vec<i64>)> {
    let table = api.table();
    let mut element = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED as i32;
    let mut rank = 0;
    // SAFETY: live by contract; the buffer has the length given.
    unsafe {
        api.check((table.GetTensorElementType)(info, (&raw mut element).cast()))?;
        api.check((table.GetDimensionsCount)(info, &mut rank))?;
        let mut dims = vec![0; rank];
        api.check((table.GetDimensions)(info, dims.as_mut_ptr(), rank))?;
        Ok((element_type(element), dims))
    }
}

/// Types whose numbers in ONNX, which are ours, differ from ONNX Runtime's.
const RENUMBERED: [(ElementType, OnnxType); 3] = [
    (ElementType::F8E8M0, OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0),
    (ElementType::U2, OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT2),
    (ElementType::I2, OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT2),
];

/// Our type for a number of ONNX Runtime's; `None` if a later ONNX Runtime has a type that we lack.
fn element_type(number: i32) -> Option<ElementType> {
    let renumbered = RENUMBERED.iter().find(|(_, theirs)| *theirs as i32 == number);
    renumbered.map_or_else(|| ElementType::from_number(number), |(ours, _)| Some(*ours))
}

fn onnx_type(element: ElementType) -> OnnxType {
    if let Some((_, theirs)) = RENUMBERED.iter().find(|(ours, _)| *ours == element) {
        return *theirs;
    }
    // SAFETY: both are `repr(i32)` enumerations with ONNX's numbers but for those above, and ONNX Runtime's has all of
    // ours (checked by a test below).
    unsafe { std::mem::transmute::<i32, OnnxType>(element as i32) }
}

/// A C string of ONNX Runtime's, copied.
///
/// # Safety
/// `pointer` is NULL or a C string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: by contract.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_types_are_onnx_runtimes() {
        let (first, last) = (
            OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT as i32,
            OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0 as i32,
        );
        for &element in ElementType::ALL {
            assert!((first..=last).contains(&(element as i32)));
            assert_eq!(element_type(onnx_type(element) as i32), Some(element));
        }
        assert_eq!(onnx_type(ElementType::Bf16), OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
        assert_eq!(onnx_type(ElementType::String), OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING);
        assert_eq!(onnx_type(ElementType::I2), OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT2);
        assert_eq!(element_type(last + 1), None);
    }
}
