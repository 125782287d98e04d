//! The process's one ONNX Runtime: its function table, its environment, its log.

use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ort_sys::{
    OrtAllocator, OrtAllocatorType, OrtApi, OrtEnv, OrtErrorCode, OrtLoggingFunction, OrtLoggingLevel, OrtMemType,
    OrtMemoryInfo, OrtStatus, OrtStatusPtr,
};

use super::library::{self, Loaded};
use crate::error::{Error, Result, Status};
use crate::sync::Mutex;

/// ONNX Runtime as this process uses it. Made once and kept until the process ends.
pub(crate) struct Api {
    table: &'static OrtApi,
    path: PathBuf,
    /// The version of the library, e.g. `1.31.1`.
    pub(crate) version: String,
    env: *mut OrtEnv,
    /// Describes memory of the host.
    pub(crate) host: *mut OrtMemoryInfo,
    /// Allocates what ONNX Runtime returns to us: names, file names.
    pub(crate) allocator: *mut OrtAllocator,
}

// SAFETY: ONNX Runtime's environment, memory information and default allocator may be used from any thread.
unsafe impl Send for Api {}
// SAFETY: as above.
unsafe impl Sync for Api {}

static API: OnceLock<Api> = OnceLock::new();

/// The file that the process's ONNX Runtime was loaded from, once a model was opened.
pub fn onnxruntime_path() -> Option<&'static Path> {
    API.get().map(|api| api.path.as_path())
}

/// The process's ONNX Runtime; the first call loads it from `path`, or from where it is found.
pub(crate) fn api(path: Option<&Path>) -> Result<&'static Api> {
    static LOADING: Mutex<()> = Mutex::new(());
    if API.get().is_none() {
        let one_at_a_time = LOADING.lock();
        if API.get().is_none() {
            // A failure is not kept: the next caller may name another path.
            let loaded = Api::new(library::load(path)?)?;
            let api = API.get_or_init(|| loaded);
            // Logged without the lock: the log callback may open a model.
            drop(one_at_a_time);
            log::info!("ONNX Runtime {} from {}", api.version, api.path.display());
        }
    }
    let api = API.get().expect("set above");
    match path {
        Some(path) if !same_file(path, &api.path) => Err(Error::invalid(
            "options.onnxruntime_path",
            format!(
                "{} differs from {}, which this process uses already: one process, one ONNX Runtime",
                path.display(),
                api.path.display()
            ),
        )),
        _ => Ok(api),
    }
}

fn same_file(a: &Path, b: &Path) -> bool {
    a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

impl Api {
    fn new(Loaded { api: table, path, version }: Loaded) -> Result<Self> {
        let mut env = std::ptr::null_mut();
        let mut host = std::ptr::null_mut();
        let mut allocator = std::ptr::null_mut();
        // SAFETY: plain calls; the out pointers are live and the logger is a static function.
        unsafe {
            let warning = OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING;
            let no_state = std::ptr::null_mut();
            // The level is read as a number: a later ONNX Runtime may have some that the Rust enumeration lacks.
            let on_log = std::mem::transmute::<LogFn, OrtLoggingFunction>(on_log);
            check(table, (table.CreateEnvWithCustomLogger)(on_log, no_state, warning, c"pagoda".as_ptr(), &mut env))?;
            check(table, (table.DisableTelemetryEvents)(env))?;
            let (arena, default) = (OrtAllocatorType::OrtArenaAllocator, OrtMemType::OrtMemTypeDefault);
            check(table, (table.CreateCpuMemoryInfo)(arena, default, &mut host))?;
            check(table, (table.GetAllocatorWithDefaultOptions)(&mut allocator))?;
        }
        Ok(Self { table, path, version, env, host, allocator })
    }

    /// The functions.
    pub(crate) fn table(&self) -> &'static OrtApi {
        self.table
    }

    /// The environment every session lives in.
    pub(crate) fn env(&self) -> *mut OrtEnv {
        self.env
    }

    /// A status as a result.
    pub(crate) fn check(&self, status: OrtStatusPtr) -> Result<()> {
        check(self.table, status)
    }

    /// Takes a text that ONNX Runtime allocated.
    ///
    /// # Safety
    /// `text` was allocated by `self.allocator` and is not used afterwards.
    pub(crate) unsafe fn take_text(&self, text: *mut c_char) -> String {
        // SAFETY: a C string by contract; freed once.
        unsafe {
            let owned = CStr::from_ptr(text).to_string_lossy().into_owned();
            let _ = self.check((self.table.AllocatorFree)(self.allocator, text.cast()));
            owned
        }
    }
}

type ErrorCodeFn = unsafe extern "system" fn(*const OrtStatus) -> OrtErrorCode;
type ErrorNumberFn = unsafe extern "system" fn(*const OrtStatus) -> i32;

fn check(table: &OrtApi, status: OrtStatusPtr) -> Result<()> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: the status is ours to read and to release, once.
    let (code, message) = unsafe {
        let message = CStr::from_ptr((table.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        // Read as a number: a later ONNX Runtime may have codes that the Rust enumeration lacks.
        let code = std::mem::transmute::<ErrorCodeFn, ErrorNumberFn>(table.GetErrorCode)(status.0);
        (table.ReleaseStatus)(status.0);
        (code, message)
    };
    let is = |known: OrtErrorCode| code == known as i32;
    let status = if is(OrtErrorCode::ORT_INVALID_ARGUMENT) {
        Status::InvalidArgument
    } else if is(OrtErrorCode::ORT_NO_SUCHFILE) || is(OrtErrorCode::ORT_NOT_FOUND) {
        Status::NotFound
    } else if is(OrtErrorCode::ORT_NOT_IMPLEMENTED) {
        Status::Unsupported
    } else {
        Status::Runtime
    };
    Err(Error::new(status, message))
}

type LogFn = unsafe extern "system" fn(*mut c_void, i32, *const c_char, *const c_char, *const c_char, *const c_char);

/// Forwards ONNX Runtime's log to ours.
unsafe extern "system" fn on_log(
    _: *mut c_void,
    severity: i32,
    _category: *const c_char,
    _logid: *const c_char,
    location: *const c_char,
    message: *const c_char,
) {
    let level = match severity {
        0 => log::Level::Trace,
        1 => log::Level::Debug,
        2 => log::Level::Warn,
        _ => log::Level::Error,
    };
    let text = |pointer: *const c_char| {
        if pointer.is_null() {
            return "".into();
        }
        // SAFETY: ONNX Runtime passes C strings, valid for the call.
        unsafe { CStr::from_ptr(pointer) }.to_string_lossy()
    };
    // A logger that panics must not unwind into C++.
    let _ =
        std::panic::catch_unwind(|| log::log!(target: "onnxruntime", level, "{} ({})", text(message), text(location)));
}
