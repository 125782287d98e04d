//! Finding and loading the ONNX Runtime library.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use libloading::Library;
use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase};

use crate::error::{Error, Result, Status};

/// What operators of a service set to choose the library without a change to the program.
const VARIABLE: &str = "PAGODA_ONNXRUNTIME";

/// The names the library goes by: what distributions, PyPI's wheel and our own make install it as.
const NAMES: [&str; 2] = ["libonnxruntime.so.1", "libonnxruntime.so"];

/// A loaded ONNX Runtime.
pub(super) struct Loaded {
    pub(super) api: &'static OrtApi,
    pub(super) path: PathBuf,
    pub(super) version: String,
}

/// Loads ONNX Runtime from `path`, or from where it is found.
pub(super) fn load(path: Option<&Path>) -> Result<Loaded> {
    silence_telemetry();
    let mut tried = Vec::new();
    for candidate in candidates(path) {
        // SAFETY: loading a library runs its initialisers; it is the ONNX Runtime that the caller or the system names.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => return bind(library, candidate),
            Err(error) => tried.push(format!("{} ({error})", candidate.display())),
        }
    }
    let advice = "set onnxruntime_path in the options or the variable PAGODA_ONNXRUNTIME, or put the library beside \
                  libpagoda.so";
    let message = format!("ONNX Runtime can not be loaded; tried {}; {advice}", tried.join(", "));
    let error = Error::new(Status::NotFound, message);
    Err(if path.is_some() { error.about("options.onnxruntime_path") } else { error })
}

/// ONNX Runtime's own builds report to their maker from 1.29 on: a file in the user's cache, a thread, uploads. The call
/// that switches it off comes too late, for it needs the environment whose making is the first thing reported; this
/// variable is what stops all of it. Whoever has set it, to whatever, has decided otherwise.
fn silence_telemetry() {
    const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: changing the environment can race with a thread that reads it in C. This happens once, when the first
        // model is opened; the first addition leaves the old list where it was, so a reader sees the old or the new.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// Where to look, in order. A place that was named is the only one: falling back to another would hide a mistake.
fn candidates(path: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let beside = beside_us().into_iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    beside.filter(|path| path.exists()).chain(NAMES.map(PathBuf::from)).collect()
}

/// The folder of the file this code was loaded from: libpagoda.so, or the program that it is part of.
fn beside_us() -> Option<PathBuf> {
    #[repr(C)]
    struct DlInfo {
        file: *const c_char,
        base: *mut c_void,
        symbol: *const c_char,
        address: *mut c_void,
    }
    unsafe extern "C" {
        fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
    }
    let mut info = DlInfo {
        file: std::ptr::null(),
        base: std::ptr::null_mut(),
        symbol: std::ptr::null(),
        address: std::ptr::null_mut(),
    };
    // SAFETY: `info` has the layout of Dl_info; the name it is given points into the loader's own list.
    let file = unsafe {
        if dladdr(beside_us as *const c_void, &mut info) == 0 || info.file.is_null() {
            return None;
        }
        OsString::from_vec(CStr::from_ptr(info.file).to_bytes().to_vec())
    };
    let file = std::fs::canonicalize(file).ok()?;
    file.parent().map(Path::to_owned)
}

fn bind(library: Library, path: PathBuf) -> Result<Loaded> {
    let unusable = |message: String| Error::new(Status::Unsupported, format!("{}: {message}", path.display()));
    // SAFETY: the symbol has had this type since the first release.
    let base = unsafe { library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0") };
    let base = base.map_err(|_| unusable("this library is not ONNX Runtime (it has no OrtGetApiBase)".to_owned()))?;
    // SAFETY: the base, the version's text and the table are static in the library, which is never unloaded.
    let (version, api) = unsafe {
        let base = &*base();
        (
            CStr::from_ptr((base.GetVersionString)()).to_string_lossy().into_owned(),
            (base.GetApi)(ORT_API_VERSION).as_ref(),
        )
    };
    let api =
        api.ok_or_else(|| unusable(format!("ONNX Runtime 1.{ORT_API_VERSION} or later is needed, this is {version}")))?;
    // Sessions, values and threads of the library live until the process ends: it must stay.
    std::mem::forget(library);
    Ok(Loaded { api, path, version })
}
