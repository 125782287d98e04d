//! The tensors of one call: memory that ONNX Runtime owns, on the device of the operator's execution provider.

use std::ffi::c_void;
use std::marker::PhantomData;

use super::error::OpError;

/// An input tensor.
pub struct InputTensor<'a> {
    /// The name in the operator's specification.
    pub name: &'static str,
    /// The shape.
    pub dims: Vec<usize>,
    /// The first element. Null only if there are no elements.
    pub data: *const c_void,
    /// The size in bytes.
    pub(super) bytes: usize,
    /// The call that the tensor belongs to.
    pub(super) call: PhantomData<&'a ()>,
}

impl<'a> InputTensor<'a> {
    /// The shape, or an error unless the tensor has `N` dimensions.
    pub fn shape<const N: usize>(&self) -> Result<[usize; N], OpError> {
        self.dims.as_slice().try_into().map_err(|_| {
            OpError::invalid(format!(
                "{}: {N} dimensions expected, got {} ({:?})",
                self.name,
                self.dims.len(),
                self.dims
            ))
        })
    }

    /// Rejects a tensor of another shape.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<(), OpError> {
        if self.dims != shape {
            return Err(OpError::invalid(format!("{}: shape {:?}, expected {shape:?}", self.name, self.dims)));
        }
        Ok(())
    }

    /// Rejects a tensor that is not a list of `len` elements. `reason` tells the caller where the length comes from.
    pub fn expect_len(&self, len: usize, reason: &str) -> Result<(), OpError> {
        let [found] = self.shape()?;
        if found != len {
            return Err(OpError::invalid(format!("{}: {found} numbers, expected {len}, {reason}", self.name)));
        }
        Ok(())
    }

    /// The device address of the first element, for an operator of the CUDA provider.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The elements, for an operator of the CPU provider.
    ///
    /// # Safety
    /// The tensor is in host memory. `T` is the element type that the operator declares for this input. Nothing writes to
    /// the tensor while the slice lives.
    pub unsafe fn slice<T>(&self) -> &'a [T] {
        let len = self.dims.iter().product();
        if len == 0 {
            return &[];
        }
        // SAFETY: ONNX Runtime's tensors are contiguous, aligned for their type, and live for the whole call.
        unsafe { std::slice::from_raw_parts(self.data.cast(), len) }
    }
}

/// An output tensor.
pub struct OutputTensor {
    /// The name in the operator's specification.
    pub name: &'static str,
    /// The first element. Null only if there are no elements.
    pub data: *mut c_void,
    /// The size in bytes.
    pub(super) bytes: usize,
}

impl OutputTensor {
    /// Rejects inputs whose memory overlaps the output: a host can bind any memory to either.
    pub fn check_disjoint<'a>(&self, inputs: impl IntoIterator<Item = &'a InputTensor<'a>>) -> Result<(), OpError> {
        for input in inputs {
            self.check_range(input.name, input.data.addr(), input.bytes)?;
        }
        Ok(())
    }

    /// Rejects another output whose memory overlaps this one.
    pub fn check_disjoint_output(&self, other: &OutputTensor) -> Result<(), OpError> {
        self.check_range(other.name, other.data.addr(), other.bytes)
    }

    fn check_range(&self, name: &str, start: usize, bytes: usize) -> Result<(), OpError> {
        let own = self.data.addr();
        if bytes > 0 && start < own + self.bytes && own < start + bytes {
            let message = format!("{name}: its memory overlaps that of the output {}: bind them apart", self.name);
            return Err(OpError::invalid(message));
        }
        Ok(())
    }

    /// The device address of the first element, for an operator of the CUDA provider.
    pub fn address(&self) -> u64 {
        self.data.addr() as u64
    }

    /// The elements, for an operator of the CPU provider.
    ///
    /// # Safety
    /// The tensor is in host memory. `T` is the element type that the operator declares for this output and has no invalid
    /// bit patterns. Nothing else reads or writes the output while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "ONNX Runtime owns the memory; the contract forbids a second slice")]
    pub unsafe fn slice_mut<T>(&self) -> &mut [T] {
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: ONNX Runtime's tensors are contiguous, aligned for their type, and live for the whole call.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.bytes / size_of::<T>()) }
    }
}
