//! A session of a real ONNX Runtime with the operators, through the C interface.

use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, OnceLock, PoisonError};

use ort_sys::{
    ONNXTensorElementDataType as OnnxType, ORT_API_VERSION, OrtAllocatorType, OrtApi, OrtApiBase, OrtEnv,
    OrtLoggingLevel, OrtMemType, OrtSession, OrtStatusPtr, OrtValue,
};
use pagoda_custom_ops::Providers;
use pagoda_custom_ops::side_channel::tables;

/// An input: its name, its dimensions and its elements.
pub struct Numbers<'a>(pub &'a str, pub &'a [i64], pub &'a [i64]);

/// An output: its dimensions and its elements.
#[derive(Debug, PartialEq)]
pub enum Values {
    Floats(Vec<i64>, Vec<f32>),
    Bools(Vec<i64>, Vec<bool>),
}

struct Runtime {
    api: &'static OrtApi,
    env: *mut OrtEnv,
}

// SAFETY: the environment may be used from any thread.
unsafe impl Send for Runtime {}
// SAFETY: as above.
unsafe impl Sync for Runtime {}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let path = std::env::var_os("PAGODA_ONNXRUNTIME").expect("cargo sets the variable");
        // SAFETY: no other thread reads the environment in C: every test waits for this initialisation first. ONNX Runtime's
        // builds send telemetry unless the variable is set.
        unsafe { std::env::set_var("ORT_DISABLE_TELEMETRY", "1") };
        // SAFETY: the library is ONNX Runtime and is never unloaded. The calls match its header.
        unsafe {
            let library = libloading::Library::new(path).expect("`make deps` fetches ONNX Runtime");
            let base = *library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0").unwrap();
            std::mem::forget(library);
            let api: &'static OrtApi = &*((*base()).GetApi)(ORT_API_VERSION);
            let mut env = null_mut();
            let level = OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL;
            check(api, (api.CreateEnv)(level, c"test".as_ptr(), &mut env)).unwrap();
            Runtime { api, env }
        }
    })
}

/// A session of one model.
pub struct Session(*mut OrtSession);

// SAFETY: a session may be run from any thread.
unsafe impl Send for Session {}
// SAFETY: as above.
unsafe impl Sync for Session {}

impl Session {
    /// Opens a model with the tables that `entry` names.
    pub fn open(model: &[u8], entry: Option<&str>) -> Result<Self, String> {
        let Runtime { api, env } = *runtime();
        let (mut options, mut session) = (null_mut(), null_mut());
        // SAFETY: every pointer is live for the call. The options are released once.
        unsafe {
            check(api, (api.CreateSessionOptions)(&mut options))?;
            check(api, (api.SetIntraOpNumThreads)(options, 2))?;
            if let Some(entry) = entry {
                let entry = CString::new(entry).unwrap();
                check(api, (api.AddSessionConfigEntry)(options, tables::ENTRY.as_ptr(), entry.as_ptr()))?;
            }
            check(api, pagoda_custom_ops::register(api, options, Providers::All))?;
            // The first session adds the operators' domain to a global list, which ONNX Runtime does not lock.
            static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
            let one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
            let made = (api.CreateSessionFromArray)(env, model.as_ptr().cast(), model.len(), options, &mut session);
            drop(one);
            (api.ReleaseSessionOptions)(options);
            check(api, made)?;
        }
        Ok(Self(session))
    }

    /// Runs the model once.
    pub fn run(&self, inputs: &[Numbers<'_>], outputs: &[&str]) -> Result<Vec<Values>, String> {
        let api = runtime().api;
        let names = |list: Vec<&str>| list.into_iter().map(|name| CString::new(name).unwrap()).collect::<Vec<_>>();
        let pointers = |list: &[CString]| list.iter().map(|name| name.as_ptr()).collect::<Vec<_>>();
        let input_names = names(inputs.iter().map(|input| input.0).collect());
        let output_names = names(outputs.to_vec());
        let owned: Vec<Value> = inputs.iter().map(Value::new).collect();
        let values: Vec<*const OrtValue> = owned.iter().map(|value| value.0.cast_const()).collect();
        let mut results = vec![null_mut(); outputs.len()];
        // SAFETY: every pointer is live for the call.
        check(api, unsafe {
            (api.Run)(
                self.0,
                null(),
                pointers(&input_names).as_ptr(),
                values.as_ptr(),
                values.len(),
                pointers(&output_names).as_ptr(),
                outputs.len(),
                results.as_mut_ptr(),
            )
        })?;
        Ok(results.into_iter().map(|value| Value(value).read()).collect())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (runtime().api.ReleaseSession)(self.0) };
    }
}

struct Value(*mut OrtValue);

impl Value {
    /// A tensor that borrows the elements.
    fn new(Numbers(_, dims, numbers): &Numbers<'_>) -> Self {
        let api = runtime().api;
        let (mut memory, mut value) = (null_mut(), null_mut());
        let (data, element) = (numbers.as_ptr().cast_mut().cast(), OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
        // SAFETY: the elements outlive the value and are only read.
        unsafe {
            let (arena, default) = (OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault);
            check(api, (api.CreateCpuMemoryInfo)(arena, default, &mut memory)).unwrap();
            let (bytes, rank) = (size_of_val(*numbers), dims.len());
            let made =
                (api.CreateTensorWithDataAsOrtValue)(memory, data, bytes, dims.as_ptr(), rank, element, &mut value);
            (api.ReleaseMemoryInfo)(memory);
            check(api, made).unwrap();
        }
        Self(value)
    }

    fn read(&self) -> Values {
        let api = runtime().api;
        let (mut info, mut rank, mut count, mut data) = (null_mut(), 0, 0, null_mut());
        let mut element = OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        // SAFETY: the value is live and has `count` elements of that type.
        unsafe {
            check(api, (api.GetTensorTypeAndShape)(self.0, &mut info)).unwrap();
            check(api, (api.GetDimensionsCount)(info, &mut rank)).unwrap();
            let mut dims = vec![0; rank];
            check(api, (api.GetDimensions)(info, dims.as_mut_ptr(), rank)).unwrap();
            check(api, (api.GetTensorElementType)(info, &mut element)).unwrap();
            check(api, (api.GetTensorShapeElementCount)(info, &mut count)).unwrap();
            (api.ReleaseTensorTypeAndShapeInfo)(info);
            check(api, (api.GetTensorMutableData)(self.0, &mut data)).unwrap();
            match element {
                _ if count == 0 => Values::Floats(dims, vec![]),
                OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT => {
                    Values::Floats(dims, std::slice::from_raw_parts(data.cast(), count).to_vec())
                }
                OnnxType::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL => {
                    Values::Bools(dims, std::slice::from_raw_parts(data.cast(), count).to_vec())
                }
                other => panic!("an output of type {other:?}"),
            }
        }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        // SAFETY: owned, released once.
        unsafe { (runtime().api.ReleaseValue)(self.0) };
    }
}

fn check(api: &OrtApi, status: OrtStatusPtr) -> Result<(), String> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: this function owns the status, reads it and releases it once.
    unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        (api.ReleaseStatus)(status.0);
        Err(message)
    }
}
