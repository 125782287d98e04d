//! `pagoda_tensor`.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::args;
use super::error::{pagoda_error, pagoda_status};
use super::handle::{Kind, Object, Table};
use super::{boundary, freeing, reading};
use crate::error::{Error, Result};
use crate::tensor::{ElementType, Tensor, element_count};

/// The type of the elements of a tensor. The numbers are those of ONNX (TensorProto.DataType).
pub type pagoda_element_type = i32;

/// Not a tensor (some models have sequences or maps as outputs), or a type that this library does not know.
pub const PAGODA_ELEMENT_TYPE_UNDEFINED: pagoda_element_type = 0;
/// 32-bit float.
pub const PAGODA_ELEMENT_TYPE_F32: pagoda_element_type = 1;
/// Unsigned 8-bit integer.
pub const PAGODA_ELEMENT_TYPE_U8: pagoda_element_type = 2;
/// Signed 8-bit integer.
pub const PAGODA_ELEMENT_TYPE_I8: pagoda_element_type = 3;
/// Unsigned 16-bit integer.
pub const PAGODA_ELEMENT_TYPE_U16: pagoda_element_type = 4;
/// Signed 16-bit integer.
pub const PAGODA_ELEMENT_TYPE_I16: pagoda_element_type = 5;
/// Signed 32-bit integer.
pub const PAGODA_ELEMENT_TYPE_I32: pagoda_element_type = 6;
/// Signed 64-bit integer.
pub const PAGODA_ELEMENT_TYPE_I64: pagoda_element_type = 7;
/// UTF-8 text.
pub const PAGODA_ELEMENT_TYPE_STRING: pagoda_element_type = 8;
/// Boolean, one byte, 0 or 1.
pub const PAGODA_ELEMENT_TYPE_BOOL: pagoda_element_type = 9;
/// 16-bit float (IEEE half).
pub const PAGODA_ELEMENT_TYPE_F16: pagoda_element_type = 10;
/// 64-bit float.
pub const PAGODA_ELEMENT_TYPE_F64: pagoda_element_type = 11;
/// Unsigned 32-bit integer.
pub const PAGODA_ELEMENT_TYPE_U32: pagoda_element_type = 12;
/// Unsigned 64-bit integer.
pub const PAGODA_ELEMENT_TYPE_U64: pagoda_element_type = 13;
/// Two 32-bit floats.
pub const PAGODA_ELEMENT_TYPE_COMPLEX64: pagoda_element_type = 14;
/// Two 64-bit floats.
pub const PAGODA_ELEMENT_TYPE_COMPLEX128: pagoda_element_type = 15;
/// 16-bit float with the exponent of a 32-bit float (bfloat16).
pub const PAGODA_ELEMENT_TYPE_BF16: pagoda_element_type = 16;
/// 8-bit float, 4 bits of exponent, no infinity.
pub const PAGODA_ELEMENT_TYPE_F8E4M3FN: pagoda_element_type = 17;
/// 8-bit float, 4 bits of exponent, no infinity, no negative zero.
pub const PAGODA_ELEMENT_TYPE_F8E4M3FNUZ: pagoda_element_type = 18;
/// 8-bit float, 5 bits of exponent.
pub const PAGODA_ELEMENT_TYPE_F8E5M2: pagoda_element_type = 19;
/// 8-bit float, 5 bits of exponent, no infinity, no negative zero.
pub const PAGODA_ELEMENT_TYPE_F8E5M2FNUZ: pagoda_element_type = 20;
/// Unsigned 4-bit integer, two a byte, the first in the low bits.
pub const PAGODA_ELEMENT_TYPE_U4: pagoda_element_type = 21;
/// Signed 4-bit integer, two a byte, the first in the low bits.
pub const PAGODA_ELEMENT_TYPE_I4: pagoda_element_type = 22;
/// 4-bit float, two a byte, the first in the low bits.
pub const PAGODA_ELEMENT_TYPE_F4E2M1: pagoda_element_type = 23;
/// 8-bit power of two, used as a scale.
pub const PAGODA_ELEMENT_TYPE_F8E8M0: pagoda_element_type = 24;
/// Unsigned 2-bit integer, four a byte, the first in the low bits.
pub const PAGODA_ELEMENT_TYPE_U2: pagoda_element_type = 25;
/// Signed 2-bit integer, four a byte, the first in the low bits.
pub const PAGODA_ELEMENT_TYPE_I2: pagoda_element_type = 26;

/// A tensor: an element type, dimensions, and memory. The memory belongs to Pagoda, to the caller or to ONNX Runtime.
/// Runs read and write it in place. A tensor may be freed while a run uses it: the memory is released when the run
/// ends.
pub struct pagoda_tensor {
    _private: [u8; 0],
}

/// Called once, on any thread, when Pagoda no longer uses memory that the caller lent.
pub type pagoda_release_callback = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

impl Object for Tensor {
    type C = pagoda_tensor;
    const KIND: Kind = Kind::Tensor;

    fn table() -> &'static Table<Self> {
        static TABLE: Table<Tensor> = Table::new();
        &TABLE
    }
}

/// Returns the name of an element type, e.g. "f32"; "undefined" for an unknown number.
///
/// Ownership: the text is static. Threads: any. Errors: none.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_element_type_name(r#type: pagoda_element_type) -> *const c_char {
    reading("pagoda_element_type_name", c"undefined", || {
        Ok(ElementType::from_number(r#type).map_or(c"undefined", ElementType::c_name))
    })
    .as_ptr()
}

/// Makes a tensor with its own memory, aligned to 64 bytes. The elements are zeros or empty strings.
///
/// Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT for an unknown type, a negative
/// dimension, a shape that overflows, a NULL; CAPACITY if there is not enough memory.
///
/// # Safety
/// `dims` has `rank` elements; `tensor` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_new(
    r#type: pagoda_element_type,
    dims: *const i64,
    rank: usize,
    tensor: *mut *mut pagoda_tensor,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_new", error, || {
            let out = args::out(tensor, "tensor")?;
            let made = Tensor::zeros(element_type(r#type)?, args::dims(dims, rank)?)?;
            out.write(Arc::new(made).insert()?);
            Ok(())
        })
    }
}

/// Makes a tensor over memory of the caller, without a copy. `data` must be aligned for the type. It must stay valid
/// until `release` is called; with `release` NULL, until the tensor is freed and every run that uses it has ended. If
/// this fails, `release` is not called.
///
/// Ownership: the caller frees the tensor, and keeps the memory. Threads: any. Errors: INVALID_ARGUMENT for an unknown
/// type, strings, a negative dimension, a shape that overflows, too few bytes, a misaligned pointer, a NULL.
///
/// # Safety
/// `dims` has `rank` elements, `data` has `bytes` bytes; `tensor` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_borrow(
    r#type: pagoda_element_type,
    dims: *const i64,
    rank: usize,
    data: *mut c_void,
    bytes: usize,
    release: pagoda_release_callback,
    user_data: *mut c_void,
    tensor: *mut *mut pagoda_tensor,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_borrow", error, || {
            let out = args::out(tensor, "tensor")?;
            let lender = Arc::new(Lender { release, user_data, lent: AtomicBool::new(false) });
            let (element, dims) = (element_type(r#type)?, args::dims(dims, rank)?);
            let made = Tensor::from_memory(element, dims, data, bytes, Box::new(Arc::clone(&lender)))?;
            let handle = Arc::new(made).insert()?;
            lender.lent.store(true, Ordering::Release);
            out.write(handle);
            Ok(())
        })
    }
}

/// Makes a tensor with a copy of strings. `lengths` has the number of bytes of each string; the strings may then
/// contain NULs and need no NUL at the end. With `lengths` NULL each string ends at its NUL.
///
/// Ownership: the caller frees the tensor. Threads: any. Errors: INVALID_ARGUMENT if `count` does not match the
/// dimensions, for a NULL, and for text that is not UTF-8.
///
/// # Safety
/// `values` has `count` elements, each a C string or as long as `lengths` says; `dims` has `rank` elements; `tensor`
/// and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_new_strings(
    values: *const *const c_char,
    lengths: *const usize,
    count: usize,
    dims: *const i64,
    rank: usize,
    tensor: *mut *mut pagoda_tensor,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_new_strings", error, || {
            let out = args::out(tensor, "tensor")?;
            let dims = args::dims(dims, rank)?;
            let needed = element_count(ElementType::String, dims)?;
            if count != needed {
                return Err(Error::invalid("count", format!("{count} strings given, but dims {dims:?} hold {needed}")));
            }
            let values = args::slice(values, count, "values")?.iter().enumerate();
            let strings = values.map(|(index, &value)| {
                let argument = format!("values[{index}]");
                let text = match lengths.as_ref() {
                    None => args::text(value, argument)?,
                    Some(_) => args::text_of_length(value, *lengths.add(index), argument)?,
                };
                Ok(text.to_owned())
            });
            let made = Tensor::from_strings(dims, strings.collect::<Result<_>>()?)?;
            out.write(Arc::new(made).insert()?);
            Ok(())
        })
    }
}

/// Gets the element type of a tensor.
///
/// Ownership: the caller keeps the tensor. Threads: any. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `type` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_type(
    tensor: *const pagoda_tensor,
    r#type: *mut pagoda_element_type,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_type", error, || {
            let (tensor, out) = (Tensor::get(tensor, "tensor")?, args::out(r#type, "type")?);
            out.write(tensor.element_type() as pagoda_element_type);
            Ok(())
        })
    }
}

/// Gets the dimensions of a tensor.
///
/// Ownership: `dims` belongs to the tensor and is valid until the tensor is freed. Threads: any. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a NULL.
///
/// # Safety
/// `dims`, `rank` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_dims(
    tensor: *const pagoda_tensor,
    dims: *mut *const i64,
    rank: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_dims", error, || {
            let tensor = Tensor::get(tensor, "tensor")?;
            let (out_dims, out_rank) = (args::out(dims, "dims")?, args::out(rank, "rank")?);
            out_dims.write(tensor.dims().as_ptr());
            out_rank.write(tensor.dims().len());
            Ok(())
        })
    }
}

/// Gets the memory of a tensor. It may be read and written while no run uses the tensor.
///
/// Ownership: the memory belongs to the tensor and is valid until the tensor is freed. Threads: any; the caller orders
/// its own reads and writes. Errors: INVALID_HANDLE; INVALID_ARGUMENT for a NULL; UNSUPPORTED for strings and for
/// tensors on a GPU.
///
/// # Safety
/// `data`, `bytes` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_data(
    tensor: *const pagoda_tensor,
    data: *mut *mut c_void,
    bytes: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_data", error, || {
            let tensor = Tensor::get(tensor, "tensor")?;
            let (out_data, out_bytes) = (args::out(data, "data")?, args::out(bytes, "bytes")?);
            let (data, bytes) = tensor.memory().map_err(|error| error.about("tensor"))?;
            out_data.write(data);
            out_bytes.write(bytes);
            Ok(())
        })
    }
}

/// Gets one element of a string tensor: `length` bytes of UTF-8, without a NUL at the end.
///
/// Ownership: the text belongs to the tensor and is valid until the tensor is freed. Threads: any. Errors:
/// INVALID_HANDLE; INVALID_ARGUMENT for a NULL, an index out of range, or a tensor of numbers.
///
/// # Safety
/// `text`, `length` and `error` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagoda_tensor_string(
    tensor: *const pagoda_tensor,
    index: usize,
    text: *mut *const c_char,
    length: *mut usize,
    error: *mut *mut pagoda_error,
) -> pagoda_status {
    // SAFETY: the caller keeps the contract above; everything else is checked.
    unsafe {
        boundary("pagoda_tensor_string", error, || {
            let tensor = Tensor::get(tensor, "tensor")?;
            let (out_text, out_length) = (args::out(text, "text")?, args::out(length, "length")?);
            let strings = tensor.as_strings().map_err(|error| error.about("tensor"))?;
            let string = strings.get(index).ok_or_else(|| {
                Error::invalid("index", format!("{index} is beyond the {} strings of this tensor", strings.len()))
            })?;
            out_text.write(string.as_ptr().cast());
            out_length.write(string.len());
            Ok(())
        })
    }
}

/// Frees a tensor. NULL is allowed. A run that uses the tensor continues; the memory is released when it ends.
///
/// Ownership: takes the tensor. Threads: any. Errors: INVALID_HANDLE, which is also logged.
#[unsafe(no_mangle)]
pub extern "C" fn pagoda_tensor_free(tensor: *mut pagoda_tensor) -> pagoda_status {
    freeing("pagoda_tensor_free", || Tensor::remove(tensor, "tensor"))
}

pub(super) fn element_type(number: pagoda_element_type) -> Result<ElementType> {
    ElementType::from_number(number).ok_or_else(|| {
        Error::invalid("type", format!("{number} is not an element type; they are the PAGODA_ELEMENT_TYPE_... numbers"))
    })
}

/// Who lent memory to a tensor.
struct Lender {
    release: pagoda_release_callback,
    user_data: *mut c_void,
    /// Set when nothing can fail any more: until then the memory is still the caller's alone.
    lent: AtomicBool,
}

// SAFETY: the header says that the callback is called from any thread.
unsafe impl Send for Lender {}
// SAFETY: as above.
unsafe impl Sync for Lender {}

impl Drop for Lender {
    fn drop(&mut self) {
        if let Some(release) = self.release.filter(|_| self.lent.load(Ordering::Acquire)) {
            // SAFETY: the caller gave the two for this call, which happens once.
            unsafe { release(self.user_data) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_constants_are_the_types() {
        assert_eq!(PAGODA_ELEMENT_TYPE_F32, ElementType::F32 as i32);
        assert_eq!(PAGODA_ELEMENT_TYPE_STRING, ElementType::String as i32);
        assert_eq!(PAGODA_ELEMENT_TYPE_F16, ElementType::F16 as i32);
        assert_eq!(PAGODA_ELEMENT_TYPE_BF16, ElementType::Bf16 as i32);
        assert_eq!(PAGODA_ELEMENT_TYPE_F8E8M0, ElementType::F8E8M0 as i32);
        assert_eq!(PAGODA_ELEMENT_TYPE_I2, ElementType::I2 as i32);
        assert!(element_type(PAGODA_ELEMENT_TYPE_UNDEFINED).is_err());
    }
}
