//! ONNX Runtime called as from a C program, without Pagoda: the baseline of the overhead.

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};

use ort_sys::{
    ONNXTensorElementDataType, ORT_API_VERSION, OrtAllocatorType, OrtApi, OrtApiBase, OrtLoggingLevel, OrtMemType,
    OrtSession, OrtStatusPtr, OrtValue,
};
use pagoda::{Error, Result, Status};

/// A session over a model with one input `x` and one output `y`, both f32 `[1, 8]`, with values made beforehand.
pub struct RawSession {
    api: &'static OrtApi,
    session: *mut OrtSession,
    x: *mut OrtValue,
    y: *mut OrtValue,
    // The values point into these.
    _memory: Box<[[f32; 8]; 2]>,
}

impl RawSession {
    /// Opens the model in `bytes` on one thread.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let api = api()?;
        let mut memory = Box::new([[0.0_f32; 8]; 2]);
        let (mut env, mut options, mut session, mut host) = (null_mut(), null_mut(), null_mut(), null_mut());
        let mut values = [null_mut(); 2];
        let dims = [1_i64, 8];
        // SAFETY: calls of ONNX Runtime's C interface in the required order, with live pointers. The objects live until
        // the program ends.
        unsafe {
            let warning = OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING;
            check(api, (api.CreateEnv)(warning, c"bench".as_ptr(), &mut env))?;
            check(api, (api.CreateSessionOptions)(&mut options))?;
            check(api, (api.SetIntraOpNumThreads)(options, 1))?;
            let (data, size) = (bytes.as_ptr().cast(), bytes.len());
            check(api, (api.CreateSessionFromArray)(env, data, size, options, &mut session))?;
            let (arena, default) = (OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault);
            check(api, (api.CreateCpuMemoryInfo)(arena, default, &mut host))?;
            let f32 = ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
            for (value, memory) in values.iter_mut().zip(memory.iter_mut()) {
                let data = memory.as_mut_ptr().cast();
                check(api, (api.CreateTensorWithDataAsOrtValue)(host, data, 32, dims.as_ptr(), 2, f32, value))?;
            }
        }
        Ok(Self { api, session, x: values[0], y: values[1], _memory: memory })
    }

    /// One run, the output bound.
    pub fn run(&self) -> Result<()> {
        let (inputs, outputs): ([*const c_char; 1], [*const c_char; 1]) = ([c"x".as_ptr()], [c"y".as_ptr()]);
        let (x, mut y) = ([self.x.cast_const()], [self.y]);
        // SAFETY: everything is live, and the lengths are those of the arrays.
        let status = unsafe {
            let run = self.api.Run;
            run(self.session, null(), inputs.as_ptr(), x.as_ptr(), 1, outputs.as_ptr(), 1, y.as_mut_ptr())
        };
        check(self.api, status)
    }
}

impl Drop for RawSession {
    fn drop(&mut self) {
        // SAFETY: made in `new`, released once.
        unsafe {
            (self.api.ReleaseValue)(self.x);
            (self.api.ReleaseValue)(self.y);
            (self.api.ReleaseSession)(self.session);
        }
    }
}

/// The API table of the library that Pagoda has loaded: loading it again gives the same one.
fn api() -> Result<&'static OrtApi> {
    let missing = |error: String| Error::new(Status::NotFound, format!("ONNX Runtime for the baseline: {error}"));
    let path = pagoda::runtime::onnxruntime_path().ok_or_else(|| missing("open a model first".to_owned()))?;
    // SAFETY: it is loaded already, so no initialiser runs; the symbol has had this type since the first release.
    unsafe {
        let library = libloading::Library::new(path).map_err(|error| missing(error.to_string()))?;
        let base = library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0");
        let base = base.map_err(|error| missing(error.to_string()))?();
        std::mem::forget(library);
        ((*base).GetApi)(ORT_API_VERSION).as_ref().ok_or_else(|| missing("it is too old".to_owned()))
    }
}

fn check(api: &OrtApi, status: OrtStatusPtr) -> Result<()> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: the status is ours to read and to release, once.
    unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        (api.ReleaseStatus)(status.0);
        Err(Error::new(Status::Runtime, message))
    }
}
