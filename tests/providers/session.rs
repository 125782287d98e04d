//! Sessions on the CUDA provider that capture their runs, through ONNX Runtime's C interface.

use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ORT_API_VERSION, OrtAllocatorType, OrtApi, OrtApiBase, OrtIoBinding,
    OrtMemType, OrtMemoryInfo, OrtSession, OrtStatusPtr, OrtValue,
};
use pagoda::runtime::onnxruntime_path;
use pagoda::{Model, Provider};
use pagoda_custom_ops::Providers;

use crate::operators::options;

/// A tensor on the device.
pub struct Memory {
    pub memory: CudaSlice<u8>,
    pub address: u64,
}

impl Memory {
    pub fn new(stream: &Arc<CudaStream>, content: &[u8]) -> Self {
        let memory = stream.clone_htod(content).unwrap();
        let address = memory.device_ptr(stream).0;
        stream.synchronize().unwrap();
        Self { memory, address }
    }
}

/// Tensors on the device that a session's runs read and write.
pub struct Binding<'a> {
    session: &'a Session,
    raw: *mut OrtIoBinding,
}

impl<'a> Binding<'a> {
    /// One without tensors.
    pub fn new(session: &'a Session) -> Self {
        let mut raw = null_mut();
        // SAFETY: the session is live.
        check_status(session.api, unsafe { (session.api.CreateIoBinding)(session.raw, &mut raw) });
        Self { session, raw }
    }

    /// Binds an input.
    pub fn input(&self, name: &str, memory: &Memory, element: i32, dims: &[i64]) {
        let (api, name) = (self.session.api, CString::new(name).unwrap());
        let value = self.session.value(memory, element, dims);
        // SAFETY: binding, name and value are live; the binding keeps what it needs of the value.
        check_status(api, unsafe { (api.BindInput)(self.raw, name.as_ptr(), value) });
        // SAFETY: ours, released once.
        unsafe { (api.ReleaseValue)(value) };
    }

    /// Binds an output.
    pub fn output(&self, name: &str, memory: &Memory, element: i32, dims: &[i64]) {
        let (api, name) = (self.session.api, CString::new(name).unwrap());
        let value = self.session.value(memory, element, dims);
        // SAFETY: as above.
        check_status(api, unsafe { (api.BindOutput)(self.raw, name.as_ptr(), value) });
        // SAFETY: as above.
        unsafe { (api.ReleaseValue)(value) };
    }

    /// Runs, and waits for it.
    pub fn run(&self) {
        let Self { session, raw } = *self;
        // SAFETY: session and binding are live.
        check_status(session.api, unsafe { (session.api.RunWithBinding)(session.raw, null(), raw) });
    }
}

impl Drop for Binding<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, released once.
        unsafe { (self.session.api.ReleaseIoBinding)(self.raw) };
    }
}

/// A session on the CUDA provider that captures its runs.
pub struct Session {
    api: &'static OrtApi,
    raw: *mut OrtSession,
    device: *mut OrtMemoryInfo,
}

impl Session {
    /// Opens a model.
    pub fn open(model: &[u8]) -> Self {
        // Pagoda loads ONNX Runtime, reports its path, and creates the environment.
        drop(Model::open_memory(model, &options(Provider::Cuda)).unwrap());
        let path = onnxruntime_path().unwrap();
        let (mut env, mut settings, mut cuda) = (null_mut(), null_mut(), null_mut());
        let (mut raw, mut device) = (null_mut(), null_mut());
        let key = c"enable_cuda_graph".as_ptr();
        // SAFETY: the library is loaded already and stays; every pointer is live for its call, and what is made is released
        // once.
        unsafe {
            let library = libloading::Library::new(path).unwrap();
            let base = *library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0").unwrap();
            std::mem::forget(library);
            let api: &'static OrtApi = &*((*base()).GetApi)(ORT_API_VERSION);
            let level = ort_sys::OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING;
            check_status(api, (api.CreateEnv)(level, c"test".as_ptr(), &mut env));
            check_status(api, (api.CreateSessionOptions)(&mut settings));
            check_status(api, (api.CreateCUDAProviderOptions)(&mut cuda));
            check_status(api, (api.UpdateCUDAProviderOptions)(cuda, &key, &c"1".as_ptr(), 1));
            check_status(api, (api.SessionOptionsAppendExecutionProvider_CUDA_V2)(settings, cuda));
            (api.ReleaseCUDAProviderOptions)(cuda);
            check_status(api, pagoda_custom_ops::register(api, settings, Providers::All));
            check_status(
                api,
                (api.CreateSessionFromArray)(env, model.as_ptr().cast(), model.len(), settings, &mut raw),
            );
            (api.ReleaseSessionOptions)(settings);
            let (kind, default) = (OrtAllocatorType::OrtDeviceAllocator, OrtMemType::OrtMemTypeDefault);
            check_status(api, (api.CreateMemoryInfo)(c"Cuda".as_ptr(), kind, 0, default, &mut device));
            Self { api, raw, device }
        }
    }

    /// A value over memory of the device.
    fn value(&self, memory: &Memory, element: i32, dims: &[i64]) -> *mut OrtValue {
        let mut value = null_mut();
        // SAFETY: the memory is as long as the shape says and outlives the binding; ONNX Runtime has every element type that
        // Pagoda has, by the same numbers.
        check_status(self.api, unsafe {
            (self.api.CreateTensorWithDataAsOrtValue)(
                self.device,
                memory.address as *mut _,
                memory.memory.len(),
                dims.as_ptr(),
                dims.len(),
                std::mem::transmute::<i32, OnnxType>(element),
                &mut value,
            )
        });
        value
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: ours, released once.
        unsafe {
            (self.api.ReleaseSession)(self.raw);
            (self.api.ReleaseMemoryInfo)(self.device);
        }
    }
}

fn check_status(api: &OrtApi, status: OrtStatusPtr) {
    // SAFETY: the message belongs to the status, which is not released: the test ends here.
    assert!(status.0.is_null(), "{}", unsafe { CStr::from_ptr((api.GetErrorMessage)(status.0)) }.to_string_lossy());
}
