//! Finding and loading the ONNX Runtime library.

use std::error::Error as _;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::Library;
use ort_sys::{ORT_API_VERSION, OrtApi, OrtApiBase};

use crate::error::{Error, Result, Status};

/// The environment variable that chooses the library without a change to the program.
const VARIABLE: &str = "PAGODA_ONNXRUNTIME";

/// The file names of the library, as distributions, PyPI's wheel and our own make install it.
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
    let about = |error: Error| if path.is_some() { error.about("options.onnxruntime_path") } else { error };
    let mut tried = Vec::new();
    for candidate in candidates(path) {
        // SAFETY: loading a library runs its initialisers; it is the ONNX Runtime that the caller or the system names.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => return bind(library, candidate).map_err(about),
            Err(error) => {
                // The loader's own message names the missing file or symbol.
                let reason = error.source().map_or_else(|| error.to_string(), |source| source.to_string());
                tried.push(format!("{} ({reason})", candidate.display()));
            }
        }
    }
    // A program that links Pagoda statically has no libpagoda.so.
    let us = our_file().map_or_else(|| "libpagoda.so".to_owned(), |file| file.display().to_string());
    let advice = "set onnxruntime_path in the options or the variable PAGODA_ONNXRUNTIME, or put the library beside";
    let message = format!("ONNX Runtime can not be loaded; tried {}; {advice} {us}", tried.join(", "));
    Err(about(Error::new(Status::NotFound, message)))
}

/// Switches ONNX Runtime's telemetry off. From 1.29 on its official builds send telemetry: a file in the user's cache,
/// a thread, uploads. The API call that disables it needs the environment, whose creation is already reported; only
/// this variable stops all of it. A value that is already set is kept.
fn silence_telemetry() {
    const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";
    if std::env::var_os(VARIABLE).is_none() {
        // SAFETY: a thread that reads the environment in C at the same time could see it half changed. This happens
        // once, when the first model is opened; the documentation tells programs with threads to set the variable
        // before they start them.
        unsafe { std::env::set_var(VARIABLE, "1") };
    }
}

/// Where to look, in order. A path that was given is the only one: a fallback would hide a mistake.
fn candidates(path: Option<&Path>) -> Vec<PathBuf> {
    if let Some(path) = path {
        return vec![path.to_owned()];
    }
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        return vec![path.into()];
    }
    let near = our_file().map(|file| folders_near(&file)).unwrap_or_default();
    let near = near.into_iter().flat_map(|folder| NAMES.map(|name| folder.join(name)));
    near.filter(|path| path.exists()).chain(NAMES.map(PathBuf::from)).collect()
}

/// The folder of `file`; for a program in `bin` also the `lib` beside it, where things are installed. The subfolder
/// `pagoda` of each comes first: the library that was installed with Pagoda is preferred to that of another package in
/// the same `lib`.
fn folders_near(file: &Path) -> Vec<PathBuf> {
    let Some(folder) = file.parent() else { return Vec::new() };
    let lib = folder.ends_with("bin").then(|| folder.with_file_name("lib"));
    let folders = std::iter::once(folder.to_owned()).chain(lib);
    folders.flat_map(|folder| [folder.join("pagoda"), folder]).collect()
}

/// The file this code was loaded from: libpagoda.so, or the program that it is part of.
fn our_file() -> Option<PathBuf> {
    let file = file_of(our_file as *const c_void)?;
    // A program that was found by PATH has only its name here.
    let file = if file.components().count() == 1 { std::env::current_exe().ok()? } else { file };
    std::fs::canonicalize(file).ok()
}

/// The file that the code at `address` was loaded from.
fn file_of(address: *const c_void) -> Option<PathBuf> {
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
    let mut info = DlInfo { file: null(), base: null_mut(), symbol: null(), address: null_mut() };
    // SAFETY: `info` has the layout of Dl_info; the name it is given points into the loader's own list.
    unsafe {
        if dladdr(address, &mut info) == 0 || info.file.is_null() {
            return None;
        }
        Some(OsString::from_vec(CStr::from_ptr(info.file).to_bytes().to_vec()).into())
    }
}

fn bind(library: Library, path: PathBuf) -> Result<Loaded> {
    let unusable = |message: String| Error::new(Status::Unsupported, format!("{}: {message}", path.display()));
    // SAFETY: the symbol has had this type since the first release.
    let base = unsafe { library.get::<unsafe extern "C" fn() -> *const OrtApiBase>(b"OrtGetApiBase\0") };
    let base = *base.map_err(|_| unusable("this library is not ONNX Runtime (it has no OrtGetApiBase)".to_owned()))?;
    // SAFETY: the base, the version's text and the table are static in the library, which is never unloaded.
    let (version, api) = unsafe {
        let base = &*base();
        let version = CStr::from_ptr((base.GetVersionString)()).to_string_lossy().into_owned();
        (version, (base.GetApi)(ORT_API_VERSION).as_ref())
    };
    let api =
        api.ok_or_else(|| unusable(format!("ONNX Runtime 1.{ORT_API_VERSION} or later is needed, this is {version}")))?;
    // The path where the loader found it.
    let path = file_of(base as *const c_void).unwrap_or(path);
    // Never unloaded: sessions, values and threads of the library live until the process ends.
    std::mem::forget(library);
    Ok(Loaded { api, path, version })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_programs_look_in_lib() {
        let near = |file: &str| folders_near(Path::new(file));
        let paths = |folders: &[&str]| folders.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(near("/usr/bin/pagoda"), paths(&["/usr/bin/pagoda", "/usr/bin", "/usr/lib/pagoda", "/usr/lib"]));
        assert_eq!(near("/usr/lib/libpagoda.so.1"), paths(&["/usr/lib/pagoda", "/usr/lib"]));
        assert_eq!(near("/srv/cabin/ranker"), paths(&["/srv/cabin/pagoda", "/srv/cabin"]));
        assert!(near("/").is_empty());
    }
}
