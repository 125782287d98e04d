//! Errors of operators, and their conversion from and to `OrtStatus`.

use std::any::Any;
use std::ffi::{CStr, CString};

use ort_sys::{OrtApi, OrtErrorCode, OrtStatusPtr};
use pagoda_kernels::InputError;
use pagoda_kernels::cuda::CudaError;

/// Why an operator rejected a call or failed.
pub struct OpError {
    code: OrtErrorCode,
    message: String,
}

impl OpError {
    /// An input, an attribute or a binding is not usable.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { code: OrtErrorCode::ORT_INVALID_ARGUMENT, message: message.into() }
    }

    /// ONNX Runtime, the driver or a table returned an error.
    pub fn failed(message: String) -> Self {
        Self { code: OrtErrorCode::ORT_FAIL, message }
    }

    /// A panic that was caught at the boundary to ONNX Runtime.
    pub fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        Self { code: OrtErrorCode::ORT_RUNTIME_EXCEPTION, message: format!("internal error (a panic): {text}") }
    }

    /// The error message.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The error as a status of ONNX Runtime, which then owns it.
    pub fn into_status(self, api: &OrtApi) -> OrtStatusPtr {
        let message = CString::new(self.message.replace('\0', "\\0")).unwrap_or_default();
        // SAFETY: the message is a C string for the length of the call; ONNX Runtime copies it.
        unsafe { (api.CreateStatus)(self.code, message.as_ptr()) }
    }
}

impl From<InputError> for OpError {
    fn from(error: InputError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<CudaError> for OpError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Unsupported(message) => Self::invalid(format!("on the GPU: {message}")),
            other => Self::failed(other.to_string()),
        }
    }
}

/// Turns a status into a result, and releases it.
pub fn check(api: &OrtApi, status: OrtStatusPtr) -> Result<(), OpError> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: this function owns the status, reads it and releases it once.
    unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        (api.ReleaseStatus)(status.0);
        Err(OpError::failed(message))
    }
}
